"""Small data for tests of probes: four colours to classify, scenes to segment."""

from __future__ import annotations

import numpy as np
from PIL import Image

from raptor.data import DenseData, ImageData, open_dense
from raptor.probes import ProbeResult, probe
from raptor.vit.view import ViT

NUM = {"classify": (200, 80), "segment": (48, 16), "depth": (32, 12)}
COLOURS = np.array([[140, 110, 110], [110, 140, 110], [110, 110, 140], [130, 130, 130]])


class Coloured(ImageData):
    """Noisy pictures of four colours that overlap."""

    def __init__(self, split: str, num_images: int) -> None:
        names = [f"{split}/{i:03d}.png" for i in range(num_images)]
        super().__init__("coloured", names, [i % 4 for i in range(num_images)], ["r", "g", "b", "w"])
        self.offset = 0 if split == "train" else 10_000

    def read(self, position: int, side: int | None = None) -> Image.Image:
        rng = np.random.default_rng(self.offset + position)
        base = COLOURS[position % 4] + rng.normal(0, 15, 3)
        return Image.fromarray((base + rng.normal(0, 30, (24, 24, 3))).clip(0, 255).astype(np.uint8))


def data_for(task: str) -> tuple[ImageData | DenseData, ImageData | DenseData]:
    num_train, num_val = NUM[task]
    if task == "classify":
        return Coloured("train", num_train), Coloured("val", num_val)
    train = open_dense("scenes", "train", task, limit=num_train, size=24)
    return train, open_dense("scenes", "val", task, limit=num_val, size=24)


def run(vit: ViT, task: str, lrs: list[float], **options: object) -> ProbeResult:
    options = {"epochs": 2, "batch_size": 16, **options}
    return probe(vit, task, *data_for(task), lrs=lrs, **options)  # type: ignore[arg-type]
