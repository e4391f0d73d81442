"""docs/results/recipe.md: the rows of equal images and of the start of adapters are those of recipe.json."""

from __future__ import annotations

import json
from statistics import fmean, stdev

from pages import ROOT, read

from raptor.config import Recipe

FOUND = json.loads((ROOT / "docs" / "results" / "recipe.json").read_text())
PAGE = read("docs/results/recipe.md")


def shown(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}".replace("0.", ".", 1)


def test_rows_of_equal_images_are_those_of_the_file() -> None:
    assert {row["images_seen"] for row in FOUND["equal_images"].values()} == {153_600}
    for row in FOUND["equal_images"].values():
        steps, scores = sum(row["num_steps"].values()), row["scores"]
        assert steps * row["batch_size"] == row["images_seen"] and scores["num_images"] == 2392
        size = f"{steps:,} of {row['batch_size']} | {row['block_parameters'] / 1e6:.2f} M"
        r2 = f"{shown(scores['r2_last'])} | {shown(scores['r2_lowest'])}"
        kept = " | ".join(f"{100 * scores[name]:.1f}" for name in ("agreement", "recovery_head", "recovery"))
        assert f"| {size} | {r2} | {kept} |" in PAGE


def test_the_trial_of_muon_is_that_of_the_file() -> None:
    scores: dict[tuple[str, float], list[float]] = {}
    for row in FOUND["muon"]["rows"]:
        scores.setdefault((row["optimizer"], row["lr"]), []).append(row["r2_last"])
    best: dict[str, list[float]] = {}
    for (optimizer, _), values in scores.items():
        if optimizer not in best or fmean(values) > fmean(best[optimizer]):
            best[optimizer] = values
    muon, adamw = (f"{shown(fmean(best[name]))} ± {shown(stdev(best[name]))}" for name in ("muon", "adamw"))
    assert f"R2 is {muon} instead of {adamw} after 200 steps" in PAGE


def test_the_time_of_muon_is_that_of_its_file() -> None:
    measured = json.loads((ROOT / "docs" / "results" / "optimizers.json").read_text())["batches"]
    small, large = (f"{100 * batch['added']:.0f} %" for batch in measured)
    assert [batch["batch_size"] for batch in measured] == [8, 64]
    assert f"Muon adds {large} to a step of the built-in teacher with 64 images and {small} to one with 8" in PAGE


def test_the_default_optimizer_is_the_better_one_of_the_file() -> None:
    adamw, muon, faster = (FOUND["equal_images"][name]["scores"] for name in ("batch64", "muon-2e-3", "muon-4e-3"))
    assert muon["r2_last"] > max(adamw["r2_last"], faster["r2_last"])
    more = 100 * (muon["agreement"] - adamw["agreement"])
    assert f"Muon has {shown(muon['r2_last'] - adamw['r2_last'])} more R2 than AdamW" in PAGE
    assert f"and {more:.1f} points more agreement" in PAGE
    change, recipe = FOUND["equal_images"]["muon-2e-3"]["change"], Recipe(recipe="default")
    assert change == {"batch_size": recipe.batch_size, "optimizer": recipe.optimizer, "lr": recipe.lr}


def test_trials_of_large_coordinates_are_those_of_the_file() -> None:
    runs = FOUND["vitb16_normalise"]["runs"]
    rows = ("`--normalise group`", "**(none: coordinate, lr 1.4e-3)**", "`--lr 7e-4`")
    for name, run in zip(rows, runs.values(), strict=True):
        values = (run["r2_last"]["all"], run["r2_uniform_last"]["all"], run["r2_last"]["cls"])
        assert f"| {name} | {' | '.join(map(shown, values))} | {100 * run['agreement']:.1f} |" in PAGE
        assert run["num_steps"] == {"stage1": 250, "stage2": 750} and run["num_images"] == 1024
    more = 100 * (runs["coordinate"]["agreement"] - runs["group"]["agreement"])
    assert f"more often by {more:.1f} points" in PAGE
