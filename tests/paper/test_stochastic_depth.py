from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import stochastic_depth
import torch
from records import StochasticDepth, StochasticDepthRow

from raptor.data import TrainStream, iterate, open_data
from raptor.vit.open import open_vit


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


def test_the_figure_and_the_table(sweep_folder: Path) -> None:
    assert (sweep_folder / "stochastic-depth.png").stat().st_size > 20_000
    assert (sweep_folder / "stochastic-depth.svg").exists()
    assert len((sweep_folder / "stochastic-depth.md").read_text().splitlines()) == 2 + 3


def test_an_interrupted_sweep_goes_on_to_the_same_numbers(
    sweep_folder: Path, tiny: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_batch, seen, stops = TrainStream.batch, [], []

    def batch_then_stop(stream: TrainStream, step: int, stage: str = "stage1", size: int | None = None) -> torch.Tensor:
        seen.append((stage, step))
        if stops and seen[-1] == stops[-1]:
            stops.pop()
            os.kill(os.getpid(), signal.SIGTERM)
        return plain_batch(stream, step, stage, size)

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
