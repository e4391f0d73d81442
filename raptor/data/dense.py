"""Images with a target at every pixel, by name: `open_dense("scenes")`, `ade20k:PATH`, `nyuv2:PATH`."""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from raptor.data.archives import ZipEntry, list_files, read_zip_entry, zip_entries
from raptor.data.folder import BadImage
from raptor.data.split import Split, choose_sample, choose_split

DENSE_TASKS = ("segment", "depth")
IGNORE_INDEX = 255
KINDS = ("scenes", "ade20k", "nyuv2")
MAX_SCENE_DEPTH = 12.0


class DenseData:
    """A map-style set of images with a mask or a depth map each; `load(i)` gives (RGB image, target array).

    Masks are uint8 (H, W): classes 0..num_classes - 1, and `ignore_index` where nothing is known. Depths are float32
    (H, W) in metres, 0 where there is no reading.

    Attributes:
        names: a unique name per image. parts: its own split, or None.
        classes: class names of the masks; None for depths.
        max_depth: the largest depth in metres; None for masks.
        frame: height and width of the targets: scores are taken there, and images are shown at it by default.
        eigen_crop: whether the Eigen crop of NYUv2 is defined on these frames.
    """

    ignore_index = IGNORE_INDEX

    def __init__(
        self,
        name: str,
        task: str,
        names: list[str],
        parts: Sequence[str | None] | None = None,
        *,
        frame: tuple[int, int],
        classes: Sequence[str] | None = None,
        max_depth: float | None = None,
        eigen_crop: bool = False,
    ) -> None:
        self.name, self.task, self.names = name, task, names
        self.parts: list[str | None] = list(parts) if parts is not None else [None] * len(names)
        self.positions = list(range(len(names)))
        self.frame = frame
        self.classes = None if classes is None else list(classes)
        self.max_depth, self.eigen_crop = max_depth, eigen_crop

    @property
    def num_classes(self) -> int:
        return len(self.classes or [])

    def __len__(self) -> int:
        return len(self.positions)

    def read(self, position: int) -> tuple[Image.Image, np.ndarray]:
        """Image and target at a place of the reader's own order. Readers define this; callers use `load`."""
        raise NotImplementedError

    def load(self, index: int) -> tuple[Image.Image, np.ndarray]:
        """Image `index` as RGB and its target; what cannot be read raises BadImage with its name."""
        try:
            image, target = self.read(self.positions[index])
            return image.convert("RGB"), target
        except Exception as error:  # image decoders raise almost anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise BadImage(f"cannot read {self.names[index]} of {self.name}: {reason}") from error

    def select(self, indices: Sequence[int]) -> Self:
        """The same reader over some of its images."""
        chosen = copy.copy(self)
        chosen.names = [self.names[i] for i in indices]
        chosen.parts = [self.parts[i] for i in indices]
        chosen.positions = [self.positions[i] for i in indices]
        return chosen

    def describe(self) -> dict[str, Any]:
        """Facts about the data for summaries, as JSON-able values."""
        return {
            "name": self.name,
            "num_images": len(self),
            "frame": list(self.frame),
            "num_classes": self.num_classes or None,
            "max_depth": self.max_depth,
        }


class SceneFrames(DenseData):
    """The built-in scenes with their masks (background is a class) or their depths."""

    def __init__(self, split: Split = "train", task: str = "segment", size: int | None = None) -> None:
        from raptor.data.scenes.data import DrawnScenes
        from raptor.data.scenes.render import MASK_CLASSES

        self.drawn = DrawnScenes(split, size)
        side = self.drawn.scenes[0].size
        super().__init__(
            "scenes",
            task,
            list(self.drawn.names),
            self.drawn.parts,
            frame=(side, side),
            classes=MASK_CLASSES if task == "segment" else None,
            max_depth=None if task == "segment" else MAX_SCENE_DEPTH,
        )

    def draw(self, indices: Tensor, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
        """Scenes `indices` (B,) at once: images uint8 (B, 3, S, S) and targets (B, S, S) on `device`."""
        batch = self.drawn.draw(torch.tensor([self.positions[i] for i in indices.tolist()]), device)
        return batch.images, batch.masks if self.task == "segment" else batch.depths

    def read(self, position: int) -> tuple[Image.Image, np.ndarray]:
        batch = self.drawn.draw(torch.tensor([position]))
        target = batch.masks if self.task == "segment" else batch.depths
        return Image.fromarray(batch.images[0].permute(1, 2, 0).numpy()), target[0].numpy()


class Files:
    """Files of a folder, or inside zip archives (several joined by commas, or a glob) seen as one folder."""

    def __init__(self, spec: str) -> None:
        self.root = Path(spec).expanduser()
        self.entries: dict[str, ZipEntry] = {}
        if self.root.is_dir():
            found = (Path(folder) / name for folder, _, names in os.walk(self.root, followlinks=True) for name in names)
            self.paths = sorted(path.relative_to(self.root).as_posix() for path in found)
        else:
            self.entries = {
                entry.path: entry for archive in list_files(spec) for entry in zip_entries(archive, lambda _: True)
            }
            self.paths = sorted(self.entries)

    def read(self, path: str) -> bytes:
        return read_zip_entry(self.entries[path]) if self.entries else (self.root / path).read_bytes()


def open_dense(
    spec: str, split: Split = "train", task: str = "segment", *, limit: int | None = None, size: int | None = None
) -> DenseData:
    """Open images with masks (`task="segment"`) or depths (`task="depth"`) by name.

    Args:
        spec: `scenes`; `ade20k:PATH` (the folder or zip of ADEChallengeData2016); `nyuv2:PATH` (the labelled .mat with
            splits.mat beside it, the folder or zip with nyu2_train.csv, or train/rgb, train/depth, train/label40 in a
            folder or in zips).
        split: `train`, `val` (the data's own validation or test split, else 5 % by a hash of the name) or `all`.
        limit: at most so many images: a fixed sample spread over the data.
        size: the side at which scenes are drawn; other data keep their own.
    """
    if task not in DENSE_TASKS:
        raise ValueError(f"unknown dense task {task!r}; use {' or '.join(DENSE_TASKS)}")
    kind, _, path = spec.partition(":")
    if spec == "scenes":
        data: DenseData = SceneFrames(split, task, size)
        return data if limit is None else data.select(range(min(limit, len(data))))
    if kind == "ade20k" and path:
        from raptor.data.ade20k import Ade20k

        data = Ade20k(path, task)
    elif kind == "nyuv2" and path:
        from raptor.data.nyuv2 import open_nyuv2

        data = open_nyuv2(path, task)
    else:
        near = difflib.get_close_matches(kind.lower(), KINDS, 1, 0.6)
        hint = f", did you mean {near[0]}{':PATH' if near[0] != 'scenes' else ''}?" if near else ""
        raise ValueError(f"unknown dense data {spec!r}{hint}; give scenes, ade20k:PATH or nyuv2:PATH")
    if split != "all":
        data = data.select(choose_split(data.names, data.parts, split, data.name))
    return data if limit is None else data.select(choose_sample(data.names, limit))
