from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from raptor.data import TrainStream, iterate, open_data
from raptor.experiments import stochastic_depth
from raptor.experiments.figures import figure_stochastic_depth
from raptor.experiments.raptors import best_teacher
from raptor.experiments.records import GroupCurves, RaptorScores, StochasticDepth, StochasticDepthRow
from raptor.experiments.scratch import SHAPE, untrained_teacher
from raptor.open import open_vit
from raptor.report.style import save_figure
from raptor.train.teacher import train_teacher


def rows_of(folder: Path) -> dict[str, StochasticDepthRow]:
    values = json.loads((folder / "stochastic-depth.json").read_text())
    assert values["missing"] == [] and {"command", "versions", "device", "seconds"} <= set(values)
    return {row.cell: row for row in StochasticDepth.read(folder).rows}


def test_the_sweep_measures_what_it_says(sweep_folder: Path) -> None:
    rows = rows_of(sweep_folder)
    assert list(rows) == ["p0-s0", "p0.5-s0", "p0.5-s1"]
    row = rows["p0.5-s1"]
    assert (row.p, row.seed, sum(row.raptor.phases)) == (0.5, 1, 4)
    assert row.raptor.num_steps == {"stage2": 4}  # only the autoregressive stage
    assert row.raptor.phases == row.similarity.phases and len(row.raptor.phases) == 2

    teacher = open_vit(sweep_folder / "teachers" / "p0.5-s1" / "teacher")
    surrogate = open_vit(sweep_folder / "raptors" / "p0.5-s1" / "surrogate")
    batch = next(iter(iterate(open_data("scenes", "val", limit=48, size=32), teacher.preprocess, 48)))
    with torch.no_grad():
        states, output = teacher.record(batch.images)
        own, own_output = surrogate.record(batch.images)
    right = (output.argmax(-1) == batch.labels).float().mean().item()
    assert row.teacher.accuracy == pytest.approx(right)
    assert row.raptor.accuracy == pytest.approx((own_output.argmax(-1) == batch.labels).float().mean().item())
    for group, where in (("cls", slice(0, 1)), ("patches", slice(1, None))):
        t, s = (x[-1][:, where].double().reshape(-1, 32).numpy() for x in (states, own))
        r2 = 1 - ((s - t) ** 2).sum() / ((t - t.mean(0)) ** 2).sum()
        squared = np.mean([np.corrcoef(a, b)[0, 1] ** 2 for a, b in zip(t, s)])
        curves = row.raptor.curves[group]
        assert curves.r2[-1] == pytest.approx(r2, rel=1e-3, abs=1e-4)
        assert curves.bounded_r2[-1] == pytest.approx(squared, rel=1e-3)
        # Beside it the null models, here a_0 for every layer.
        still = (
            1 - ((states[0][:, where].double().reshape(-1, 32).numpy() - t) ** 2).sum() / ((t - t.mean(0)) ** 2).sum()
        )
        nulls = row.raptor.nulls
        assert list(nulls) == ["identity", "mean", "tied", "linear"]
        assert nulls["identity"][group].r2[-1] == pytest.approx(still, rel=1e-3, abs=1e-4)
        assert row.raptor.best_null(group) == max(nulls[name][group].r2[-1] for name in nulls)
    assert RaptorScores(phases=[2, 2], curves={}).best_null() is None


def test_similarity_is_that_of_the_training_images(sweep_folder: Path) -> None:
    row = rows_of(sweep_folder)["p0-s0"].similarity
    teacher = open_vit(sweep_folder / "teachers" / "p0-s0" / "teacher")
    batch = next(iter(iterate(open_data("scenes", "train", limit=96, size=32), teacher.preprocess, 96)))
    with torch.no_grad():
        states = teacher.record(batch.images)[0][1:]
    unit = [torch.nn.functional.normalize(x.double(), dim=-1) for x in states]
    matrix = np.array([[float((a * b).sum(-1).mean()) for b in unit] for a in unit])
    np.testing.assert_allclose(row.matrices["all"], matrix, atol=2e-5)
    pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
    assert row.off_diagonal == pytest.approx(np.mean([matrix[p] for p in pairs]), abs=1e-5)
    first = row.phases[0]
    within = [matrix[i, j] for i, j in pairs if (i < first) == (j < first)]
    assert row.within_phases == pytest.approx(np.mean(within), abs=1e-5)


