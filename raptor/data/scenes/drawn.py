"""The built-in scenes as data, with labels or with masks and depth maps: drawn on the device that needs them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raptor.data.dense import DenseData, Size
from raptor.data.memory import WholeBatches
from raptor.data.names import PackedNames
from raptor.data.scenes.layout import CLASSES, NUM_IMAGES, label_images
from raptor.data.scenes.render import DEFAULT_SIZE, MASK_CLASSES, SceneBatch, draw_scenes

_MAX_DEPTH = 12.0


@cache
def _listing() -> tuple[PackedNames, list[int], list[str]]:
    """Names, labels and parts of all scenes, the training ones first."""
    parts: list[str] = []
    names: list[str] = []
    for part, num_images in NUM_IMAGES.items():
        parts += [part] * num_images
        names += [f"{part}/{i:06d}" for i in range(num_images)]
    return PackedNames.pack(names), label_images(torch.arange(len(names)), "all").tolist(), parts


class DrawnScenes(WholeBatches):
    """All scenes: those to train on, then those to judge on."""

    def __init__(self, size: int | None = None) -> None:
        self.side = size or DEFAULT_SIZE
        names, labels, parts = _listing()
        super().__init__("scenes", names, labels, list(CLASSES), parts, keys=names)

    def sample(self, limit: int | None) -> list[int]:
        """The first `limit` scenes: their order is random already."""
        if limit is not None and limit < 1:
            raise ValueError(f"the number of images must be at least 1; got {limit}")
        num_images = len(self)
        if limit is not None:
            num_images = min(limit, num_images)
        return list(range(num_images))

    def select(self, indices: Sequence[int], why: str = "") -> Self:
        """As in `ImageData`; nobody has to be told that more could be drawn."""
        return super().select(indices)

    def worth_caching(self, device: torch.device) -> bool:
        return device.type != "cpu"  # on the CPU, drawing them all first would only delay the first step

    def take(self, positions: Tensor, device: torch.device) -> Tensor:
        return self.draw(positions, device).images

    def draw(self, positions: Tensor, device: str | torch.device = "cpu") -> SceneBatch:
        """Scenes at `positions` (B,) of all: images uint8 (B, 3, S, S), labels, masks, depths on `device`."""
        return draw_scenes(positions, self.side, "all", device)


class SceneFrames(DrawnScenes, DenseData):
    """The built-in scenes with their masks (background is a class) or their depth maps."""

    def __init__(self, task: str = "segment", size: int | None = None) -> None:
        self.side = size or DEFAULT_SIZE
        names, _, parts = _listing()
        facts: dict[str, Any] = {"classes": list(MASK_CLASSES)} if task == "segment" else {"max_depth": _MAX_DEPTH}
        DenseData.__init__(self, "scenes", task, names, parts, names, frame=(self.side, self.side), **facts)

    def _targets(self, drawn: SceneBatch) -> Tensor:
        return drawn.masks if self.task == "segment" else drawn.depths

    def pairs(self, indices: Tensor, size: Size, device: torch.device) -> tuple[Tensor, Tensor]:
        drawn = self.draw(self.positions[indices], device)
        images = drawn.images
        if images.shape[-2:] != size:
            images = F.interpolate(images.float(), size=size, mode="bicubic", antialias=True)
            images = images.round_().clamp_(0, 255).to(torch.uint8)
        return images, self._targets(drawn)

    def prefetch(self, indices: Tensor, size: Size) -> None:
        """Nothing to do: a scene is drawn when its batch is."""

    def target(self, position: int) -> np.ndarray:
        return self._targets(self.draw(torch.tensor([position])))[0].numpy()
