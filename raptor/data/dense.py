"""Images with a target at every pixel: a mask or a depth map. `open_dense` opens them by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import PurePosixPath
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from raptor.data.archives import files_of
from raptor.data.folder import is_image_path
from raptor.data.image_file import File, one_line, open_image
from raptor.data.images import ImageData
from raptor.data.preprocess import as_rgb
from raptor.devices import CACHE_SHARE, free_bytes
from raptor.provenance import note_images

_DTYPES = {"segment": torch.uint8, "depth": torch.float32}
DENSE_TASKS = tuple(_DTYPES)
IGNORE_INDEX = 255
_FILL_SIZE = 64

Size = tuple[int, int]
"""Height and width."""


class DenseData(ImageData):
    """A map-style set of images (see `ImageData`) with a mask or a depth map each. Readers define `read` and `target`.

    Masks are uint8 (H, W): classes 0..num_classes - 1, and `IGNORE_INDEX` where nothing is known. Depths are float32
    (H, W) in metres, 0 where there is no reading.

    Attributes:
        classes: class names of the masks; None for depths.
        dtype: of the targets of a batch.
        max_depth: the largest depth in metres; None for masks.
        frame: height and width of the targets: scores are taken there, and images are shown at it by default.
        eigen_crop: whether the Eigen crop of NYUv2 is defined on these frames.
        has_targets: False where only the images are read, so that a fingerprint leaves the targets out.
    """

    def __init__(
        self,
        name: str,
        task: str,
        names: Sequence[str],
        parts: Sequence[str | None] | None = None,
        keys: Sequence[str] | None = None,
        *,
        frame: Size,
        classes: list[str] | None = None,
        max_depth: float | None = None,
        eigen_crop: bool = False,
    ) -> None:
        super().__init__(name, names, None, classes, parts, keys)
        self.task = task
        self.frame = frame
        self.num_classes = len(classes or [])
        self.dtype = _DTYPES[task]
        self.max_depth = max_depth
        self.eigen_crop = eigen_crop
        self.has_targets = True
        self._ahead: dict[tuple[int, Size], Future[tuple[np.ndarray, np.ndarray]]] = {}

    def target(self, position: int) -> np.ndarray:
        """The target at a position of the reader's own order."""
        raise NotImplementedError

    def pair(self, index: int) -> tuple[Image.Image, np.ndarray]:
        """Image `index` as RGB and its target; an unreadable one raises BadImage with its name."""
        position = int(self.positions[index])
        try:
            # Not turned upright, because nothing turns the target.
            return as_rgb(self.read(position), turned=False), self.target(position)
        except Exception as error:  # image decoders raise almost anything
            raise self.unreadable(index, error) from error

    def select(self, indices: Sequence[int], why: str = "") -> Self:
        chosen = super().select(indices, why)
        chosen._ahead = {}
        return chosen

    def pairs(self, indices: Tensor, size: Size, device: torch.device) -> tuple[Tensor, Tensor]:
        """Images `indices` (B,) resized to uint8 (B, 3, *size) and targets (B, *frame), on `device`."""
        ahead = self._ahead
        self._ahead = {}  # what was ordered in vain is dropped
        orders = [ahead.get((i, size)) or self._order(i, size) for i in indices.tolist()]
        images, targets = zip(*(order.result() for order in orders))
        images_bhwc = torch.from_numpy(np.stack(images))
        targets_bhw = torch.from_numpy(np.stack(targets))
        return images_bhwc.permute(0, 3, 1, 2).to(device), targets_bhw.to(device, self.dtype)

    def prefetch(self, indices: Tensor, size: Size) -> None:
        """Begin to decode the next `pairs`."""
        self._ahead = {(i, size): self._order(i, size) for i in indices.tolist()}

    def _order(self, index: int, size: Size) -> Future[tuple[np.ndarray, np.ndarray]]:
        # Threads rather than processes: Pillow and NumPy let others run while they decode.
        return _decoders().submit(self._decode, index, size)

    def _decode(self, index: int, size: Size) -> tuple[np.ndarray, np.ndarray]:
        image, target = self.pair(index)
        height, width = size
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        if target.shape != self.frame:  # by nearest neighbour: classes and distances must not be mixed
            height, width = self.frame
            rows = ((np.arange(height) + 0.5) * target.shape[0] / height).astype(np.int64)
            columns = ((np.arange(width) + 0.5) * target.shape[1] / width).astype(np.int64)
            target = target[rows[:, None], columns[None, :]]
        return np.array(image), target


