"""The page of claims: from the results in the docs, and nothing on it that its JSON and their sources do not hold."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import claims
import pytest
from claims import ClaimsFile, _once_per_model, _without_gaps
from evidence import Claim, Evidence, Verdict

from raptor.run import RunError

RESULTS = Path(__file__).parents[2] / "docs" / "results"
DOCS = RESULTS.parents[1] / "paper" / "results"


@pytest.fixture(scope="module")
def committed() -> ClaimsFile:
    return ClaimsFile.read(RESULTS)


def test_the_page_says_what_was_not_run(sweep_folder: Path, tmp_path: Path) -> None:
    results = tmp_path / "results" / "sweep"
    results.mkdir(parents=True)
    for kind in ("json", "md", "png"):
        (results / f"stochastic-depth.{kind}").write_bytes((sweep_folder / f"stochastic-depth.{kind}").read_bytes())
    (tmp_path / "results" / "other.json").write_text(json.dumps({"rows": []}))
    (tmp_path / "results" / "reading.md").write_text("All in all.\n")
    (results / "reading.md").write_text("It rises.\n")
    page = claims.run(results=str(tmp_path / "results"), dynamics=str(tmp_path / "none"), certificates=str(tmp_path))
    text = (tmp_path / "results" / "experiments.md").read_text()
    places = [text.index(part) for part in ("All in all.", "stochastic-depth.png", "It rises.")]
    assert places == sorted(places) and text.count("It rises.") == 1
    assert "![When block recurrence emerges](sweep/stochastic-depth.png)" in text
    assert text.count("Not run: `python paper/") == 5
    assert page.path == tmp_path / "results" / "claims.md"
    untested = [claim for claim in page.claims if not claim.on]
    assert {claim.verdict for claim in untested} == {Verdict.NOT_TESTED} and len(untested) > 40
    swept = [claim for claim in page.claims if claim.on == "scenes"]
    assert all(claim.source == "sweep/stochastic-depth.json" for claim in swept) and len(swept) == 10
    assert page.found.counts["not tested at this budget"] >= len(untested)
    assert "written to" in page.text()


def test_the_pages_in_the_docs_are_what_the_results_in_the_docs_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, committed: ClaimsFile
) -> None:
    monkeypatch.chdir(RESULTS.parents[1])
    experiments, page = str(tmp_path / "experiments.md"), str(tmp_path)
    found = claims.run(results="docs/results/experiments", out=experiments, page=page)
    # Links are relative to the page.
    links = os.path.relpath(RESULTS, tmp_path)
    written = (tmp_path / "claims.md").read_text().replace(f"{links}/", "")
    assert written.replace("(experiments.md)", "(experiments/experiments.md)") == (RESULTS / "claims.md").read_text()
    written = (tmp_path / "experiments.md").read_text().replace(f"{links}/experiments/", "")
    assert written.replace("(claims.md)", "(../claims.md)") == (DOCS / "experiments.md").read_text()
    for ours, theirs in zip(found.claims, committed.claims, strict=True):
        assert (ours.evidence is None) == (theirs.evidence is None)
        wanted = {} if theirs.evidence is None else asdict(theirs.evidence)
        for name, value in wanted.items():
            number = getattr(ours.evidence, name)  # processors round a sum differently
            assert number == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value), (ours.says, name)


def resolve(source: Any, number: str) -> Any:
    """The entry of parsed JSON at a path such as `teacher/estimates/speed.mean.cls`."""
    for key in number.split("/"):
        source = source[int(key)] if isinstance(source, list) else source[key]
    return source


def test_every_number_stands_in_the_file_it_is_said_to_come_from(committed: ClaimsFile) -> None:
    files = {c.source: json.loads((RESULTS / c.source).read_text()) for c in committed.claims if c.source}
    assert len(files) >= 9
    named = [c for c in committed.claims if c.number and c.evidence is not None and c.number != "phases"]
    assert len(named) > 40
    for claim in named:
        found = resolve(files[claim.source], claim.number)
        expected = found if isinstance(found, dict) else {"value": found}
        for end, value in expected.items():
            if end != "num_images":
                assert getattr(claim.evidence, end) == pytest.approx(value), (claim.says, end)


def rows_of(text: str, columns: str) -> list[list[str]]:
    """The cells of every table of a page that has these columns."""
    rows, inside = [], False
    for line in text.splitlines():
        inside = line.startswith(columns) or (inside and line.startswith("|"))
        if inside and not line.startswith((columns, "|-")):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def test_every_row_of_the_page_is_a_claim_of_the_json(committed: ClaimsFile) -> None:
    text = (RESULTS / "claims.md").read_text()
    rows = rows_of(text, "| paper says |")
    assert len(rows) == len(committed.claims) == sum(committed.counts.values())
    said = ""
    for (says, on, measured, holds, verdict), claim in zip(rows, committed.claims):
        said = said if says == "″" else says
        assert said.endswith(claim.says) and on == (claim.on or "–")
        too = ", untrained too" if claim.verdict is Verdict.AGREES and claim.untrained_too else ""
        assert verdict.partition("<br>")[0].replace("*", "") == claim.verdict + too
        if claim.evidence is not None and claim.evidence.value is not None:
            assert measured.startswith(f"{claim.evidence.value:.3g}")
            ends = "(counted)" if claim.evidence.basis == "counted" else f"[{claim.evidence.lower or 0:.3g}, "
            assert claim.evidence.lower is None or ends in measured
            assert holds == claim.evidence.bounds()
        for link in (claim.source, claim.figure):
            assert not link or (f"({link})" in verdict and (RESULTS / link).exists()), link
        folders = (DOCS.parent / "recipes", DOCS.parents[1] / "raptor" / "recipes")
        assert not claim.recipe or any((f / f"{claim.recipe}.yaml").exists() for f in folders), claim.recipe
        assert claim.command or not claim.source or "authors" in claim.source
        assert not claim.command or "[run " in verdict
        assert f"`{claim.command}` ({claim.machine})" in text or not claim.command


def test_the_page_counts_verdicts_by_part_of_the_paper(committed: ClaimsFile) -> None:
    text = (RESULTS / "claims.md").read_text()
    *parts, total = rows_of(text, "| claims of |")
    assert [int(num) for num in total[1:]] == list(committed.counts.values())
    assert [sum(int(row[i]) for row in parts) for i in range(1, 5)] == list(committed.counts.values())
    assert [name[1 : name.index("]")] for name, *_ in parts] == re.findall(r"^## (?!Runs|Not run)(.+)$", text, re.M)


def test_the_page_lists_the_recipes_that_were_not_run() -> None:
    text = (RESULTS / "claims.md").read_text()
    rows = {row[0].strip("`"): row for row in rows_of(text, "| recipe |")}
    assert {"ablation-paper", "ablation-paper-dinov2", "partitions-p06", "table1-paper", "swaps"} <= set(rows)
    assert not {"ablation", "swaps-dinov2", "table1-five-minutes", "imagenet-base"} & set(rows)  # run, or no claim
    assert all(len(row) == 3 and "not run" in row[2].lower() for row in rows.values())


def test_each_twin_on_the_page_is_measured_in_its_file(committed: ClaimsFile) -> None:
    rows = rows_of((RESULTS / "claims.md").read_text(), "| untrained model beside |")
    assert [row[0] for row in rows] == [twin.of for twin in committed.twins]
    for name in ("dinov2s", "vitb16"):
        first, *others = [twin for twin in committed.twins if twin.of == name]
        assert first.every_row and not first.seed_only and not any(twin.every_row for twin in others)
        # One twin of each cut stands in rows about phases, and untrained seeds have their own cut.
        shown = [twin.cut.partition(",")[0] for twin in (first, *others) if not twin.seed_only]
        assert sorted(shown) == ["cut alike", "its own cut"]
        assert sum(twin.cut.startswith("its own") for twin in (first, *others)) >= 3
    for twin in committed.twins:
        saved = json.loads((RESULTS / twin.source).read_text())
        assert saved["teacher"]["num_images"] == twin.num_images and saved["provenance"]["command"] == twin.command
        assert "+".join(map(str, saved["phases"])) in twin.cut


def test_one_seed_is_never_a_verdict_and_every_verdict_has_its_interval(committed: ClaimsFile) -> None:
    decided = [c for c in committed.claims if c.verdict in (Verdict.AGREES, Verdict.DISAGREES)]
    assert decided
    for claim in decided:
        evidence = claim.evidence
        assert evidence is not None and evidence.lower is not None and evidence.upper is not None
        assert evidence.num >= {"images": 16, "seeds": 3, "runs": 3, "counted": 0}[evidence.basis]
    saved = json.loads((RESULTS / "claims.json").read_text())
    assert [c["verdict"] for c in saved["claims"]] == [str(Claim.from_dict(c).verdict) for c in saved["claims"]]


def test_two_runs_of_an_experiment_on_the_same_data_are_told_apart(sweep_folder: Path, tmp_path: Path) -> None:
    """A later run with other seeds or a longer training stands beside the first, without edits."""
    for name in ("stochastic-depth", "stochastic-depth-long"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stochastic-depth.json").write_bytes((sweep_folder / "stochastic-depth.json").read_bytes())
    page = claims.run(results=str(tmp_path), dynamics=str(tmp_path / "none"), certificates=str(tmp_path))
    ons = {claim.on for claim in page.claims if claim.on}
    assert ons == {"scenes (stochastic-depth)", "scenes (stochastic-depth-long)"}
    text = (tmp_path / "experiments.md").read_text()
    assert all(f"### {on}\n" in text for on in ons)


def test_a_damaged_result_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "swaps.json").write_text(json.dumps({"experiment": "swaps", "rows": [{"phases": 3}]}))
    with pytest.raises(RunError, match=r"swaps.json cannot be read .*rows.0.phases.*run the command that made it"):
        claims.run(results=str(tmp_path), dynamics=str(tmp_path), certificates=str(tmp_path))


def test_a_run_does_not_repeat_what_only_another_has_measured() -> None:
    measured = Claim(place="Table 1", says="a", source="one", evidence=Evidence(value=1.0, above=0.0, num=3))
    gap = Claim(place="Table 1", says="a", source="two")
    nowhere = [Claim(place="Table 1", says="b", source=source) for source in ("one", "two")]
    paper = Claim(place="Table 1", says="a")
    assert _without_gaps([measured, gap, *nowhere, paper]) == [measured, nowhere[0], paper]


def test_of_two_runs_on_one_model_the_narrowest_interval_stands() -> None:
    def claim(on: str, lower: float | None, upper: float | None) -> Claim:
        evidence = Evidence(value=0.1, lower=lower, upper=upper, num=32)
        return Claim(place="Section 2", says="a swap turns", on=on, evidence=evidence)

    narrow, wide = claim("vitb16 (L = 12), imagenet-20", 0.0, 0.2), claim("vitb16, imagenet-20", -0.1, 0.3)
    without, other = claim("vitb16, imagenet-20", None, None), claim("dinov2s, imagenet-20", -1.0, 1.0)
    assert _once_per_model([without, wide, narrow, other]) == [narrow, other]
    assert _once_per_model([without]) == [without]
    again = [replace(one, on=f"{one.on} ({folder})") for one, folder in ((wide, "swaps-1"), (without, "swaps-2"))]
    assert _once_per_model([*again, narrow]) == [narrow]  # told apart by their folder, but on the same model and data
    seeds = [replace(one, evidence=replace(one.evidence, basis="seeds")) for one in (narrow, wide)]
    assert _once_per_model(seeds) == seeds  # two trainings are two experiments


def test_a_further_run_gives_only_what_the_first_does_not_hold(tmp_path: Path) -> None:
    source = json.loads((RESULTS / "dynamics" / "vitb16-untrained-own-cut-s0.json").read_text())
    names = ("gamma.late_acceleration.cls", "gamma.before_last.cls")
    estimates = {name: source["teacher"]["estimates"][name] for name in names}
    for file, kept in (("vit.json", names[1:]), ("vit-further.json", names)):
        teacher = {**source["teacher"], "estimates": {name: estimates[name] for name in kept}}
        (tmp_path / file).write_text(json.dumps({**source, "teacher": teacher}))
    found, _ = claims._depth_claims(tmp_path, tmp_path)
    by_number = {claim.number: claim.source for claim in found if claim.source}
    first, later = (f"teacher/estimates/{name}" for name in (names[1], names[0]))
    assert by_number == {first: "vit.json", later: "vit-further.json"}
