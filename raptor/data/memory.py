"""Images decoded once and kept as uint8, on the GPU if asked: for many runs over the same data."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from raptor.data.decode import Progress, load_uint8
from raptor.data.folder import ImageData
from raptor.data.preprocess import Preprocess
from raptor.data.stream import to_device


class Drawn(NamedTuple):
    images: Tensor


class InMemory(ImageData):
    """The images of `data`, decoded for `preprocess`, as data that is drawn in batches."""

    def __init__(
        self,
        data: ImageData,
        preprocess: Preprocess,
        device: str | torch.device = "cpu",
        num_workers: int = 0,
        progress: Progress | None = None,
    ) -> None:
        if data.skip_bad:
            raise ValueError("images that may be skipped cannot be kept in memory: remove the bad ones first")
        super().__init__(data.name, list(data.names), data.labels, data.classes, data.parts)
        self.images = load_uint8(data, preprocess, num_workers, progress=progress).to(device)

    def draw(self, indices: Tensor, device: str | torch.device = "cpu") -> Drawn:
        """Images `indices` (B,) as uint8 (B, 3, S, S) on `device`."""
        where = torch.tensor([self.positions[i] for i in indices.tolist()])
        chosen = self.images.index_select(0, to_device(where, self.images.device))
        return Drawn(to_device(chosen, torch.device(device)))
