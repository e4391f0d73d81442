from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from teachers import SHAPE, untrained_teacher

from raptor.train.teacher import train_teacher
from raptor.vit.open import open_vit


def test_the_untrained_teacher_is_where_training_starts(tiny: SimpleNamespace, tmp_path: Path) -> None:
    options = {**tiny.shape, "registers": 2, "seed": 3}
    first = untrained_teacher(options, 7, "cpu").model.state_dict()
    again = untrained_teacher(options, 7, "cpu").model.state_dict()
    other = untrained_teacher({**options, "seed": 4}, 7, "cpu").model.state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.0.attn.qkv.weight"], other["blocks.0.attn.qkv.weight"])
    assert (first["reg_token"][0, 0] - first["reg_token"][0, 1]).norm() > 0.5 * first["reg_token"][0, 0].norm()
    budget = dict(budget="1steps", batch_size=8, lr=1e-30, weight_decay=0.0, limit=16, val_images=8, device="cpu")
    train_teacher(SHAPE, "scenes", out=str(tmp_path), **tiny.shape, registers=2, seed=3, **budget)
    start, trained = untrained_teacher(options, 20, "cpu"), open_vit(tmp_path / "teacher")
    for name in ("reg_token", "blocks.0.attn.qkv.weight", "pos_embed"):
        assert torch.equal(trained.model.state_dict()[name], start.model.state_dict()[name]), name