def test_figures_tables_and_the_best_teacher(sweep_folder: Path) -> None:
    assert (sweep_folder / "stochastic-depth.png").stat().st_size > 20_000
    assert (sweep_folder / "stochastic-depth.svg").exists()
    assert len((sweep_folder / "stochastic-depth.md").read_text().splitlines()) == 2 + 3
    rows = rows_of(sweep_folder)
    best = Path(best_teacher(sweep_folder)).parent.name
    assert rows[best].teacher.accuracy == max(row.teacher.accuracy for row in rows.values())


def test_a_raptor_that_diverged_is_still_drawn(sweep_folder: Path) -> None:
    rows = list(rows_of(sweep_folder).values())
    raptor = rows[0].raptor
    curves = {
        group: GroupCurves(**{name: [*curve[:-1], None] for name, curve in vars(found).items()})
        for group, found in raptor.curves.items()
    }
    rows[0] = replace(rows[0], raptor=replace(raptor, bounded_r2_last=None, curves=curves))
    found = StochasticDepth(rows=rows, statistics=stochastic_depth.statistics(rows))
    figure = figure_stochastic_depth(found)
    assert len(save_figure(figure, sweep_folder / "diverged", ("png",))) == 1


def test_the_untrained_teacher_is_where_training_starts(tiny: SimpleNamespace, tmp_path: Path) -> None:
    options = {**tiny.shape, "registers": 2, "seed": 3}
    first = untrained_teacher(options, 7, "cpu").model.state_dict()
    again = untrained_teacher(options, 7, "cpu").model.state_dict()
    other = untrained_teacher({**options, "seed": 4}, 7, "cpu").model.state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.0.attn.qkv.weight"], other["blocks.0.attn.qkv.weight"])
    assert (first["reg_token"][0, 0] - first["reg_token"][0, 1]).norm() > 0.5 * first["reg_token"][0, 0].norm()
    budget = dict(budget="1steps", batch_size=8, lr=0.0, weight_decay=0.0, limit=16, val_images=8, device="cpu")
    train_teacher(SHAPE, "scenes", out=str(tmp_path), **tiny.shape, registers=2, seed=3, **budget)
    start, trained = untrained_teacher(options, 20, "cpu"), open_vit(tmp_path / "teacher")
    for name in ("reg_token", "blocks.0.attn.qkv.weight", "pos_embed"):
        assert torch.equal(trained.model.state_dict()[name], start.model.state_dict()[name]), name


def test_an_interrupted_sweep_goes_on_to_the_same_numbers(
    sweep_folder: Path, tiny: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_batch, seen, stops = TrainStream.batch, [], []

    def batch_then_stop(stream: TrainStream, step: int, stage: str = "stage1") -> torch.Tensor:
        seen.append((stage, step))
        if stops and seen[-1] == stops[-1]:
            stops.pop()
            os.kill(os.getpid(), signal.SIGTERM)
        return plain_batch(stream, step, stage)

    monkeypatch.setattr(TrainStream, "batch", batch_then_stop)
    options = dict(**tiny.images, **tiny.shape, **tiny.budgets, p=[0.5], more_p=[], out=str(tmp_path))
    for stop in (("teacher", 4), ("stage2", 2)):
        stops.append(stop)
        with pytest.raises(KeyboardInterrupt):
            stochastic_depth.run(**options)
        assert not (tmp_path / "cells" / "p0.5-s0.json").exists()
    stochastic_depth.run(**options)
    assert [step for stage, step in seen if stage == "teacher"] == list(range(8))
    assert [step for stage, step in seen if stage == "stage2"] == list(range(4))
    one, other = rows_of(tmp_path)["p0.5-s0"], rows_of(sweep_folder)["p0.5-s0"]
    assert one.raptor.curves == other.raptor.curves
    assert one.similarity == other.similarity and one.teacher.accuracy == other.teacher.accuracy
