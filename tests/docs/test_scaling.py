"""The page of costs says what its JSON files hold."""

from __future__ import annotations

import json
import re
from typing import Any

from pages import ROOT, read

PAGE = "docs/scaling.md"


def load(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "docs" / "results" / name).read_text())


def table(*first: str) -> list[list[str]]:
    """The cells of the rows whose first cell is one of `first`."""
    rows = [line.strip("| ").split(" | ") for line in read(PAGE).splitlines() if line.startswith("| ")]
    return [[cell.strip(" |") for cell in row] for row in rows if row[0] in first]


def test_measured_exponents_stand_on_the_page_and_follow_the_model() -> None:
    found = load("scaling.json")
    rows = found["rows"]
    commands = list(dict.fromkeys(row["command"] for row in rows))
    axes = ["images", "layers", "tokens", "width"]
    assert commands == ["phases", "distill", "evaluate", "probe", "dynamics"]
    shown = {row[0]: row[1:] for row in table(*(f"`{command}`" for command in commands))}
    for command in commands:
        own = {row["axis"]: row for row in rows if row["command"] == command}
        assert list(own) == axes
        assert shown[f"`{command}`"] == [f"{own[a]['measured']:.2f} ({own[a]['predicted']:.2f})" for a in axes]
    assert max(abs(row["measured"] - row["predicted"]) for row in rows) < 0.5
    assert found["command"] in read(PAGE) and (ROOT / "docs" / "images" / "scaling.png").exists()


def test_predicted_rates_stand_on_the_page() -> None:
    models = load("predicted.json")["models"]
    shown = {row[0].strip("`"): row[1:4] for row in table(*(f"`{name}`" for name in models))}
    assert shown.keys() == models.keys()
    for name, model in models.items():
        hours = ", ".join(str(model["hours"][num]) for num in ("1", "8", "32"))
        assert shown[name] == [f"{model['step_gflops_per_image']:,}", f"{model['images_per_s']:,}", hours]


def test_shapes_at_full_size_stand_on_the_page() -> None:
    rows = {row["case"]: row for row in load("scale/full-size.json")["rows"]}
    for name, case in (("ViT-B/14-reg", "base:64"), ("ViT-L/14-reg", "large:64")):
        row, [shown] = rows[case], table(name)
        rates = [*row["images_per_s_by_kind"].values(), row["images_per_s"]]
        sizes = [row["hours_of_the_recipe"], row["peak_gib"], row["reserved_gib"]]
        assert shown[1:] == [f"{rate:,.0f}" for rate in rates] + [f"{size:.1f}" for size in sizes]


def test_pages_say_which_checks_passed_on_a_gpu_and_how_much_of_the_exchange_is_hidden() -> None:
    checks, exchange = load("scale/gpu-checks.json")["checks"], load("scale/two-ranks.json")["exchange of gradients"]
    failed = [name for name, found in checks.items() if not found["passed"]]
    assert len(checks) == 10 and "nine of its ten checks passed" in read("docs/gpu.md")
    assert failed == ["a_run_is_compiled_captured_stopped_and_continued"] and failed[0] in read("docs/gpu.md")
    assert f"{exchange['hidden']:.0%} of it is hidden".replace("%", " %") in read("docs/cluster.md")
    for number in exchange["milliseconds"].values():
        assert f"{number:.0f} ms" in read("docs/cluster.md")


def test_the_page_names_files_that_exist() -> None:
    for target in re.findall(r"\]\(([\w./-]+)\)", read(PAGE)):
        assert (ROOT / "docs" / target).exists(), target
