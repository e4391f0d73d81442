"""Mean, deviation and quantiles over images, streaming, with memory flat in the number of images.

Mean and deviation are exact. Quantiles come from a uniform reservoir of at most 4,096 images: exact up to that many,
a sample beyond.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
RESERVOIR_IMAGES = 4096


@dataclass
class Spread:
    """How a quantity is spread over images.

    `mean` and `std` (population) have the quantity's shape; `quantiles` has one more leading axis, in the order of
    `QUANTILES`. A quantity that is one number for the whole set has no `std` and no `quantiles`.
    """

    mean: np.ndarray
    std: np.ndarray | None = None
    quantiles: np.ndarray | None = None
    num_images: int = 0

    def __getitem__(self, index: Any) -> Spread:
        """The spread of a part of the quantity."""
        std = None if self.std is None else self.std[index]
        quantiles = None if self.quantiles is None else np.stack([q[index] for q in self.quantiles])
        return Spread(self.mean[index], std, quantiles, self.num_images)

    def to_dict(self) -> dict[str, Any]:
        named = None
        if self.quantiles is not None:
            named = {f"q{round(100 * q):02d}": jsonable(row) for q, row in zip(QUANTILES, self.quantiles)}
        return {
            "mean": jsonable(self.mean),
            "std": jsonable(self.std),
            "quantiles": named,
            "num_images": self.num_images,
        }


def jsonable(value: Any) -> Any:
    """Arrays as nested lists, complex numbers as [real, imaginary], numbers that are not finite as None."""
    if isinstance(value, (Spread, np.ndarray, np.generic)) or is_dataclass(value):
        return _jsonable_object(value)
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, complex):
        return [jsonable(value.real), jsonable(value.imag)]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def _jsonable_object(value: Any) -> Any:
    if isinstance(value, Spread):
        return value.to_dict()
    if isinstance(value, (np.ndarray, np.generic)):
        return jsonable(value.tolist())
    return {field.name: jsonable(getattr(value, field.name)) for field in fields(value)}


class ImageMoments:
    """Accumulates one array of values per image, on the values' own device.

    `reservoir` images are kept for the quantiles (0: none). Which ones is drawn on the host from `seed`, so no batch
    waits for the device.
    """

    def __init__(self, reservoir: int = RESERVOIR_IMAGES, seed: int = 0) -> None:
        self.reservoir = reservoir
        self.num_images = 0
        self._random = random.Random(seed)
        self._mean: Tensor | None = None
        self._squares: Tensor | None = None
        self._kept: Tensor | None = None

    def update(self, values: Tensor) -> None:
        """Add a batch of values, `(B, ...)`."""
        if len(values) == 0:
            return
        wide = values.detach().double()
        mean = wide.mean(0)
        squares = (wide - mean).square().sum(0)
        if self._mean is None or self._squares is None:
            self._mean, self._squares = mean, squares
        else:
            total = self.num_images + len(values)
            delta = mean - self._mean
            self._mean = self._mean + delta * (len(values) / total)
            self._squares = self._squares + squares + delta.square() * (self.num_images * len(values) / total)
        if self.reservoir:
            self._keep(values.detach().float())
        self.num_images += len(values)

    def _keep(self, values: Tensor) -> None:
        if self._kept is None:
            self._kept = values.new_zeros((self.reservoir, *values.shape[1:]))
        slots: dict[int, int] = {}
        for row in range(len(values)):
            image = self.num_images + row
            slot = image if image < self.reservoir else self._random.randrange(image + 1)
            if slot < self.reservoir:
                slots[slot] = row
        if not slots:
            return
        index = torch.tensor([list(slots.keys()), list(slots.values())]).to(values.device, non_blocking=True)
        self._kept.index_copy_(0, index[0], values.index_select(0, index[1]))

    def result(self) -> Spread:
        """Mean, deviation and quantiles so far."""
        if self._mean is None or self._squares is None:
            raise ValueError("no images were measured: call update with at least one batch first")
        std = (self._squares / self.num_images).sqrt().cpu().numpy()
        quantiles = None
        if self._kept is not None:
            kept = self._kept[: min(self.num_images, self.reservoir)].cpu().numpy().astype(np.float64)
            with np.errstate(invalid="ignore"):  # between two infinite values a quantile is not a number
                quantiles = np.quantile(kept, QUANTILES, axis=0)
        return Spread(self._mean.cpu().numpy(), std, quantiles, self.num_images)
