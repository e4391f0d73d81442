"""partitions, untrained, swaps and ablation on the tiny teachers."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from raptor.data import iterate, open_data
from raptor.experiments import ablation, partitions, swaps, untrained
from raptor.open import open_vit
from raptor.run import RunError
from raptor.train.recipe import resolve_recipe
from raptor.train.schedule import teacher_forcing
from raptor.vit.trajectory import swap_blocks


def test_partitions_against_brute_force(sweep_folder: Path, tiny: SimpleNamespace, tmp_path: Path) -> None:
    options = dict(**tiny.images, teachers=str(sweep_folder), k=[2], budget="3steps", batch_size=16, out=str(tmp_path))
    done = partitions.run(**options)
    ways = done.values["partitions"]["2"]
    # Four layers in two phases: max-cut's and exactly the other two.
    assert {tuple(p) for p in (ways["maxcut"], *ways["random"])} == {(1, 3), (2, 2), (3, 1)}
    assert ways["maxcut"] not in ways["random"]
    distance = 1 - np.array(done.values["similarity"])
    across = {n: distance[:n, n:].sum() for n in (1, 2, 3)}
    assert ways["maxcut"][0] == max(across, key=across.__getitem__)
    rows = done.values["rows"]
    for measure in ("r2_last", "bounded_r2_last"):
        found = done.values["statistics"]["2"]["maxcut"][measure]
        (value,) = [row[measure] for row in rows if row["way"] == "maxcut"]
        sample = [row[measure] for row in rows if row["way"] == "random"]
        assert found["z"] == pytest.approx(stats.zmap([value], sample, ddof=1)[0])
    assert len(list((tmp_path / "cells").glob("*.json"))) == 3  # a partition that two ways choose is trained once
    assert (tmp_path / "partitions.png").exists()
    with pytest.raises(ValueError, match="another plan"):
        partitions.run(**{**options, "num_random": 1})


def test_ten_random_partitions_at_k_2_of_12_layers_are_all_the_others() -> None:
    depth = np.arange(12)
    ways = partitions.choose_partitions(np.exp(-np.abs(depth[:, None] - depth) / 5.0), 2, 10, seed=0)
    assert sorted([ways["maxcut"], *ways["random"]]) == [[n, 12 - n] for n in range(1, 12)]
    ways = partitions.choose_partitions(np.exp(-np.abs(depth[:, None] - depth) / 5.0), 3, 10, seed=0)
    assert len({tuple(p) for p in ways["random"]}) == 10 and all(sum(p) == 12 for p in ways["random"])


def test_untrained_trained_and_overfitted(sweep_folder: Path, tiny: SimpleNamespace, tmp_path: Path) -> None:
    shared = dict(**tiny.images, **tiny.shape, **tiny.budgets)
    done = untrained.run(**shared, teachers=str(sweep_folder), p=0.5, overfit_images=32, out=str(tmp_path))
    rows = {row["kind"]: row for row in done.values["rows"]}
    assert list(rows) == ["trained", "untrained", "overfitted"]
    swept = json.loads((sweep_folder / "stochastic-depth.json").read_text())["rows"][1]
    assert rows["trained"]["teacher"]["accuracy"] == swept["teacher"]["accuracy"]  # the sweep's own, not trained again
    assert rows["trained"]["raptor"]["curves"] == swept["raptor"]["curves"]
    assert not (tmp_path / "teachers" / "trained-s0").exists()
    config = (tmp_path / "teachers" / "overfitted-s0" / "config.yaml").read_text()
    assert "augment: none" in config and "drop: 0.0" in config and "smoothing: 0.0" in config
    assert (tmp_path / "untrained.png").exists()
    assert untrained._in_steps("40epochs", 97) == "3880steps" and untrained._in_steps("60s", 97) == "60s"


@pytest.mark.parametrize(("name", "value"), [("dim", 64), ("teacher_lr", 1e-4), ("teacher_budget", "9steps")])
def test_a_teacher_made_another_way_is_not_taken(
    sweep_folder: Path, tiny: SimpleNamespace, tmp_path: Path, name: str, value: Any
) -> None:
    options = {**tiny.images, **tiny.shape, **tiny.budgets, name: value, "teachers": str(sweep_folder), "p": 0.5}
    with pytest.raises(RunError, match=rf"every cell failed.*holds another teacher \({name}: "):
        untrained.run(**options, cells="trained-s0", out=str(tmp_path))


def test_a_partition_is_not_compared_with_itself() -> None:
    def row(way: str, phases: str, accuracy: float) -> dict[str, Any]:
        return {"way": way, "phases": phases, **dict.fromkeys(partitions.MEASURES, accuracy)}

    rows = [row("dp-mean", "1+3", 0.1), *(row("random", p, a) for p, a in (("1+3", 0.1), ("2+2", 0.3), ("3+1", 0.4)))]
    found = partitions.statistics(rows)["dp-mean"]["accuracy"]
    assert found["num"] == 2 and found["mean"] == pytest.approx(0.35)


def test_swaps_give_the_accuracy_of_the_model_with_two_blocks_exchanged(
    sweep_folder: Path, tiny: SimpleNamespace, tmp_path: Path
) -> None:
    done = swaps.run(**tiny.images, teachers=str(sweep_folder), k=2, num_images=8, out=str(tmp_path), cells="p0-s0")
    (row,) = done.values["rows"]
    assert done.values["missing"] == ["p0.5-s0", "p0.5-s1"]
    vit = open_vit(sweep_folder / "teachers" / "p0-s0" / "teacher")
    batch = next(iter(iterate(open_data("scenes", "val", limit=48, size=32), vit.preprocess, 48)))
    first, phase_of = row["phases"][0], {}
    for (i, j), accuracy in zip(row["pairs"], row["swapped_accuracy"], strict=True):
        with torch.no_grad(), swap_blocks(vit, i, j):
            assert accuracy == pytest.approx((vit(batch.images).argmax(-1) == batch.labels).float().mean().item())
        phase_of.setdefault((i <= first) == (j <= first), []).append(accuracy)
    assert len(row["pairs"]) == 6
    assert row["compared_accuracy"]["within"] == pytest.approx(np.mean(phase_of[True]))
    assert row["compared_accuracy"]["across"] == pytest.approx(np.mean(phase_of[False]))
    assert (tmp_path / "swaps.png").exists()


def test_each_ablation_row_adds_one_ingredient() -> None:
    recipes = [ablation.row_recipe("paper", row) for row in ablation.ROWS]
    changed = [{key for key in a if a[key] != b[key]} for a, b in pairwise(recipes)]
    assert changed == [
        {"lam", "lam_until"},
        {"conditioning"},
        {"last_phase_weights", "stage2_weights"},  # stage 2 does not run before the last row
        {"stage1_share"},
    ]
    assert [recipe["stage1_share"] for recipe in recipes] == [1.0, 1.0, 1.0, 1.0, 0.5]
    assert recipes[0]["conditioning"] == "none" and recipes[2]["conditioning"] == "mlp"
    lam, until = recipes[0]["lam"], recipes[0]["lam_until"]
    assert {teacher_forcing(step, 1000, lam, until) for step in range(1000)} == {1.0}
    assert teacher_forcing(999, 1000, recipes[1]["lam"], recipes[1]["lam_until"]) == 0.0


def test_ablation_rows_have_equal_steps_and_the_untouched_head(
    sweep_folder: Path, tiny: SimpleNamespace, tmp_path: Path
) -> None:
    model = str(sweep_folder / "teachers" / "p0-s0" / "teacher")
    options = dict(**tiny.images, model=model, k=2, budget="4steps", batch_size=16, refit_epochs=1, out=str(tmp_path))
    done = ablation.run(**options, cells="1-teacher-forcing-s0,5-joint-s0")
    first, joint = done.values["rows"]
    assert first["num_steps"] == {"stage1": 4} and joint["num_steps"] == {"stage1": 2, "stage2": 2}
    lines = {line["number"]: line for line in done.values["table"]}
    assert list(lines) == ["1", "5", "6"]
    assert lines["6"]["accuracy"] == joint["refit"]["accuracy"] and joint["refit"]["from_head"]
    # The best of the teacher's head and of those fitted from it, on a split of train: the head itself takes part.
    surrogate = open_vit(tmp_path / "raptors" / "5-joint-s0" / "surrogate")
    batch = next(iter(iterate(open_data("scenes", "val", limit=48, size=32), surrogate.preprocess, 48)))
    with torch.no_grad():
        right = (surrogate(batch.images).argmax(-1) == batch.labels).float().mean().item()
    assert lines["5"]["accuracy"] == pytest.approx(right)
    recipe = resolve_recipe(str(tmp_path / "recipes" / "1-teacher-forcing-s0.yaml"), {})
    assert recipe.lam_until == float("inf") and recipe.last_phase_weights is None
    with pytest.raises(ValueError, match="equal steps"):
        ablation.run(**{**options, "budget": "60s"})
