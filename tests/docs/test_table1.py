"""The reading of the five-minute Table 1 says what table1.json and, on other images, other-images.json hold."""

from __future__ import annotations

import json

from pages import ROOT, read

FOLDER = ROOT / "docs" / "results" / "experiments" / "table1-five-minutes"
ROWS = json.loads((FOLDER / "other-images.json").read_text())["rows"]
PAGE = " ".join((FOLDER / "reading.md").read_text().split())


def short(value: float) -> str:
    return f"{value:.2f}".lstrip("0")


def with_interval(found: dict) -> str:
    return f"{short(found['r2'])} [{', '.join(map(short, found['interval']))}]"


def test_the_shares_are_those_of_the_table() -> None:
    _, *rows = json.loads((FOLDER / "table1.json").read_text())["rows"]
    for task, words in (("classify", "Classification keeps"), ("depth", "depth"), ("segment", "below the paper**:")):
        shares = [f"{100 * row['scores'][task]['recovery']['mean']:.1f}" for row in rows]
        assert f"{words} {', '.join(shares[:-1])} and {shares[-1]} %" in PAGE


def test_every_set_stands_in_the_table_with_its_intervals() -> None:
    *sets, shrunk = ROWS
    assert len(sets) == 7 and "shrunk" in shrunk["data"]
    for row in sets:
        cosine = f"{row['all']['cosine']:.3f}".lstrip("0")
        cells = [with_interval(row[group]) for group in ("all", "cls", "patches")]
        assert f"| {' | '.join(cells)} | {cosine} |" in PAGE, row["data"]
    assert f"(Pillow, bicubic) give {with_interval(shrunk['all'])} too" in PAGE


def test_the_readme_gives_that_of_a_thousand_classes() -> None:
    row = next(row for row in ROWS if row["data"].startswith("imagenet-val"))
    assert f"k = 3: {short(row['all']['r2'])} on ImageNet's 1,000 classes" in read("README.md")
