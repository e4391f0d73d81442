"""What a program holds as `ImageData`: a torch Dataset or DataLoader, a tensor, an array, PIL images, files."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from raptor.data.classes import Labels, number_labels
from raptor.data.folder import is_image_path
from raptor.data.hub import TableImages
from raptor.data.image_file import DiskFile, File
from raptor.data.images import ImageData

_IMAGE_KEYS = ("image", "img", "images", "pixel_values")
_LABEL_NAMES = ("targets", "labels", "_labels")


def given_images(given: Any) -> ImageData | None:
    """`given` as images; None if it is a name or a list of names, which `open_data` opens."""
    if isinstance(given, ImageData):
        return given
    if isinstance(given, str | Path):
        return None
    if isinstance(given, list | tuple):
        num_paths = sum(isinstance(one, str | Path) for one in given)
        if num_paths == len(given):
            if not given or not all(is_image_path(Path(one).name) for one in given):
                return None
            return GivenImages(given, f"{len(given)} files", names=list(map(str, given)))
        if num_paths:
            raise ValueError("data is a list of files and other things: give only files, or only pictures")
    if isinstance(given, DataLoader):  # its batches may be shuffled, and its transforms lie in the Dataset anyway
        return given_images(given.dataset)
    kind = type(given).__name__
    if hasattr(given, "features") and hasattr(given, "column_names"):  # of the `datasets` package
        # Read as a table: the package itself would decode any format that Pillow knows.
        return TableImages(f"a {kind} of {len(given)}", {"train": given})
    has_items = hasattr(given, "__len__") and hasattr(given, "__getitem__")
    if not has_items or isinstance(given, IterableDataset | Mapping | bytes):
        raise ValueError(
            f"data must be a name, a folder, files, pictures, a tensor or a Dataset with a length, got {kind}: write "
            "its images to a folder, or give each batch to vit.record"
        )
    if isinstance(given, Tensor | np.ndarray) and given.ndim != 4:
        raise ValueError(f"a {kind} of images has the shape (N, 3, H, W), this one has {tuple(given.shape)}")
    if not len(given):
        raise ValueError(f"the {kind} that was given as data is empty")
    labels, classes = _labels_of(given)
    return GivenImages(given, f"a {kind} of {len(given)}", labels, classes)


class GivenImages(ImageData):
    """The images of anything with a length and items, read as they are needed."""

    def __init__(
        self,
        source: Any,
        name: str,
        labels: list[int] | None = None,
        classes: list[str] | None = None,
        names: list[str] | None = None,
    ) -> None:
        names = names or [f"{number:06d}" for number in range(len(source))]
        super().__init__(name, names, labels, classes)
        self.source = source
        try:
            first = source[0]
        except Exception as error:  # the code of somebody's set raises anything
            raise ValueError(f"item 0 of the data cannot be read: {type(error).__name__}: {error}") from error
        self.is_files = isinstance(first, str | Path)
        if not self.is_files:
            self.num_stamped = 64  # each is read for it
            _as_picture(first, 0)  # a wrong shape is an error here and not in the middle of a run

    def file(self, position: int) -> File | None:
        return DiskFile(self.source[position]) if self.is_files else None

    def stamp(self, position: int) -> int:
        """The size of the file; for other images a checksum of the pixels."""
        return super().stamp(position) if self.is_files else zlib.crc32(self.read(position).tobytes())

    def read(self, position: int, side: int | None = None) -> Image.Image:
        return super().read(position, side) if self.is_files else _as_picture(self.source[position], position)


def _as_picture(item: Any, number: int) -> Image.Image:
    """One item of a set as a picture: it may come with its label, in a tuple or a mapping."""
    if isinstance(item, Mapping):
        for key in _IMAGE_KEYS:
            if key in item:
                item = item[key]
                break
    if isinstance(item, tuple | list) and item:
        item = item[0]
    if isinstance(item, Image.Image):
        return item
    if not isinstance(item, Tensor | np.ndarray):
        raise ValueError(f"item {number} of the data is of type {type(item).__name__}: give pictures, tensors or files")
    image = torch.as_tensor(item)  # (3, H, W) or (H, W, 3), uint8 or real numbers in 0..1
    if image.ndim == 2:
        image = image[None]
    if image.ndim == 3 and image.shape[0] not in (1, 3) and image.shape[2] in (1, 3):
        image = image.permute(2, 0, 1)
    if image.ndim != 3 or image.shape[0] not in (1, 3) or 0 in image.shape:
        raise ValueError(f"image {number} of the data has the shape {tuple(image.shape)}: give (3, H, W) or (H, W, 3)")
    if image.is_floating_point():
        # Values outside 0..1 were normalised for some model, or are 0..255: a guess would be wrong for one of them.
        low = image.min().item()
        high = image.max().item()
        if not 0 <= low <= high <= 1:
            raise ValueError(
                f"image {number} of the data has values from {low:.3g} to {high:.3g}: give uint8, or real numbers in "
                "0..1 before any normalisation, which is the model's own"
            )
        image = (image * 255).round().to(torch.uint8)
    elif image.dtype != torch.uint8:
        raise ValueError(f"image {number} of the data is {image.dtype}: give uint8, or real numbers in 0..1")
    return Image.fromarray(image.expand(3, -1, -1).permute(1, 2, 0).contiguous().cpu().numpy())


def _labels_of(given: Any) -> Labels:
    """Labels and class names, if the set keeps them apart from its images as torchvision's do."""
    if isinstance(given, Subset):  # as torch's random_split makes them
        labels, classes = _labels_of(given.dataset)
        if labels is not None:
            labels = [labels[i] for i in given.indices]
        return labels, classes
    found: Any = None
    for name in reversed(_LABEL_NAMES):
        found = getattr(given, name, found)
    if isinstance(given, TensorDataset) and len(given.tensors) > 1:
        found = given.tensors[1]
    if isinstance(found, Tensor | np.ndarray):
        found = found.tolist()
    if not isinstance(found, Sequence) or len(found) != len(given):
        return None, None
    if any(isinstance(value, float | Sequence) and not isinstance(value, str) for value in found):
        return None, None  # targets of a regression, or several per image
    labels, classes = number_labels(found, "the data")
    names = getattr(given, "classes", None)
    if labels and isinstance(names, Sequence) and not isinstance(found[0], str) and len(names) > max(labels):
        classes = list(map(str, names))
    return labels, classes
