"""The readings of Table 1 say what table1.json, training.json and other-images.json hold."""

from __future__ import annotations

import json
from statistics import fmean

import pytest
from pages import ROOT

EXPERIMENTS = ROOT / "paper" / "results"
FOLDER = EXPERIMENTS / "table1-five-minutes"
TWO_MINUTES = EXPERIMENTS / "table1-two-minutes"
TEN_MINUTES = EXPERIMENTS / "table1-ten-minutes"
ROWS = json.loads((FOLDER / "other-images.json").read_text())["rows"]
PAGE = " ".join((FOLDER / "reading.md").read_text().split())
TWO_MINUTE_PAGE = " ".join((TWO_MINUTES / "reading.md").read_text().split())


def short(value: float) -> str:
    return f"{value:.2f}".lstrip("0")


def with_interval(found: dict) -> str:
    return f"{short(found['r2'])} [{', '.join(map(short, found['interval']))}]"


@pytest.mark.parametrize("folder", [FOLDER, TWO_MINUTES, TEN_MINUTES], ids=lambda folder: folder.name)
def test_the_shares_are_those_of_the_table(folder) -> None:
    page = " ".join((folder / "reading.md").read_text().split())
    _, *rows = json.loads((folder / "table1.json").read_text())["rows"]
    segmentation = "above the paper for the first time**:" if folder == TEN_MINUTES else "below the paper**:"
    for task, words in (("classify", "Classification keeps"), ("depth", "depth"), ("segment", segmentation)):
        shares = [f"{100 * row['scores'][task]['recovery']['mean']:.1f}" for row in rows]
        assert f"{words} {', '.join(shares[:-1])} and {shares[-1]} %" in page


def test_scores_of_the_training_are_means_of_three_seeds() -> None:
    found = json.loads((TWO_MINUTES / "training.json").read_text())
    for k, phases in ((2, "7+5"), (3, "7+3+2"), (4, "4+3+3+2")):
        seeds = [found["surrogates"][f"k{k}-s{seed}"] for seed in range(3)]
        r2 = [f"{fmean(row[name] for row in seeds):.3f}".lstrip("0") for name in ("r2_last", "r2_lowest")]
        shares = [f"{100 * fmean(row[n] for row in seeds):.1f}" for n in ("agreement", "recovery_head", "recovery")]
        assert f"| {k} | {phases} | {' | '.join(r2 + shares)} |" in TWO_MINUTE_PAGE


def test_scores_of_the_ten_minute_training_are_those_of_the_table() -> None:
    page = (TEN_MINUTES / "reading.md").read_text()
    _, *rows = json.loads((TEN_MINUTES / "table1.json").read_text())["rows"]
    last = json.loads((TEN_MINUTES / "training.json").read_text())["validations"][7::8]
    assert [row["step"] for row in last] == [14_000] * 3
    for row, at_end in zip(rows, last, strict=True):
        assert row["recovery_head"]["mean"] == pytest.approx(at_end["recovery_head"])
        r2 = [f"{value:.3f}".lstrip("0") for value in (row["r2"]["all"]["r2"]["mean"], row["r2_lowest"]["mean"])]
        shares = [at_end["agreement"], row["recovery_head"]["mean"], row["recovery_ridge"]["mean"]]
        cells = [row["k"], "+".join(map(str, row["phases"])), *r2, *(f"{100 * share:.1f}" for share in shares)]
        assert f"| {' | '.join(cells)} |" in page


def test_r2_at_the_end_of_stage_1_and_a_quarter_into_stage_2() -> None:
    rows = json.loads((TWO_MINUTES / "training.json").read_text())["validations"]
    for step, words in ((2000, "ends at R2 "), (3500, "stage 2 brings ")):
        of_k = [
            fmean(r["r2_last"] for r in rows if r["step"] == step and r["cell"].startswith(f"k{k}")) for k in (2, 3, 4)
        ]
        first, second, third = map(short, of_k)
        assert f"{words}{first}, {second} and {third}" in TWO_MINUTE_PAGE


def test_every_set_stands_in_the_table_with_its_intervals() -> None:
    *sets, shrunk = ROWS
    assert len(sets) == 7 and "shrunk" in shrunk["data"]
    for row in sets:
        cosine = f"{row['all']['cosine']:.3f}".lstrip("0")
        cells = [with_interval(row[group]) for group in ("all", "cls", "patches")]
        assert f"| {' | '.join(cells)} | {cosine} |" in PAGE, row["data"]
    assert f"(Pillow, bicubic) give {with_interval(shrunk['all'])} too" in PAGE


def test_other_images_of_both_budgets_stand_side_by_side() -> None:
    found = {row["data"]: row for row in json.loads((TWO_MINUTES / "other-images.json").read_text())["rows"]}
    assert len(found) == 7
    for row in ROWS[:-1]:
        own, other = with_interval(found[row["data"]]["all"]), with_interval(row["all"])
        assert f"| {own} | {other} |" in TWO_MINUTE_PAGE, row["data"]


def test_other_sizes_stand_in_a_row_per_set() -> None:
    rows = json.loads((TWO_MINUTES / "other-images.json").read_text())["sizes"]
    for data in {row["data"] for row in rows}:
        cells = [with_interval(row["all"]) for row in rows if row["data"] == data]
        assert len(cells) == 4 and f"| {' | '.join(cells)} |" in TWO_MINUTE_PAGE


def test_the_certificate_of_the_ten_minute_surrogate_is_told() -> None:
    page = " ".join((TEN_MINUTES / "reading.md").read_text().split())
    found = json.loads((TEN_MINUTES / "k3-certificate.json").read_text())["definition"]
    eps, value, upper, bernstein, worst = (
        f"{found[name]:.3f}".lstrip("0") for name in ("eps", "value", "upper", "bernstein", "worst")
    )
    assert f"holds for eps {eps} and above: layer {found['layer']} decides, with a relative error of {value}" in page
    assert f"at most {upper} by the bootstrap and {bernstein} by the empirical Bernstein bound" in page
    assert f"the worst image has {worst}" in page
    # Pictures are third-party images.
    assert not any(one["picture"] for one in found["hardest"])
    rates = json.loads((TEN_MINUTES / "k3-complexity.json").read_text())["rates"]["points"]
    by_kind = {(point["side"], point["precision"]): point for point in rates}
    ours, theirs = by_kind["surrogate", "int8"], by_kind["teacher", "int4"]
    for point, words in (
        (ours, "take {} Mbit and have a largest error of {} and {} %"),
        (theirs, "take {} Mbit and have {} and {} %"),
    ):
        error = f"{point['largest']:.2f}".lstrip("0")
        assert words.format(round(point["bits"] / 1e6), error, round(100 * point["agreement"])) in page
