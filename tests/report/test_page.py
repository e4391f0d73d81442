"""The page of a run folder: what it shows, what it refuses, and that nothing in it runs that should not."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from plotly.offline import get_plotlyjs

from raptor.commands.report import report
from raptor.files import RunError
from raptor.report.charts import rounded
from raptor.report.page import build_page
from raptor.report.results import Results

RunOf = Callable[..., Path]
SECTIONS = (
    "glance",
    "similarity",
    "fidelity",
    "probes",
    "dynamics",
    "basins",
    "interventions",
    "tool",
    "seen",
    "made",
)
RESULTS = Path(__file__).parents[2] / "docs" / "results"
EVIL = '<script>alert("x")</script>'


def page_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found.group(1))


def hints(page: str) -> dict[str, bool]:
    """Section -> whether it is nothing but a hint."""
    parts = re.findall(r'<section id="(\w+)"><h2>[^<]*</h2>(.*?)</section>', page, re.S)
    return {name: body.startswith('<p class="hint">') for name, body in parts}


def test_whole_run_gives_every_section_in_order(full_page: str, full_run: Path) -> None:
    assert tuple(hints(full_page)) == SECTIONS
    missing = [name for name, has_hint in hints(full_page).items() if has_hint]
    assert missing == ["tool"]  # the run used none of the tools
    assert len(full_page.encode()) < 6_000_000
    certificate = json.loads((full_run / "certificate.json").read_text())
    last = certificate["curves"]["all"]["r2"][-1]
    assert f"R² {last:.2f} at the last" in full_page
    assert "Three tied blocks (3 | 3 | 6) stand in for the 12 blocks" in full_page


def test_data_are_small_and_equal_to_the_files(full_page: str, full_run: Path) -> None:
    data = page_data(full_page)
    assert len(json.dumps(data)) < 2_000_000
    saved = json.loads((full_run / "phases.json").read_text())["models"][0]
    heatmap = next(s for s in data["charts"]["similarity"]["series"] if s["when"]["tokens"] == ["cls"])
    assert heatmap["z"] == rounded(saved["similarity"]["cls"])
    assert heatmap["cuts"]["3"] == saved["phases"]["3"]["lengths"]
    speed = json.loads((full_run / "dynamics.json").read_text())["surrogate"]["direction"]["speed"]["cls"]["mean"]
    curve = next(
        s for s in data["charts"]["dynamics-speed"]["series"] if (s["colour"], s["side"]) == ("cls", "surrogate")
    )
    assert curve["y"] == rounded(speed)


def test_nothing_is_fetched(full_page: str) -> None:
    class Sources(HTMLParser):
        found: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.found += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "data", "action")]

    parser = Sources()
    parser.feed(full_page)
    assert parser.found and all(v.startswith(("#", "data:")) for v in parser.found)
    packed = re.search(r'id="plotly">([^<]*)</script>', full_page)
    assert packed is not None and gzip.decompress(base64.b64decode(packed.group(1))).decode() == get_plotlyjs()


@pytest.mark.parametrize(
    ("names", "whole"),
    [
        (["phases.json"], {"similarity"}),
        (["dynamics.json"], {"dynamics", "basins"}),
        (["certificate.json"], {"fidelity"}),
        (["probe-classify.json"], {"probes"}),
        (["interventions.json"], {"interventions"}),
        (["complexity.json"], set()),
    ],
)
def test_one_part_gives_its_section_and_hints(run_of: RunOf, names: list[str], whole: set[str]) -> None:
    folder = run_of(*names)
    page = report(str(folder)).path.read_text()
    shown = {name for name, hint in hints(page).items() if not hint}
    assert shown == whole | {"glance", "made"}
    for section, command in {"similarity": "phases", "fidelity": "distill", "dynamics": "dynamics"}.items():
        assert section in whole or f"Add it with <code>raptor {command}</code>" in page


def test_models_that_cannot_be_opened_leave_a_note(run_of: RunOf) -> None:
    folder = run_of("phases.json")
    (folder / "config.yaml").write_text("model: timm/no_such_vit\n")
    page = report(str(folder)).path.read_text()
    assert hints(page)["seen"] and "no_such_vit" in page
    assert not (folder / "images.json").exists()
    assert "No images were asked for" in report(str(folder), num_images=0).path.read_text()


def test_damage_is_one_line_and_no_page(run_of: RunOf) -> None:
    folder = run_of("phases.json", "dynamics.json")
    path = folder / "dynamics.json"
    text = path.read_text()
    wrong = json.loads(text)
    wrong["teacher"]["direction"]["norm"] = [1, 2]
    for broken in (text[: len(text) // 2], "[1, 2]", "", json.dumps(wrong)):
        path.write_text(broken)
        with pytest.raises(RunError) as error:
            report(str(folder))
        assert "\n" not in str(error.value) and str(folder) in str(error.value)
        assert not (folder / "report.html").exists()
    path.write_text(text)
    (folder / "config.yaml").write_text("a: [1\nb: {")
    with pytest.raises(RunError, match=r"config\.yaml cannot be read"):
        report(str(folder))


def test_page_stays_small_and_refuses_what_is_too_large(run_of: RunOf) -> None:
    folder = run_of("phases.json")
    path = folder / "phases.json"
    saved = json.loads(path.read_text())
    matrix = torch.rand(40, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    entry = saved["models"][0] | {"similarity": dict.fromkeys(saved["models"][0]["similarity"], matrix), "phases": {}}
    path.write_text(json.dumps({**saved, "models": [entry] * 20}))
    assert report(str(folder)).path.stat().st_size < 6_000_000
    path.write_text(json.dumps({**saved, "models": [entry] * 60}))
    with pytest.raises(ValueError, match="fewer models"):
        report(str(folder))


def test_interrupted_metrics_lose_only_their_last_line(run_of: RunOf) -> None:
    folder = run_of("phases.json")
    lines = [json.dumps({"stage": "stage1", "step": i, "loss": 1.0 / (i + 1)}) for i in range(4)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"stage": "sta']))
    series = page_data(report(str(folder)).path.read_text())["charts"]["training"]["series"]
    assert [s["y"] for s in series] == [[1.0, 0.5, 0.33333, 0.25]]
    (folder / "metrics.jsonl").write_text("\n".join([lines[0], "nonsense", lines[1]]))
    with pytest.raises(RunError, match="line 2"):
        report(str(folder))


def test_names_are_text_everywhere(run_of: RunOf) -> None:
    folder = run_of("phases.json", "dynamics.json", "probe-classify.json", "interventions.json")
    for path in folder.glob("*.json"):
        values = json.loads(path.read_text())
        values["provenance"]["command"] = EVIL
        if path.stem == "phases":
            values["models"][0]["model"]["name"] = EVIL
            values["models"][0]["data"] = EVIL
        if path.stem == "dynamics":
            values["class_names"] = dict.fromkeys(values["class_names"], EVIL)
        if path.stem == "interventions":
            values["findings"] = [EVIL]
        path.write_text(json.dumps(values))
    (folder / "config.yaml").write_text(f"model: '{EVIL}'\n")
    page = report(str(folder)).path.read_text()
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;") >= 6
    names = {s["name"] for s in page_data(page)["charts"]["basin-paths"]["series"]}
    assert names == {EVIL}


def test_the_page_needs_only_the_results(committed: Results) -> None:
    page = build_page(committed)
    assert tuple(hints(page)) == SECTIONS and hints(page)["probes"] and not hints(page)["dynamics"]
