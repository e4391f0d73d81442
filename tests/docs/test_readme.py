"""README.md: what surrogates keep is what table1.json says."""

from __future__ import annotations

import json
from collections import Counter

from pages import ROOT, read

FOLDER = ROOT / "paper" / "results" / "table1-ten-minutes"
PAGE = " ".join(read("README.md").split())


def test_shares_are_those_of_the_table() -> None:
    teacher, *rows = json.loads((FOLDER / "table1.json").read_text())["rows"]
    classify, segment, depth = (teacher["scores"][task]["mean"] for task in ("classify", "segment", "depth"))
    assert f"the teacher's probe has {100 * classify:.1f} % right" in PAGE
    assert f"a mean IoU of {100 * segment:.1f} % and a depth RMSE of {depth:.3f} m".replace(" 0.", " .") in PAGE
    assert [row["k"] for row in rows] == ["2", "3", "4"]
    for row in rows:
        phases = "\\|".join(map(str, row["phases"]))
        kept = [row["scores"][task]["recovery"] for task in ("classify", "segment", "depth")]
        shares = [f"{100 * share['mean']:.1f} %" for share in kept]
        parameters = f"{100 * row['parameters'] / teacher['parameters']:.0f} %"
        assert f"| {row['k']} ({phases}) | {' | '.join([parameters, *shares])} |" in PAGE


def test_scores_of_the_training_are_those_of_the_file() -> None:
    _, *rows = json.loads((FOLDER / "table1.json").read_text())["rows"]
    first, second, third = (f"{row['r2']['all']['r2']['mean']:.2f}".lstrip("0") for row in rows)
    assert f"R2 is {first}, {second} and {third};" in PAGE
    first, second, third = (f"{100 * row['recovery_head']['mean']:.0f}" for row in rows)
    assert f"keeps {first}, {second} and {third} % of its accuracy" in PAGE


def test_verdicts_are_those_of_the_claims() -> None:
    found = json.loads((ROOT / "paper" / "results" / "claims.json").read_text())
    cards = Counter(card["verdict"] for card in found["cards"])
    fails = cards["fails"]
    shown = f"{cards['holds']} hold, {fails or 'none'} fail, {cards['undetermined']} are undetermined"
    rest = f"{cards['not comparable']} are not comparable and {cards['not tested']} is not tested"
    assert f"{len(found['cards'])} cards" in PAGE and f"{shown}, {rest}" in PAGE
    assert f"{sum(found['counts'].values())} rows" in PAGE
