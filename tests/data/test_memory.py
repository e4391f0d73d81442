"""Sets that are joined, and sets in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tiny_images import write_hashed

from raptor.data import ImageData, InMemory, Preprocess, iterate, open_data
from raptor.data.memory import JoinedImages


def test_joined_sets(tmp_path: Path) -> None:
    a = write_hashed(tmp_path / "a", [f"x/{i}.png" for i in range(30)])
    b = write_hashed(tmp_path / "b", [f"train/y/b{i}.png" for i in range(7)] + ["val/y/c.png"])
    both = open_data([str(a), str(b), "scenes"], "train", limit=None, size=16)
    single = [open_data(spec, "train", size=16) for spec in (str(a), str(b), "scenes")]
    assert len(both) == sum(map(len, single)) and both.labels is None
    sample = both.select([0, len(single[0]), len(single[0]) + 6])
    assert [n.rsplit("/", 1)[-1] for n in list(sample.names)[1:]] == ["b0.png", "b6.png"]
    batch = next(iter(iterate(sample, Preprocess(size=16, resize=16), 3)))
    assert batch.images.shape == (3, 3, 16, 16) and len(set(batch.images.flatten(1).sum(1).tolist())) == 3
    assert open_data([str(a)], "train").labels is not None
    assert len(open_data([str(a), str(b)], "val")) == len(open_data(str(a), "val")) + 1
    same = write_hashed(tmp_path / "same", [f"x/more{i}.png" for i in range(4)])
    labelled = open_data([str(a), str(same)], "all")
    assert labelled.classes == ["x"] and labelled.labels == [0] * 34


PREPROCESS = Preprocess(size=12, resize=14)


def pixels_of(data: ImageData, indices: Sequence[int]) -> torch.Tensor:
    return next(data.batches([list(indices)], PREPROCESS, "cpu")).images


def test_images_in_memory_are_those_of_their_data(data: ImageData) -> None:
    """The same fingerprint, files and pixels, also of a part of them and of several sets end to end."""
    part = data.select([5, 2, 9])
    held = InMemory(part, PREPROCESS)
    assert held.fingerprint() == part.fingerprint() != data.fingerprint()
    assert held.select([2]).fingerprint() == data.select([9]).fingerprint()
    assert [held.file(i) for i in range(3)] == [data.file(i) for i in (5, 2, 9)]
    both = JoinedImages([held, InMemory(data, PREPROCESS)])
    expected = torch.cat([pixels_of(part, range(3)), pixels_of(data, range(23))])
    order = [25, 0, 3, 2, 7]
    assert torch.equal(pixels_of(both, order), expected[order])
