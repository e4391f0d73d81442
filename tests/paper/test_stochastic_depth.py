"""The sweep over stochastic depth: its numbers against states computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from figures import figure_stochastic_depth
from stochastic_depth import statistics
from surrogates import best_null
from sweep import Json
from teachers import SHAPE, ScratchConfig, check_shape, untrained_teacher

from raptor import iterate, open_data, open_vit, train_teacher


@pytest.fixture(scope="module")
def rows(sweep_folder: Path) -> dict[str, Json]:
    found = json.loads((sweep_folder / "stochastic-depth.json").read_text())
    assert found["missing"] == [] and {"command", "versions", "device", "settings"} <= set(found)
    return {row["cell"]: row for row in found["rows"]}


def test_the_sweep_measures_what_it_says(sweep_folder: Path, rows: dict[str, Json]) -> None:
    assert list(rows) == ["p0-s0", "p0.5-s0", "p0.5-s1"]
    row = rows["p0.5-s1"]
    raptor = row["raptor"]
    assert (row["p"], row["seed"], sum(raptor["phases"])) == (0.5, 1, 4)
    assert raptor["num_steps"] == {"stage2": 4}  # only the autoregressive stage
    assert raptor["phases"] == row["similarity"]["phases"] and len(raptor["phases"]) == 2

    teacher = open_vit(sweep_folder / "teachers" / "p0.5-s1" / "teacher")
    surrogate = open_vit(sweep_folder / "raptors" / "p0.5-s1" / "surrogate")
    batch = next(iter(iterate(open_data("scenes", "val", limit=48, size=32), teacher.preprocess, 48)))
    with torch.no_grad():
        states, output = teacher.record(batch.images)
        own, own_output = surrogate.record(batch.images)
    right = (output.argmax(-1) == batch.labels).float().mean().item()
    assert row["teacher"]["accuracy"] == pytest.approx(right)
    assert raptor["accuracy"] == pytest.approx((own_output.argmax(-1) == batch.labels).float().mean().item())
    for group, where in (("cls", slice(0, 1)), ("patches", slice(1, None))):
        t, s, start = (x[:, where].double().reshape(-1, 32).numpy() for x in (states[-1], own[-1], states[0]))
        total = ((t - t.mean(0)) ** 2).sum()
        squared = np.mean([np.corrcoef(a, b)[0, 1] ** 2 for a, b in zip(t, s)])
        curves, nulls = raptor["curves"][group], raptor["nulls"]
        assert curves["r2"][-1] == pytest.approx(1 - ((s - t) ** 2).sum() / total, rel=1e-3, abs=1e-4)
        assert curves["bounded_r2"][-1] == pytest.approx(squared, rel=1e-3)
        # Beside it the null models, here a_0 for every layer.
        assert list(nulls) == ["identity", "mean", "tied", "linear"]
        assert nulls["identity"][group]["r2"][-1] == pytest.approx(
            1 - ((start - t) ** 2).sum() / total, rel=1e-3, abs=1e-4
        )
        assert best_null(raptor, group) == max(nulls[name][group]["r2"][-1] for name in nulls)


def test_similarity_is_that_of_the_training_images(sweep_folder: Path, rows: dict[str, Json]) -> None:
    found = rows["p0-s0"]["similarity"]
    teacher = open_vit(sweep_folder / "teachers" / "p0-s0" / "teacher")
    batch = next(iter(iterate(open_data("scenes", "train", limit=96, size=32), teacher.preprocess, 96)))
    with torch.no_grad():
        states = teacher.record(batch.images)[0][1:]
    unit = [torch.nn.functional.normalize(x.double(), dim=-1) for x in states]
    matrix = np.array([[float((a * b).sum(-1).mean()) for b in unit] for a in unit])
    np.testing.assert_allclose(found["matrices"]["all"], matrix, atol=2e-5)
    pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
    assert found["off_diagonal"] == pytest.approx(np.mean([matrix[p] for p in pairs]), abs=1e-5)
    first = found["phases"][0]
    within = [matrix[i, j] for i, j in pairs if (i < first) == (j < first)]
    assert found["within_phases"] == pytest.approx(np.mean(within), abs=1e-5)


@pytest.mark.usefixtures("drawn_figures")
def test_the_figure_and_the_table(sweep_folder: Path, rows: dict[str, Json], tmp_path: Path) -> None:
    assert (sweep_folder / "stochastic-depth.png").stat().st_size > 20_000
    assert len((sweep_folder / "stochastic-depth.md").read_text().splitlines()) == 2 + 3
    # A surrogate that diverged is left out of the trends and drawn all the same.
    diverged = json.loads(json.dumps(list(rows.values())))
    diverged[0]["raptor"]["bounded_r2_last"] = None
    for curves in diverged[0]["raptor"]["curves"].values():
        curves["bounded_r2"][-1] = None
    found = statistics(diverged)
    assert found["trends"]["bounded_r2"]["num"] == 2 and found["trends"]["similarity"]["num"] == 3
    figure_stochastic_depth(diverged, found).savefig(tmp_path / "diverged.png")
    assert (tmp_path / "diverged.png").exists()


@pytest.mark.parametrize(
    ("changed", "drops", "words"),
    [
        ({"k": 5}, [0.0], "--k must be from 1 to the teacher's depth 4"),
        ({"heads": 3}, [0.0], "must be a multiple of --heads"),
        ({}, [1.0], r"--p must be in \[0, 1\)"),
    ],
)
def test_options_that_cannot_be_are_refused_before_training(
    tiny: dict[str, Any], changed: Json, drops: list[float], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        check_shape(ScratchConfig(**{**tiny["scratch"], **changed}, out="x"), drops)


def test_the_untrained_teacher_is_where_training_starts(tiny: dict[str, Any], tmp_path: Path) -> None:
    config = ScratchConfig(**tiny["scratch"], out="x")
    options = {**config.options(), "seed": 3}
    start = untrained_teacher(options, 20, config).model.state_dict()
    other = untrained_teacher({**options, "seed": 4}, 20, config).model.state_dict()
    assert not torch.equal(start["blocks.0.attn.qkv.weight"], other["blocks.0.attn.qkv.weight"])
    shape = {name: options[name] for name in ("size", "patch", "dim", "depth", "heads")}
    budget = dict(
        budget="1steps", batch_size=8, lr=1e-30, weight_decay=0.0, train_images=16, num_images=8, device="cpu"
    )
    train_teacher(SHAPE, "scenes", out=str(tmp_path), **shape, seed=3, **budget)
    trained = open_vit(tmp_path / "teacher").model.state_dict()
    for name in ("blocks.0.attn.qkv.weight", "pos_embed"):
        assert torch.equal(trained[name], start[name]), name
