"""The built-in scenes as data, with labels or with masks and depth maps: drawn on the device that needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from raptor.data.dense import DenseData, Size
from raptor.data.memory import WholeBatches
from raptor.data.scenes.layout import CLASSES, label_images
from raptor.data.scenes.render import DEFAULT_SIZE, MASK_CLASSES, NUM_IMAGES, SceneBatch, draw_scenes
from raptor.data.split import Split

_MAX_DEPTH = 12.0


class DrawnScenes(WholeBatches):
    """Scenes of one split, or training and validation scenes one after the other (`all`)."""

    def __init__(self, split: Split = "train", size: int | None = None) -> None:
        if split == "own":
            split = "val"
        if split not in ("train", "val", "all"):
            raise ValueError(f"unknown split {split!r}; use train, val or all")
        self.side = size or DEFAULT_SIZE
        self.splits = [split]
        if split == "all":
            self.splits = ["train", "val"]
        names: list[str] = []
        labels: list[int] = []
        for part in self.splits:
            num_images = NUM_IMAGES[part]
            names += [f"{part}/{i:06d}" for i in range(num_images)]
            labels += label_images(torch.arange(num_images), part).tolist()
        parts = [name.partition("/")[0] for name in names]
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
        """Scenes at `positions` (B,) of the whole set: images uint8 (B, 3, S, S), labels, masks, depths on `device`."""
        if len(self.splits) == 1:
            return draw_scenes(positions, self.side, self.splits[0], device)
        # Training and validation scenes are drawn from other hashes, so by other calls.
        num_first = NUM_IMAGES[self.splits[0]]
        owner = (positions >= num_first).long()
        drawn = []
        for number, part in enumerate(self.splits):
            if (owner == number).any():
                drawn.append(draw_scenes(positions[owner == number] - number * num_first, self.side, part, device))
        # Both splits are drawn at once each, and put back in the order of `positions`.
        back = owner.argsort(stable=True).argsort().to(device)
        return SceneBatch(*(torch.cat(fields)[back] for fields in zip(*drawn)))


class SceneFrames(DenseData):
    """The built-in scenes with their masks (background is a class) or their depth maps."""

    def __init__(self, split: Split = "train", task: str = "segment", size: int | None = None) -> None:
        self.drawn = DrawnScenes(split, size)
        frame = (self.drawn.side, self.drawn.side)
        facts: dict[str, Any] = {"classes": list(MASK_CLASSES)} if task == "segment" else {"max_depth": _MAX_DEPTH}
        super().__init__("scenes", task, self.drawn.names, self.drawn.parts, self.drawn.keys, frame=frame, **facts)

    def sample(self, limit: int | None) -> list[int]:
        return self.drawn.sample(limit)

    def worth_caching(self, device: torch.device) -> bool:
        return self.drawn.worth_caching(device)

    def pairs(self, indices: Tensor, size: Size, device: torch.device) -> tuple[Tensor, Tensor]:
        drawn = self.drawn.draw(self.positions[indices], device)
        images = drawn.images
        if images.shape[-2:] != size:
            images = F.interpolate(images.float(), size=size, mode="bicubic", antialias=True)
            images = images.round_().clamp_(0, 255).to(torch.uint8)
        return images, drawn.masks if self.task == "segment" else drawn.depths

    def prefetch(self, indices: Tensor, size: Size) -> None:
        """Nothing to do: a scene is drawn when its batch is."""

    def read(self, position: int, side: int | None = None) -> Image.Image:
        return self.drawn.read(position)

    def target(self, position: int) -> np.ndarray:
        drawn = self.drawn.draw(torch.tensor([position]))
        target = drawn.masks if self.task == "segment" else drawn.depths
        return target[0].numpy()
