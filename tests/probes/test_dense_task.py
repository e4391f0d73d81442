"""Dense tasks: sizes that need padding, real frames."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_probe import data_for, run

from raptor.data import DenseData, open_dense
from raptor.probes import probe
from raptor.probes.depth import Depth
from raptor.probes.features import normed_tokens, view_at
from raptor.vit.groups import pool
from raptor.vit.view import ViT


def test_other_sizes_pad_and_stay_finite(vit: ViT) -> None:
    result = run(vit, "depth", [1e-2], size=27, epochs=1)
    assert result.size == (27, 27) and math.isfinite(result.score)
    train, val = data_for("depth")
    assert isinstance(train, DenseData) and isinstance(val, DenseData)
    task = Depth(vit, 3, train, val, batch_size=8, precision="fp32", size=27)
    assert task.geometry.padded == (30, 30) and task.geometry.grid == (5, 5)
    assert [tuple(matrix.shape) for matrix in task.to_target] == [(24, 4 * 5)] * 2
    big = run(vit, "classify", [1e-2], size=36, epochs=1)
    assert big.size == (36, 36)
    tokens = normed_tokens(view_at(vit, 36, 36), torch.zeros(1, 3, 36, 36), 3, "fp32")
    assert tokens.shape == (1, 3 + 36, 32) and pool(tokens, vit.groups).shape == (1, 64)


@pytest.mark.parametrize("task", ["segment", "depth"])
def test_real_frames(vit: ViT, task: str) -> None:
    folder = Path(__file__).parents[3] / "shared" / "data"
    if not (folder / "nyuv2-train.zip").is_file():
        pytest.skip("the real NYUv2 frames are not available")
    train = open_dense(f"nyuv2:{folder / 'nyuv2-train.zip'}", "all", task, limit=40)
    val = open_dense(f"nyuv2:{folder / 'nyuv2-test.zip'}", "all", task, limit=12)
    result = probe(vit, task, train, val, size=45, lrs=[1e-3, 3e-2], epochs=3, batch_size=8)
    assert result.size == (45, 60) and result.num_images["reported"] == 12
    scores = result.chosen.mean
    if task == "depth":
        true = np.stack([val.pair(i)[1] for i in range(12)])
        guess_of_5_metres = math.sqrt(((true[true > 0] - 5.0) ** 2).mean())
        assert scores["rmse"] < guess_of_5_metres and 0 < scores["rmse_eigen"] < guess_of_5_metres
    else:
        assert 0 < scores["miou"] < 1 and 1 < scores["num_classes"] <= 39
