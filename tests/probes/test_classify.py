"""Classification: published heads, the model's own head, closed forms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from sklearn.linear_model import Ridge
from tiny_probe import data_for, run

from raptor.certificate.linear_head import LinearHead
from raptor.data import ImageData
from raptor.probes import probe
from raptor.probes.classify import Classify
from raptor.vit.open import open_vit
from raptor.vit.view import ViT


def test_public_head_takes_part_as_epoch_0(vit: ViT, tmp_path: Path) -> None:
    path = tmp_path / "head.pth"
    weight, bias = run(vit, "classify", [], closed_form="ridge").head
    torch.save({"weight": weight, "bias": bias}, path)
    ruined = run(vit, "classify", [100.0], init_head=path)
    assert ruined.seeds[0].epochs == [0, 1, 2]
    assert ruined.seeds[0].chosen.epoch == 0 and torch.equal(ruined.head[0], weight)
    assert ruined.seeds[0].last.epoch == 2
    torch.save({"weight": torch.zeros(4, 160), "bias": bias}, path)
    with pytest.raises(ValueError, match="one-layer head"):
        run(vit, "classify", [0.1], init_head=path)
    with pytest.raises(ValueError, match="knows 1000 classes"):
        run(vit, "classify", [0.1], init_head=LinearHead(torch.zeros(1000, 64), torch.zeros(1000)))


def test_a_head_that_names_its_classes_is_matched_by_name(vit: ViT, tmp_path: Path) -> None:
    first = run(vit, "classify", [], closed_form="ridge")
    (weight, bias), names = first.head, data_for("classify")[0].classes
    assert LinearHead.load(first.save(tmp_path / "probe") / "head.safetensors").classes == names
    mixed = LinearHead(weight.flip(0), bias.flip(0), classes=names[::-1])
    more = LinearHead(
        torch.cat([weight.new_zeros(1, 64), weight]), torch.cat([bias.new_zeros(1), bias]), None, ["other", *names]
    )
    for head in (mixed, more):
        started = run(vit, "classify", [100.0], init_head=head.save(tmp_path / "head.safetensors"))
        assert started.seeds[0].chosen.epoch == 0 and torch.equal(started.head[0], weight)
    for strange, has in (([*"wxy", names[0]], "no output"), ([names[0]] * 4, "4 outputs")):
        with pytest.raises(
            ValueError, match=rf"head\.safetensors has {has} for the class .*: give another --init_head"
        ):
            run(
                vit,
                "classify",
                [0.1],
                init_head=LinearHead(weight, bias, classes=strange).save(tmp_path / "head.safetensors"),
            )
    save_file({"weight": weight, "bias": bias}, tmp_path / "head.safetensors", {"classes": '["a", 1]'})
    with pytest.raises(ValueError, match=r"does not name its 4 classes: save it again"):
        LinearHead.load(tmp_path / "head.safetensors")


def _with_head(num_classes: int) -> ViT:
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(img_size=24, patch_size=6, embed_dim=32, depth=3, num_heads=2)
    return open_vit(timm.create_model("vit_tiny_patch16_224", **shape, num_classes=num_classes), size=24)


def test_a_models_own_head_takes_part_as_epoch_0() -> None:
    own = _with_head(4)
    still = run(own, "classify", [1e-12])  # ties go to the first
    assert still.settings.init_head == "own" and still.seeds[0].epochs == [0, 1, 2]
    assert still.seeds[0].chosen.epoch == 0
    torch.testing.assert_close(still.head[0], torch.cat([own.model.head.weight, torch.zeros(4, 32)], dim=1))
    # It is of the last layer and of the data's classes; and it need not be wanted.
    of_others = replace(own, classes=list("wxyz"))
    elsewhere = [run(own, "classify", [0.1], layer=2)]
    elsewhere += [run(vit, "classify", [0.1]) for vit in (_with_head(7), of_others)]
    for other in (*elsewhere, run(own, "classify", [0.1], init_head="random")):
        assert other.settings.init_head == "random" and other.seeds[0].epochs == [1, 2]


def test_ridge_heads_are_scikit_learns(vit: ViT) -> None:
    train, val = data_for("classify")
    assert isinstance(train, ImageData) and isinstance(val, ImageData)
    task = Classify(vit, 3, train, val, batch_size=64, precision="fp32")
    x, y = (t.numpy().astype(np.float64) for t in task.features(task.fit_data))
    z = (x - x.mean(0)) / x.std(0)
    result = probe(vit, "classify", train, val, lrs=[30.0], closed_form="ridge")
    reference = Ridge(alpha=30.0).fit(z, np.eye(4)[y.astype(int)])
    features, labels = task.features(val)
    guess = reference.predict((features.numpy() - x.mean(0)) / x.std(0)).argmax(1)
    assert result.score == pytest.approx((guess == labels.numpy()).mean())
    assert result.settings.epochs is None and result.settings.weight_decay is None


def test_the_floor_is_the_commonest_class_of_training(vit: ViT) -> None:
    train, val = data_for("classify")
    assert train.labels is not None and val.labels is not None
    # Class 2 is the commonest of train, class 0 of val.
    train = train.select([i for i, label in enumerate(train.labels) if label == 2 or i < 100])
    val = val.select([i for i, label in enumerate(val.labels) if label == 0 or i < 60])
    task = Classify(vit, 3, train, val, batch_size=16, precision="fp32")
    assert task.floors() == {"majority class": pytest.approx(15 / 65)}
