"""Drawn scenes: images, masks and depths that do not depend on their batch."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.linear_model import RidgeClassifier

from raptor.data.scenes import layout as scene_layout
from raptor.data.scenes import render as scenes
from raptor.data.scenes import solids
from raptor.data.scenes.render import MASK_CLASSES, SceneBatch, draw_scenes

CPU = torch.device("cpu")


def equal(a: SceneBatch, b: SceneBatch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.fixture(scope="module")
def batch() -> SceneBatch:
    return draw_scenes(torch.arange(200), size=32)


def test_types_and_shapes(batch: SceneBatch) -> None:
    images, labels, masks, depths = batch
    assert (images.shape, images.dtype) == ((200, 3, 32, 32), torch.uint8)
    assert (labels.shape, labels.dtype) == ((200,), torch.int64)
    assert (masks.shape, masks.dtype) == ((200, 32, 32), torch.uint8)
    assert (depths.shape, depths.dtype) == ((200, 32, 32), torch.float32)
    assert masks.max() < len(MASK_CLASSES)
    assert depths.min() > 1 and depths.max() < 13


@pytest.mark.parametrize("size", [16, 30, 48])
def test_an_image_does_not_depend_on_its_batch(size: int) -> None:
    indices = torch.tensor([7, 3, 12345, 3, 49_999, 0, 8])
    together = draw_scenes(indices, size)
    assert equal(together, draw_scenes(indices, size))
    for position, index in enumerate(indices):
        alone = draw_scenes(index[None], size)
        assert all(torch.equal(a[0], b[position]) for a, b in zip(alone, together))


def test_chunks_do_not_show(batch: SceneBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "CHUNK_PIXELS", {"cpu": 17 * 32 * 32})
    assert equal(batch, draw_scenes(torch.arange(200), size=32))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_draws_the_same(batch: SceneBatch) -> None:
    there = SceneBatch(*(field.cpu() for field in draw_scenes(torch.arange(200), size=32, device="cuda")))
    assert torch.equal(there.labels, batch.labels)
    assert (there.images.int() - batch.images.int()).abs().float().mean() < 0.1
    assert (there.masks != batch.masks).float().mean() < 1e-3


def test_splits_are_disjoint() -> None:
    indices = torch.arange(100)
    draws = [draw_scenes(indices, 16, split) for split in ("train", "val")]
    seen = {image.numpy().tobytes() for draw in draws for image in draw.images}
    assert len(seen) == 200


def test_objects_stand_before_the_background(batch: SceneBatch) -> None:
    layout = scene_layout.lay_out(torch.arange(200), "train")
    _, background = scenes._draw_background(layout, 32, CPU)
    objects = batch.masks > 0
    assert torch.equal(batch.depths[~objects], background[~objects])
    assert (batch.depths <= background)[objects].all()
    # Equal only where an object touches the ground.
    assert (batch.depths < background)[objects].float().mean() > 0.99


def test_the_nearest_object_has_the_shape_of_the_label(batch: SceneBatch) -> None:
    objects = torch.where(batch.masks > 0, batch.depths, torch.inf).flatten(1)
    shape = batch.masks.flatten(1).gather(1, objects.argmin(1, keepdim=True))[:, 0].long() - 1
    assert torch.equal(shape, batch.labels // len(scene_layout.MATERIALS))
    largest = torch.stack([(batch.masks == s + 1).sum((1, 2)) for s in range(len(solids.SHAPES))]).argmax(0)
    assert (largest == shape).float().mean() > 0.98
    assert ((batch.masks == (shape + 1)[:, None, None]).sum((1, 2)) > 0.03 * 32 * 32).all()


def test_ground_distance_is_that_of_a_plane() -> None:
    layout = scene_layout.lay_out(torch.arange(5), "val")
    _, distance = scenes._draw_background(layout, 16, CPU)
    for image in range(5):
        pitch, height = float(layout.pitch[image]), float(layout.height[image])
        for row, column in ((15, 0), (12, 7)):
            across, up = ((2 * i + 1) / 16 - 1 for i in (column, 15 - row))
            ray = (across * scene_layout.HALF_VIEW, up * scene_layout.HALF_VIEW, 1.0)
            fall = math.sin(pitch) * ray[2] - math.cos(pitch) * ray[1]
            assert float(distance[image, row, column]) == pytest.approx(height * math.hypot(*ray) / fall, rel=1e-5)


def test_leaving_out_tiles_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tight = draw_scenes(torch.arange(40), 48)

    def everywhere(layout: scene_layout.Layout, size: int, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        starts = torch.arange(0, size, scenes.TILE)
        owner, row, column = torch.meshgrid(torch.arange(len(chosen)), starts, starts, indexing="ij")
        return owner.flatten(), column.flatten(), row.flatten()

    monkeypatch.setattr(scenes, "_tiles", everywhere)
    assert equal(tight, draw_scenes(torch.arange(40), 48))


def test_a_size_that_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="scenes are drawn at 16 to 1024 pixels, not 8"):
        draw_scenes(torch.arange(1), 8)


def test_a_linear_probe_on_pixels_fails() -> None:
    train, val = draw_scenes(torch.arange(2000), 32), draw_scenes(torch.arange(500), 32, split="val")
    x, x_val = (b.images.flatten(1).float().div(255).sub(0.5).numpy() for b in (train, val))
    probe = RidgeClassifier(alpha=1000.0).fit(x, train.labels.numpy())
    assert probe.score(x_val, val.labels.numpy()) < 0.25
