"""Batches of images with masks or depth maps: decoded, decoded ahead, kept and drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_images import colour, save_array

from raptor.data import DenseData, open_data, open_dense
from raptor.data import dense as dense_module
from raptor.data.dense import FrameStore

CPU = torch.device("cpu")


@pytest.fixture
def frames(tmp_path: Path) -> DenseData:
    """Six frames of 6 x 8 pixels with depths of 8 bit, whose values are the number of the frame."""
    for i in range(6):
        save_array(tmp_path / "train" / "rgb" / f"{i:04d}.png", colour(i))
        save_array(tmp_path / "train" / "depth" / f"{i:04d}.png", np.full((6, 8), i, np.uint8))
    return open_dense(f"nyuv2:{tmp_path}", "all", "depth")


def test_a_batch_is_its_frames(frames: DenseData) -> None:
    images, depths = frames.pairs(torch.tensor([4, 1]), (6, 8), CPU)
    assert images.shape == (2, 3, 6, 8) and images.dtype == torch.uint8 and depths.dtype == torch.float32
    np.testing.assert_array_equal(images[0].permute(1, 2, 0).numpy(), colour(4))
    torch.testing.assert_close(depths, torch.tensor([4.0, 1.0]).view(2, 1, 1).expand(2, 6, 8) / 25.5)
    few = frames.select([5, 4])
    assert torch.equal(few.pairs(torch.tensor([1]), (6, 8), CPU)[0][0], images[0])


def test_a_fingerprint_of_frames_sees_the_sizes_of_images_and_targets(frames: DenseData, tmp_path: Path) -> None:
    spec, before = f"nyuv2:{tmp_path}", frames.fingerprint()
    images = open_data(spec, "all").fingerprint()
    save_array(tmp_path / "train" / "depth" / "0003.png", colour(1)[..., 0])
    changed = open_dense(spec, "all", "depth")
    assert changed.fingerprint() != before and open_data(spec, "all").fingerprint() == images  # no targets there
    save_array(tmp_path / "train" / "rgb" / "0003.png", np.zeros((6, 8, 3), np.uint8))
    assert open_dense(spec, "all", "depth").fingerprint() != changed.fingerprint()
    assert open_data(spec, "all").fingerprint() != images


def test_decoding_ahead_changes_nothing(frames: DenseData) -> None:
    expected = frames.pairs(torch.tensor([2, 0]), (3, 4), CPU)
    frames.prefetch(torch.tensor([2, 5]), (3, 4))
    again = frames.pairs(torch.tensor([2, 0]), (3, 4), CPU)
    frames.prefetch(torch.tensor([2, 0]), (6, 8))  # of another size: not used
    third = frames.pairs(torch.tensor([2, 0]), (3, 4), CPU)
    for batch in (again, third):
        assert all(torch.equal(a, b) for a, b in zip(batch, expected))


@pytest.mark.parametrize("fits", [True, False])
def test_a_store_keeps_frames_only_if_they_fit(frames: DenseData, monkeypatch: pytest.MonkeyPatch, fits: bool) -> None:
    num_bytes = 6 * (3 * 3 * 4 + 4 * 6 * 8)
    monkeypatch.setattr(dense_module, "free_bytes", lambda _device: num_bytes / (0.29 if fits else 0.31))
    store = FrameStore(frames, (3, 4), CPU)
    assert (store.images is not None) == fits
    assert FrameStore(frames, (3, 4), CPU, copies=2).images is None  # two processes would keep it twice
    store.prefetch(torch.tensor([3, 1]))
    for mine, expected in zip(store.batch(torch.tensor([3, 1])), frames.pairs(torch.tensor([3, 1]), (3, 4), CPU)):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("task", ["segment", "depth"])
def test_scenes_answer_the_same_call(task: str) -> None:
    """Drawn where they are needed, so there is nothing to keep on the CPU."""
    data = open_dense("scenes", "val", task, limit=8, size=16)
    store = FrameStore(data, (16, 16), CPU)
    assert store.images is None
    store.prefetch(torch.tensor([7, 2]))
    images, targets = store.batch(torch.tensor([7, 2]))
    for row, index in enumerate((7, 2)):
        image, target = data.pair(index)
        np.testing.assert_array_equal(images[row].permute(1, 2, 0).numpy(), np.asarray(image))
        np.testing.assert_array_equal(targets[row].numpy(), target)
