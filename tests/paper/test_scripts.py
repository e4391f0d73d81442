"""The scripts of tables and figures on the teachers of one tiny sweep: what they compute, against brute force."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import ablation
import controls
import numpy as np
import partitions
import pytest
import swaps
import table1
import torch
import untrained
import yaml
from figures import figure_swaps
from PIL import Image
from scipy import stats

from raptor import iterate, open_data, open_vit, swap_blocks

SCORES = dict(r2_lowest=0.5, recovery_head=0.9, recovery=0.9, parameters=1, phases=[2, 2])


def held_out(vit: Any) -> Any:
    return next(iter(iterate(open_data("scenes", "val", limit=48, size=32), vit.preprocess, 48)))


def test_table1_and_figure5(teacher: str, tiny: dict[str, Any], tmp_path: Path) -> None:
    epochs = dict(classify_epochs=1, segment_epochs=1, depth_epochs=1)
    training = dict(model=teacher, k=[2], seeds=[0, 1], budget="4steps", batch_size=16)
    dense = dict(segment="scenes", depth="scenes")
    done = table1.main(table1.Table1(**tiny["images"], **training, **dense, **epochs, out=str(tmp_path)))
    assert list(done["cells"]) == ["teacher", "k2-s0", "k2-s1"]
    of_teacher, k2 = done["rows"]
    scores = [done["cells"][f"k2-s{s}"]["probes"]["depth"]["score"] for s in (0, 1)]
    assert k2["scores"]["depth"]["mean"] == pytest.approx(sum(scores) / 2)
    assert k2["scores"]["depth"]["deviation"] == pytest.approx(abs(scores[0] - scores[1]) / 2**0.5)
    rmse = of_teacher["scores"]["depth"]["mean"]
    assert k2["scores"]["depth"]["recovery"]["mean"] == pytest.approx(sum(rmse / s for s in scores) / 2)
    miou = [done["cells"][c]["probes"]["segment"]["score"] for c in ("teacher", "k2-s0", "k2-s1")]
    assert k2["scores"]["segment"]["recovery"]["mean"] == pytest.approx(sum(miou[1:]) / 2 / miou[0])
    assert k2["num_seeds"] == 2 and list(k2["scores"]["classify"]["size"]) == [32, 32]
    assert (tmp_path / "figure5.png").exists()


def test_more_data_is_distilled_on_and_heads_keep_the_labelled_images(
    teacher: str, tiny: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "more").mkdir()
    for i in range(6):
        Image.new("RGB", (32, 32), (40 * i, 255 - 40 * i, 80)).save(tmp_path / "more" / f"{i}.png")
    training = dict(model=teacher, k=[2], seeds=[0], budget="2steps", batch_size=16, optimizer="adamw")
    more = dict(more_data=[str(tmp_path / "more")], classify_epochs=1, cells=["k2-s0"], out=str(tmp_path / "out"))
    done = table1.main(table1.Table1(**tiny["images"], **training, **more))
    config = yaml.safe_load((tmp_path / "out" / "raptors" / "k2-s0" / "config.yaml").read_text())
    assert config["images"]["train"]["num_images"] == tiny["images"]["limit"]
    assert config["data"] == ["scenes", str(tmp_path / "more")]
    cell = done["cells"]["k2-s0"]
    assert cell["probe"] is not None and cell["accuracy"] is not None


def test_probes_of_unequal_steps_or_without_a_score_have_no_recovery() -> None:
    def probes(score: float | None, num_steps: int) -> dict[str, Any]:
        made = dict(score=score, higher_is_better=True, size=[8, 8], at_edge=False, num_steps=num_steps)
        return {"classify": made}

    def row(*own: dict[str, Any]) -> dict[str, Any]:
        curves = {"all": {"r2": [0.5], "bounded_r2": [0.5]}}
        raptors = [dict(k=2, seed=seed, curves=curves, probes=found, **SCORES) for seed, found in enumerate(own)]
        rows = table1.summarise({"parameters": 1, "probes": probes(0.5, 84)}, raptors)
        assert "| 2 | 2+2 |" in table1.table(rows)
        return rows[1]["scores"]["classify"]["recovery"]

    assert row(probes(0.5, 84))["mean"] == 1.0 and row(probes(0.5, 33))["mean"] is None
    assert row(probes(None, 84), probes(0.6, 84)) == {"mean": None, "deviation": None}
    assert table1.shown({"mean": 0.9612, "deviation": 0.004}, percent=True, unit=" %") == "96.1 ± 0.4 %"


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


def test_ablation_rows_have_equal_steps_and_the_untouched_head(
    teacher: str, tiny: dict[str, Any], tmp_path: Path
) -> None:
    training = dict(model=teacher, k=2, budget="4steps", batch_size=16, refit_epochs=1, lr=3e-3)
    cells = ["1-teacher-forcing-s0", "5-joint-s0"]
    config = ablation.Ablation(**tiny["images"], **training, tokens="patches", cells=cells, out=str(tmp_path))
    done = ablation.main(config)
    first, joint = done["rows"]
    assert first["num_steps"] == {"stage1": 4} and joint["num_steps"] == {"stage1": 2, "stage2": 2}
    assert len(done["missing"]) == 3
    lines = {line["number"]: line for line in done["table"]}
    assert list(lines) == ["1", "5", "6"]
    assert lines["6"]["accuracy"] == joint["refit"]["accuracy"] and joint["refit"]["from_head"]
    surrogate = open_vit(tmp_path / "raptors" / "5-joint-s0" / "surrogate")
    batch = held_out(surrogate)
    with torch.no_grad():
        right = (surrogate(batch.images).argmax(-1) == batch.labels).float().mean().item()
    assert lines["5"]["accuracy"] == pytest.approx(right)
    used = yaml.safe_load((tmp_path / "raptors" / "5-joint-s0" / "config.yaml").read_text())["recipe"]
    assert used["lr"] == 3e-3
    config.budget = "60s"
    with pytest.raises(ValueError, match="equal steps"):
        ablation.main(config)


def test_swaps_give_the_accuracy_of_the_model_with_two_blocks_exchanged(
    sweep_folder: Path, tiny: dict[str, Any], tmp_path: Path
) -> None:
    options = dict(**tiny["images"], teachers=str(sweep_folder), k=2, num_images=8, cells=["p0-s0"])
    done = swaps.main(swaps.Swaps(**options, out=str(tmp_path)))
    (row,) = done["rows"]
    assert done["missing"] == ["p0.5-s0", "p0.5-s1"]
    vit = open_vit(sweep_folder / "teachers" / "p0-s0" / "teacher")
    batch, (first, _) = held_out(vit), row["phases"]
    within, across, rest = [], [], []
    for (i, j), accuracy in zip(row["pairs"], row["swapped_accuracy"], strict=True):
        with torch.no_grad(), swap_blocks(vit, i, j):
            assert accuracy == pytest.approx((vit(batch.images).argmax(-1) == batch.labels).float().mean().item())
        is_within = (i <= first) == (j <= first)
        (within if is_within else across).append(accuracy)
        if i != 1 and not is_within:
            rest.append(accuracy)
    assert len(row["pairs"]) == len(row["angle_std"]) == 6 and min(row["angle_std"]) > 0
    assert row["compared_accuracy"]["within"] == pytest.approx(np.mean(within))
    assert row["compared_accuracy"]["across"] == pytest.approx(np.mean(across))
    assert row["without_first_accuracy"]["across"] == pytest.approx(np.mean(rest))
    assert (tmp_path / "swaps.png").exists()


def test_accuracy_is_of_the_classes_that_the_head_names(teacher: str, tiny: dict[str, Any], tmp_path: Path) -> None:
    """The names of the head in another order give other labels; as many other names are refused."""
    classes = json.loads((Path(teacher) / "config.json").read_text())["classes"]
    named = {}
    for word, names in (("same", classes), ("turned", classes[::-1]), ("other", [f"not {c}" for c in classes])):
        shutil.copytree(teacher, tmp_path / word)
        config = json.loads((tmp_path / word / "config.json").read_text())
        (tmp_path / word / "config.json").write_text(json.dumps({**config, "classes": names}))
        options = dict(**tiny["images"], models=[str(tmp_path / word)], k=2, num_images=8)
        asked = swaps.Swaps(**options, out=str(tmp_path / f"{word}-swaps"))
        if word == "other":
            with pytest.raises(ValueError, match="not those of the head"):
                swaps.main(asked)
        else:
            named[word] = swaps.main(asked)["rows"][0]["accuracy"]
    vit = open_vit(teacher)
    batch = held_out(vit)
    with torch.no_grad():
        chosen = vit(batch.images).argmax(-1)
    assert named["same"] == pytest.approx((chosen == batch.labels).float().mean().item())
    assert named["turned"] == pytest.approx((chosen == vit.num_classes - 1 - batch.labels).float().mean().item())


def test_swaps_of_a_model_without_classifier_show_the_angle() -> None:
    means = dict(within=0.1, across=0.3, within_matched=None, across_matched=0.2)
    row = dict(cell="timm_vit_base_patch16_224", p=None, phases=[2, 1], pairs=[[1, 2], [1, 3], [2, 3]])
    row |= dict(accuracy=None, swapped_accuracy=None, compared_accuracy=None)
    figure = figure_swaps([{**row, "compared": {"all": means}, "angle": [0.1, 0.3, 0.2]}])
    labels = {ax.get_ylabel() for part in figure.subfigs for ax in part.axes}
    assert "turn (rad), mean over pairs" in labels
    assert figure.subfigs[0].axes[0].get_title(loc="left") == "timm_vit_base_patch16_224"


def test_partitions_against_brute_force(sweep_folder: Path, tiny: dict[str, Any], tmp_path: Path) -> None:
    options = dict(teachers=str(sweep_folder), k=[2], budget="3steps", batch_size=16, tokens="cls")
    config = partitions.Partitions(**tiny["images"], **options, maxcut_seeds=[0, 1], out=str(tmp_path))
    done = partitions.main(config)  # 0 is the seed of all of them
    ways = done["partitions"]["2"]
    # Four layers in two phases: max-cut's and exactly the other two.
    assert {tuple(p) for p in (ways["maxcut"], *ways["random"])} == {(1, 3), (2, 2), (3, 1)}
    distance = 1 - np.array(done["similarity"])
    across = {n: distance[:n, n:].sum() for n in (1, 2, 3)}
    assert ways["maxcut"][0] == max(across, key=across.__getitem__)
    rows = done["rows"]
    for measure in ("r2_last", "bounded_r2_last"):
        (value,) = [row[measure] for row in rows if row["way"] == "maxcut" and row["seed"] == 0]
        sample = [row[measure] for row in rows if row["way"] == "random"]
        expected = stats.zmap([value], sample, ddof=1)[0]
        assert done["statistics"]["2"]["maxcut"][measure]["z"] == pytest.approx(expected)
    # A partition that two ways choose is trained once; max-cut's with a second seed.
    assert len(list((tmp_path / "cells").glob("k2-*.json"))) == 4
    again = [row for row in rows if row["seed"] == 1]
    assert [(row["way"], row["phases"]) for row in again] == [("maxcut", ways["maxcut"])]
    config.num_random = 1
    with pytest.raises(ValueError, match="num_random: 10 -> 1"):
        partitions.main(config)


def test_statistics_of_partitions_by_hand() -> None:
    def row(way: str, first: int, accuracy: float, seed: int = 0) -> dict[str, Any]:
        scores = dict.fromkeys(partitions.MEASURES, accuracy)
        return dict(k=2, way=way, phases=[first, 12 - first], seed=seed, **scores)

    random = [row("random", n, 0.5 - 0.01 * max(n, 12 - n) + 0.001 * n) for n in (1, 2, 3, 4, 9, 11)]
    best = [row("maxcut", 6, 0.46), row("dp-cut", 6, 0.46)]
    accuracy = [r["accuracy"] for r in random]
    z = partitions.maxcut_z([*random, *best, row("maxcut", 6, 0.44, seed=1)])
    assert z == pytest.approx([(a - np.mean(accuracy)) / np.std(accuracy, ddof=1) for a in (0.46, 0.44)])
    # A partition is not compared with itself.
    own = partitions.statistics([row("dp-mean", 1, 0.1), *random])["dp-mean"]["accuracy"]
    assert own["num"] == 5 and own["mean"] == pytest.approx(np.mean(accuracy[1:]))


def test_untrained_trained_and_overfitted(sweep_folder: Path, tiny: dict[str, Any], tmp_path: Path) -> None:
    options = dict(teachers=str(sweep_folder), p=0.5, overfit_images=32)
    done = untrained.main(untrained.Untrained(**tiny["scratch"], **options, out=str(tmp_path)))
    rows = {row["kind"]: row for row in done["rows"]}
    assert list(rows) == ["trained", "untrained", "overfitted"]
    swept = json.loads((sweep_folder / "stochastic-depth.json").read_text())["rows"][1]
    # The sweep's own teacher, not trained again.
    assert rows["trained"]["teacher"]["accuracy"] == swept["teacher"]["accuracy"]
    assert rows["trained"]["raptor"]["curves"] == swept["raptor"]["curves"]
    assert not (tmp_path / "teachers" / "trained-s0").exists()
    config = (tmp_path / "teachers" / "overfitted-s0" / "config.yaml").read_text()
    assert "augment: none" in config and "drop: 0.0" in config and "smoothing: 0.0" in config
    assert (tmp_path / "untrained.png").exists()
    assert untrained.steps_of("40epochs", 97) == "3880steps" and untrained.steps_of("60s", 97) == "60s"


@torch.no_grad()
def test_a_teacher_in_stretches_has_the_states_at_the_ends_of_phases(teacher: str) -> None:
    vit = open_vit(teacher)
    by_phases = controls.in_stretches(vit, controls.Phases((1, 3)))
    images = held_out(vit).images
    states, output = vit.record(images)
    at_ends, same_output = by_phases.record(images)
    assert by_phases.num_layers == 2
    for state_btd, end_btd in zip((states[0], states[1], states[4]), at_ends):
        assert torch.equal(state_btd, end_btd)
    assert torch.equal(output, same_output)


def test_controls_have_equal_steps_and_the_untied_one_uses_each_block_once(
    teacher: str, tiny: dict[str, Any], tmp_path: Path
) -> None:
    options = dict(model=teacher, k=2, budget="4steps", batch_size=16, tokens="all", recipe="quick")
    found = controls.main(controls.Controls(**tiny["images"], **options, out=str(tmp_path)))
    rows = {row["student"]: row for row in found["rows"]}
    assert list(rows) == list(controls.STUDENTS)
    assert len({json.dumps(row["phases"]) for row in rows.values()}) == 1
    assert {sum(row["num_steps"].values()) for row in rows.values()} == {4}
    blocks = [sum(p.numel() for p in block.parameters()) for block in open_vit(teacher).blocks]
    assert rows["autonomous"]["parameters"] == rows["untied"]["parameters"] == 2 * blocks[0]
    assert rows["tied"]["parameters"] > rows["autonomous"]["parameters"]  # by the rows of its depths
