"""README.md: what surrogates keep is what table1.json and training.json say."""

from __future__ import annotations

import json

from pages import ROOT, read

FOLDER = ROOT / "docs" / "results" / "experiments" / "table1-five-minutes"
PAGE = " ".join(read("README.md").split())


def test_shares_are_those_of_the_table() -> None:
    teacher, *rows = json.loads((FOLDER / "table1.json").read_text())["rows"]
    assert [row["k"] for row in rows] == ["2", "3", "4"]
    for row in rows:
        phases = "\\|".join(map(str, row["phases"]))
        shares = [row["parameters"] / teacher["parameters"]]
        shares += [row["scores"][task]["recovery"]["mean"] for task in ("classify", "segment", "depth")]
        assert f"| {row['k']} ({phases}) | {' | '.join(f'{100 * share:.0f} %' for share in shares)} |" in PAGE


def test_scores_of_the_training_are_those_of_the_file() -> None:
    found = json.loads((FOLDER / "training.json").read_text())["surrogates"].values()
    first, second, third = (f"{row['r2_last']:.2f}".lstrip("0") for row in found)
    assert f"R2 is {first}, {second} and {third};" in PAGE
    first, second, third = (f"{100 * row['recovery_head']:.0f}" for row in found)
    assert f"keeps {first}, {second} and {third} % of its accuracy" in PAGE