@cache
def _decoders() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1))


class PairedFiles(DenseData):
    """Images and targets that are files, in two folders whose names say which is which.

    `train/rgb/1.png` belongs to `train/depth/1.png`, and `images/training/1.jpg` to `annotations/training/1.png`.

    Args:
        spec: a folder, or zips that are seen as one folder.
        folders: those names, of the images and of the targets.
        decode: the target in a picture.
        expected: the path of an image, for the message if there is none.
        frame: by default all targets are as large as the first one.
        facts: as in `DenseData`.
    """

    def __init__(
        self,
        kind: str,
        task: str,
        spec: str,
        folders: tuple[str, str],
        decode: Callable[[Image.Image], np.ndarray],
        expected: str,
        frame: Size | None = None,
        **facts: Any,
    ) -> None:
        files = files_of(spec)
        names = []
        stems = []
        targets = {}
        for path in filter(is_image_path, files):
            outer, inner, name = ("", "", *PurePosixPath(path).parts)[-3:]
            stem = PurePosixPath(name).stem
            # The part of the data is the other folder, around the named one or in it.
            for folder, part in ((inner, outer), (outer, inner)):
                if folder == folders[0]:
                    names.append(path)
                    stems.append((part, stem))
                elif folder == folders[1]:
                    targets[part, stem] = path
        if not names:
            raise ValueError(f"no images of {kind} in {spec}; expected {expected}")
        self.files: list[tuple[File, File]] = []
        for path, stem_of in zip(names, stems):
            if stem_of not in targets:
                raise ValueError(f"{path} of {spec} has no picture in {folders[1]}/; the task {task} needs it")
            self.files.append((files[path], files[targets[stem_of]]))
        # The size of a target is needed before the first batch, to reserve the memory of all.
        if frame is None:
            try:
                width, height = open_image(self.files[0][1].read()).size
            except OSError as error:
                raise ValueError(f"cannot read {targets[stems[0]]} of {kind}:{spec}: {one_line(error)}") from error
            frame = (height, width)
        parts = [part or None for part, _ in stems]
        super().__init__(f"{kind}:{spec}", task, names, parts, frame=frame, **facts)
        self.decode = decode

    def file(self, position: int) -> File:
        return self.files[position][0]

    def stamp(self, position: int) -> int:
        """The sizes of image and target together."""
        image, target = self.files[position]
        return image.num_bytes + (target.num_bytes if self.has_targets else 0)

    def target(self, position: int) -> np.ndarray:
        return self.decode(open_image(self.files[position][1].read()))


class FrameStore:
    """Batches of a dense set at one image size, kept decoded on the device or the host if they fit there.

    copies: how many processes do the same, each with its own device, and so may share the memory of the host.
    """

    def __init__(self, data: DenseData, size: Size, device: torch.device, copies: int = 1) -> None:
        note_images(data)
        self.data = data
        self.size = size
        self.device = device
        self.images: Tensor | None = None
        self.targets: Tensor | None = None
        # Targets stay at the size of the frames, where scores are taken.
        num_bytes = len(data) * (3 * size[0] * size[1] + data.dtype.itemsize * data.frame[0] * data.frame[1])
        # On the device if it fits there, else on the host, else decoded each time.
        for place in dict.fromkeys([device, torch.device("cpu")]):
            needed = num_bytes
            if place.type == "cpu":
                needed *= copies
            if not data.worth_caching(device) or needed > CACHE_SHARE * free_bytes(place):
                continue
            self.images = torch.empty(len(data), 3, *size, dtype=torch.uint8, device=place)
            self.targets = torch.empty(len(data), *data.frame, dtype=data.dtype, device=place)
            for part in torch.arange(len(data)).split(_FILL_SIZE):
                self.images[part], self.targets[part] = data.pairs(part, size, place)
            break

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images uint8 (B, 3, *size) and targets (B, *frame) of `indices` (on the host), on the device."""
        if self.images is None or self.targets is None:
            return self.data.pairs(indices, self.size, self.device)
        own = indices.to(self.images.device)
        return self.images[own].to(self.device), self.targets[own].to(self.device)

    def prefetch(self, indices: Tensor) -> None:
        """Begin to decode `indices` for the next `batch`, unless they are kept decoded."""
        if self.images is None:
            self.data.prefetch(indices, self.size)
