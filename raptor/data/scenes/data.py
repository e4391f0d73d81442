"""The built-in scenes as image data: drawn in batches on the device that needs them."""

from __future__ import annotations

import torch
from PIL import Image
from torch import Tensor

from raptor.data.folder import ImageData
from raptor.data.scenes.layout import lay_out
from raptor.data.scenes.render import SceneBatch, Scenes
from raptor.data.split import Split


class DrawnScenes(ImageData):
    """Scenes of one split, or training and validation scenes one after the other (`all`)."""

    def __init__(self, split: Split = "train", size: int | None = None) -> None:
        if split not in ("train", "val", "all"):
            raise ValueError(f"unknown split {split!r}; use train, val or all")
        wanted = ["train", "val"] if split == "all" else [split]
        self.scenes = [Scenes(part) if size is None else Scenes(part, size=size) for part in wanted]
        names = [f"{scenes.split}/{i:06d}" for scenes in self.scenes for i in range(len(scenes))]
        labels = [
            label
            for scenes in self.scenes
            for label in lay_out(torch.arange(len(scenes)), scenes.seed, scenes.split).label.tolist()
        ]
        parts = [scenes.split for scenes in self.scenes for _ in range(len(scenes))]
        super().__init__("scenes", names, labels, list(Scenes.classes), parts)
        self.starts = [0, len(self.scenes[0])]

    def sample(self, limit: int | None) -> list[int]:
        """The first `limit` scenes: their order is random already."""
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1; got {limit}")
        return list(range(len(self) if limit is None else min(limit, len(self))))

    def draw(self, indices: Tensor, device: str | torch.device = "cpu") -> SceneBatch:
        """Scenes `indices` (B,): images uint8 (B, 3, S, S), labels, masks and depths on `device`."""
        where = torch.tensor([self.positions[i] for i in indices.tolist()])
        if len(self.scenes) == 1:
            return self.scenes[0].draw(where, device)
        owner = (where >= self.starts[1]).long()
        order = owner.argsort(stable=True)
        drawn = [
            scenes.draw(where[owner == part] - start, device)
            for part, (scenes, start) in enumerate(zip(self.scenes, self.starts))
            if (owner == part).any()
        ]
        back = order.argsort().to(device)
        return SceneBatch(*(torch.cat(fields)[back] for fields in zip(*drawn)))

    def read(self, position: int) -> Image.Image:
        part = int(position >= self.starts[1]) if len(self.scenes) > 1 else 0
        image = self.scenes[part].draw(torch.tensor([position - self.starts[part]])).images[0]
        return Image.fromarray(image.permute(1, 2, 0).numpy())
