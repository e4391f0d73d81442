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
from raptor.data.scenes.layout import CLASSES
from raptor.data.scenes.render import draw_scenes


def test_scenes_are_drawn_in_batches() -> None:
    data = open_data("scenes", "val", limit=10, size=32)
    preprocess = Preprocess(size=32, resize=32)
    drawn = draw_scenes(torch.arange(10), 32, "val")
    batches = list(iterate(data, preprocess, 4))
    assert torch.equal(torch.cat([b.images for b in batches]), preprocess.normalise(drawn.images))
    assert data.labels == drawn.labels.tolist() and data.classes == list(CLASSES)
    assert np.array_equal(np.asarray(data.load(3)), drawn.images[3].permute(1, 2, 0).numpy())
    larger = next(iter(iterate(data, Preprocess(size=56, resize=64), 4)))
    assert larger.images.shape == (4, 3, 56, 56)
    streams = [TrainStream(data, preprocess, 4, augment="crop", cache=cache) for cache in ("memory", "none")]
    assert torch.equal(streams[0].batch(1), streams[1].batch(1))


def test_all_scenes_are_both_splits() -> None:
    data = open_data("scenes", "all", size=16)
    assert isinstance(data, DrawnScenes)
    assert len(data) == 55_000
    train = draw_scenes(torch.tensor([5, 0]), 16, "train").images
    val = draw_scenes(torch.tensor([2, 0]), 16, "val").images
    mixed = data.draw(torch.tensor([50_002, 5, 50_000, 0])).images
    assert torch.equal(mixed, torch.stack([val[0], train[0], val[1], train[1]]))


def test_scenes_have_masks_and_depths() -> None:
    scenes = draw_scenes(torch.tensor([3]), 24, "val")
    masks, depths = (open_dense("scenes", "val", task, limit=5, size=24) for task in ("segment", "depth"))
    assert (len(masks), masks.num_classes, masks.classes and masks.classes[0]) == (5, 6, "background")
    assert depths.max_depth == 12 and masks.max_depth is None and masks.frame == (24, 24)
    image, mask = masks.pair(3)
    np.testing.assert_array_equal(np.array(image).transpose(2, 0, 1), scenes.images[0].numpy())
    np.testing.assert_array_equal(mask, scenes.masks[0].numpy())
    np.testing.assert_array_equal(depths.pair(3)[1], scenes.depths[0].numpy())
    assert open_dense("scenes", "train", "depth", limit=1).pair(0)[1].max() <= 12
