"""The scenes as data: drawn in batches, both splits, masks and depth maps."""

from __future__ import annotations

import numpy as np
import torch

from raptor.data import (
    Preprocess,
    TrainStream,
    iterate,
    open_data,
    open_dense,
)
from raptor.data.scenes.drawn import DrawnScenes
from raptor.data.scenes.render import Scenes


def test_scenes_are_drawn_in_batches() -> None:
    data = open_data("scenes", "val", limit=10, size=32)
    preprocess = Preprocess(size=32, resize=32)
    drawn = Scenes("val", size=32).draw(torch.arange(10))
    batches = list(iterate(data, preprocess, 4))
    assert torch.equal(torch.cat([b.images for b in batches]), preprocess.normalise(drawn.images))
    assert data.labels == drawn.labels.tolist() and data.classes == list(Scenes.classes)
    assert np.array_equal(np.asarray(data.load(3)), drawn.images[3].permute(1, 2, 0).numpy())
    larger = next(iter(iterate(data, Preprocess(size=56, resize=64), 4)))
    assert larger.images.shape == (4, 3, 56, 56)
    streams = [TrainStream(data, preprocess, 4, augment="crop", cache=cache) for cache in ("memory", "none")]
    assert torch.equal(streams[0].batch(1), streams[1].batch(1))


def test_all_scenes_are_both_splits() -> None:
    data = open_data("scenes", "all", size=16)
    assert isinstance(data, DrawnScenes)
    train, val = Scenes("train", size=16), Scenes("val", size=16)
    assert len(data) == len(train) + len(val)
    mixed = data.draw(torch.tensor([len(train) + 2, 5, len(train), 0])).images
    expected = torch.stack([val[2].images, train[5].images, val[0].images, train[0].images])
    assert torch.equal(mixed, expected)


def test_scenes_have_masks_and_depths() -> None:
    scenes = Scenes("val", size=24)[3]
    masks, depths = (open_dense("scenes", "val", task, limit=5, size=24) for task in ("segment", "depth"))
    assert (len(masks), masks.num_classes, masks.classes and masks.classes[0]) == (5, 6, "background")
    assert depths.max_depth == 12 and masks.max_depth is None and masks.frame == (24, 24)
    image, mask = masks.load(3)
    np.testing.assert_array_equal(np.array(image).transpose(2, 0, 1), scenes.images.numpy())
    np.testing.assert_array_equal(mask, scenes.masks.numpy())
    np.testing.assert_array_equal(depths.load(3)[1], scenes.depths.numpy())
    assert open_dense("scenes", "train", "depth", limit=1).load(0)[1].max() <= 12
