"""The verdicts and their pages: the rule, and that the committed files are what the recorded results give."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import claims
import pytest
import quantities
from claims import SECTIONS, Claims, once_per_model, without_gaps
from claims_page import experiments_page, read_header
from quantities import Number
from sweep import Json
from verdict import Claim, Verdict, judge

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "paper" / "results"
DYNAMICS = ROOT / "docs" / "results" / "dynamics"
CLEAR = Number(0.5, 0.4, 0.6, "seeds", 3)
AGREES, DISAGREES, UNDETERMINED, NOT_COMPARABLE, NOT_TESTED = Verdict


@pytest.fixture(scope="module")
def committed() -> Json:
    found: Json = json.loads((RESULTS / "claims.json").read_text())
    return found


def test_the_interval_decides_between_three_verdicts() -> None:
    assert judge(CLEAR, 0, None) is AGREES
    assert judge(CLEAR, 0.7, None) is judge(CLEAR, None, 0.3) is DISAGREES
    assert judge(CLEAR, 0.45, None) is judge(CLEAR, 0, 0.55) is UNDETERMINED
    assert judge(CLEAR, 0, 0.7) is AGREES
    at = Number(5, 5, 5, "counted")
    assert judge(at, 5, None) is judge(at, None, 5) is DISAGREES


def test_fewer_than_three_seeds_or_no_interval_can_only_be_undetermined() -> None:
    for num in (1, 2):
        assert judge(replace(CLEAR, num=num), 0, None) is UNDETERMINED
        assert judge(replace(CLEAR, num=num), 0.7, None) is UNDETERMINED
        assert judge(replace(CLEAR, num=num, basis="runs"), 0, None) is UNDETERMINED
    assert judge(replace(CLEAR, lower=None, upper=None), 0, None) is UNDETERMINED
    assert judge(replace(CLEAR, basis="images", num=3), 0, None) is UNDETERMINED
    assert judge(replace(CLEAR, basis="images", num=64), 0, None) is AGREES


def test_a_smaller_budget_excuses_nothing_and_another_meaning_is_neither_for_nor_against() -> None:
    small = replace(CLEAR, smaller_budget=True)
    assert judge(small, 0, None) is AGREES and judge(small, 0.9, None) is DISAGREES
    assert judge(None, 0, None) is judge(replace(CLEAR, value=None), 0, None) is NOT_TESTED
    for above in (0, 0.9):
        claim = Claim(place="Figure 6", says="gamma", number=CLEAR, above=above, not_comparable="other depth")
        assert claim.verdict is NOT_COMPARABLE


def test_every_number_of_the_claims_is_a_function() -> None:
    lines = [line for section in SECTIONS.values() for line in section["claims"]]
    assert len(lines) > 100
    for line in lines:
        assert {"place", "says"} <= set(line), line
        assert "number" not in line or callable(getattr(quantities, line["number"][0])), line


def test_the_committed_files_are_what_the_recorded_results_give(
    committed: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    found = json.loads(json.dumps(claims.evaluate(Claims())))
    assert found["counts"] == committed["counts"] and len(found["claims"]) == len(committed["claims"]) == 521
    for ours, theirs in zip(found["claims"], committed["claims"], strict=True):
        for key, value in (theirs["number"] or {}).items():  # processors round a sum differently
            expected = pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
            assert ours["number"][key] == expected, (ours["says"], key)
        assert ours["verdict"] == theirs["verdict"]
    assert experiments_page(RESULTS) == (RESULTS / "experiments.md").read_text()


def test_every_estimate_stands_in_the_file_it_is_said_to_come_from(committed: Json) -> None:
    files = {claim["source"] for claim in committed["claims"] if claim["source"]}
    assert len(files) > 20 and all((ROOT / name).exists() for name in files)
    for claim in committed["claims"]:
        assert not claim["figure"] or (ROOT / claim["figure"]).exists()
        folders = (ROOT / "paper" / "recipes", ROOT / "raptor" / "recipes")
        assert not claim["recipe"] or any((folder / f"{claim['recipe']}.yaml").exists() for folder in folders)
        number = claim["number"]
        if "dynamics/" in claim["source"] and number and number["basis"] == "images":
            assert str(number["num"]) in (ROOT / claim["source"]).read_text()


def test_two_runs_of_an_experiment_on_the_same_data_are_told_apart(sweep_folder: Path, tmp_path: Path) -> None:
    """A later run with other seeds or a longer training stands beside the first, without edits."""
    for name in ("stochastic-depth", "stochastic-depth-long"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stochastic-depth.json").write_bytes((sweep_folder / "stochastic-depth.json").read_bytes())
    (tmp_path / "reading.md").write_text("All in all.\n")
    nowhere = str(tmp_path / "none")
    found = claims.evaluate(Claims(results=str(tmp_path), dynamics=nowhere, certificates=nowhere))
    ons = {claim["on"] for claim in found["claims"] if claim["on"]}
    assert ons == {"scenes (stochastic-depth)", "scenes (stochastic-depth-long)"}
    text = experiments_page(tmp_path)
    assert all(f"### {on}\n" in text for on in ons) and "All in all." in text
    assert text.count("Not run: `python paper/") == 5


def test_of_two_runs_on_one_model_the_narrowest_interval_stands() -> None:
    def claim(on: str, lower: float | None, upper: float | None) -> Claim:
        return Claim(place="Section 2", says="a swap turns", on=on, number=Number(0.1, lower, upper, "images", 32))

    narrow, wide = claim("vitb16 (L = 12), imagenet-20", 0.0, 0.2), claim("vitb16, imagenet-20", -0.1, 0.3)
    without, other = claim("vitb16, imagenet-20", None, None), claim("dinov2s, imagenet-20", -1.0, 1.0)
    assert once_per_model([without, wide, narrow, other]) == [narrow, other]
    assert once_per_model([without]) == [without]
    seeds = [replace(one, number=Number(0.1, 0.0, 0.2, "seeds", 3)) for one in (narrow, wide)]
    assert once_per_model(seeds) == seeds  # two trainings are two experiments


def test_a_run_does_not_repeat_what_only_another_has_measured() -> None:
    measured = Claim(place="Table 1", says="a", source="one", number=CLEAR)
    gap = Claim(place="Table 1", says="a", source="two")
    nowhere = [Claim(place="Table 1", says="b", source=source) for source in ("one", "two")]
    assert without_gaps([measured, gap, *nowhere]) == [measured, nowhere[0]]


def model_with(**estimates: tuple[float, float, int]) -> Json:
    """A result of raptor dynamics with these estimates: lower, upper, images."""
    source: Json = json.loads((DYNAMICS / "dinov2s.json").read_text())
    found = {}
    for key, (lower, upper, num) in estimates.items():
        found[key] = {"value": (lower + upper) / 2, "lower": lower, "upper": upper, "num_images": num}
    return {**source, "teacher": {**source["teacher"], "estimates": found, "basins": None}}


def write(folder: Path, **models: Json) -> list[Claim]:
    for name, model in models.items():
        (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(model))
    return [claim for path in claims.trained_models(folder) for claim in claims.claims_of_depth(path)]


@pytest.mark.parametrize(
    ("key", "holds", "fails"),
    [
        ("norm.smallest_step.cls", 1.1, 0.9),
        ("speed.registers_minus_slowest_other", -0.1, 0.1),
        ("rank.stable_late.patches", 6.0, 1.5),
        ("attraction.layers_7_10.all", 0.9, 1.1),
    ],
)
def test_a_claim_follows_its_bounds(tmp_path: Path, key: str, holds: float, fails: float) -> None:
    for value, verdict in ((holds, AGREES), (fails, DISAGREES)):
        (claim,) = write(tmp_path, vit=model_with(**{key: (value - 0.01, value + 0.01, 256)}))
        assert claim.verdict is verdict
    (claim,) = write(tmp_path, vit=model_with(**{key: (min(holds, fails), max(holds, fails), 256)}))
    assert claim.verdict is UNDETERMINED


def test_sensitivity_is_judged_on_the_papers_perturbation(tmp_path: Path) -> None:
    keys = ("sensitivity.slope.patches", "path.kept_angle.cls", "gamma.patches_minus_cls")
    model = model_with(**dict.fromkeys(keys, (0.1, 0.2, 256)))
    assert len(write(tmp_path, vit=model)) == 3
    model["teacher"]["stability"]["kind"] = "relative"
    assert len(write(tmp_path, vit=model)) == 1


def test_an_untrained_model_stands_beside_a_trained_one(tmp_path: Path) -> None:
    key, cut = "gamma.patches_minus_cls", "similarity.within_minus_across"
    model = model_with(**{key: (0.2, 0.4, 256), cut: (0.3, 0.34, 256)})
    alike = model_with(**{key: (0.1, 0.3, 64), cut: (-0.1, 0.1, 64)})
    own = {**model_with(**{key: (-0.3, -0.1, 64), cut: (0.1, 0.2, 64)}), "phases": [5, 3, 4]}
    found = {claim.says.partition(":")[0]: claim for claim in write(tmp_path, vit=model, vit_untrained=alike)}
    gamma = found["patches approach their last direction before cls"]
    assert gamma.untrained_too is True and len(gamma.untrained) == 1
    # Where the cut counts, one of each cut stands beside it; training is judged by those with their own cut.
    found = {claim.says.partition(":")[0]: claim for claim in write(tmp_path, vit_untrained_own=own)}
    (within,) = [claim for claim in found.values() if claim.place == "Figure 1"]
    assert {cut for _, cut in within.untrained} == {"cut alike, 7+3+2", "its own cut, 5+3+4"}
    assert within.untrained_too is False
    emerges = found["block structure emerges during training"]
    assert emerges.number == Number(pytest.approx(0.32 - 0.15), None, None, "twins", 1)
    assert emerges.verdict is UNDETERMINED  # one untrained seed


def test_three_untrained_seeds_tell_what_training_made_of_one_model() -> None:
    key = "similarity.within_minus_across"
    model = model_with(**{key: (0.3, 0.34, 256)})

    def number(*values: float, seeds: tuple[int, ...] = (0, 1, 2)) -> Any:
        twins = [{**model_with(**{key: (value, value, 64)}), "seed": seed} for seed, value in zip(seeds, values)]
        return quantities.trained_minus_untrained({**model, "twins": twins}, key)

    found = number(0.1, 0.12, 0.08)
    assert found.num == 3 and found.lower > 0
    assert judge(found, 0, None) is UNDETERMINED  # one trained model, however many untrained ones
    half = ((4.302653 * 0.02 / 3**0.5) ** 2 + 0.02**2) ** 0.5  # t with two degrees of freedom, and the model's own
    assert found.lower == pytest.approx(0.32 - 0.1 - half)
    # A second run of the same weights is no further seed.
    twice = number(0.1, 0.12, 0.08, seeds=(0, 0, 1))
    assert twice.num == 2 and twice.value == pytest.approx(0.32 - 0.09)
    assert judge(number(0.1, 0.5, 0.3), 0, None) is UNDETERMINED


def test_a_further_run_gives_only_what_the_first_does_not_hold(tmp_path: Path) -> None:
    early, late = "gamma.before_last.cls", "gamma.late_acceleration.cls"
    first = model_with(**{early: (0.9, 0.95, 256)})
    further = model_with(**{early: (0.5, 0.6, 256), late: (0.1, 0.2, 256)})
    found = write(tmp_path, vit=first, vit_further=further)
    assert [Path(claim.source).name for claim in found] == ["vit.json", "vit-further.json"]


def test_the_header_of_a_recipe_is_read_part_by_part(tmp_path: Path) -> None:
    text = "# What it does,\n# in two lines.\n# Command: python x --a \\\n#   --b\n# Time: 3 s.\n# Expected: 4\nk: 3\n"
    (tmp_path / "x.yaml").write_text(text)
    about = {"About": "What it does, in two lines.", "Command": "python x --a \\ --b", "Time": "3 s.", "Expected": "4"}
    assert read_header(tmp_path / "x.yaml") == about
