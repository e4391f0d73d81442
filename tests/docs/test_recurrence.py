"""docs/results/recurrence.md says what its JSON file holds."""

from __future__ import annotations

import json
from typing import Any

from pages import ROOT, read

FOUND: dict[str, Any] = json.loads((ROOT / "docs/results/recurrence.json").read_text())
PAGE = " ".join(read("docs/results/recurrence.md").split())
SURROGATE, TEACHER = FOUND["depth"]


def _point(model: str, rule: str) -> dict[str, float]:
    [found] = [point for point in FOUND["depth"][model] if point["rule"] == rule]
    return found


def test_depth_on_demand() -> None:
    early, full = (_point(SURROGATE, rule) for rule in ("entropy < 1.5", "full depth"))
    shorter = _point(SURROGATE, "one step fewer")
    assert f"leaves {100 * early['blocks']:.1f} % of the blocks and {100 * early['agreement']:.1f} % agreement" in PAGE
    assert f"({100 * full['agreement']:.1f} % at full depth)" in PAGE
    assert f"leaves {100 * shorter['blocks']:.1f} % and {100 * shorter['agreement']:.1f} %" in PAGE
    assert f"keeps {100 * _point(TEACHER, 'entropy < 1.5')['agreement']:.1f} % under the same rule" in PAGE


def test_watching() -> None:
    noise, contrast = FOUND["watch"]["noise"], FOUND["watch"]["contrast"]
    for change, words in (
        (noise, "AUROC {} for noise (Mahalanobis distance {})"),
        (contrast, "{} for low contrast ({})"),
    ):
        values = (f"{change[score]['auroc']:.3f}".lstrip("0") for score in ("surrogate", "mahalanobis"))
        assert words.format(*values) in PAGE
    assert f"{100 * FOUND['watch']['false alarms']:.1f} % are alarms" in PAGE


def test_editing_and_correcting() -> None:
    rows = {(row["model"], row["phase"]): row for row in FOUND["edit"]}
    for (_, phase), row in rows.items():
        assert row["random"] == 0 and (row["flipped"] == 1) == (phase > 1)
    own, other = rows[SURROGATE, 2], rows[TEACHER, 2]
    assert f"The step is {own['step']:.2f}".replace("0.", ".") in PAGE
    assert f"Only {100 * own['stays']:.0f} %" in PAGE and f"({100 * other['stays']:.0f} %)" in PAGE
    for row in FOUND["correct"]:
        assert row["agreement"][-1] <= row["agreement"][0] + 0.005
