"""Image folders, and the base of every reader: `len`, `load(i)`, a name and perhaps a label per image."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple, Self

from PIL import Image

from raptor.data.split import TRAIN_NAMES, VAL_NAMES, choose_sample, is_split_name

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm", ".jp2", ".avif")


class BadImage(ValueError):
    """An image that cannot be read; the message names it."""


class ImageData:
    """A map-style set of images.

    `names`: a unique name per image. `labels`: a class index per image, or None. `classes`: their names, or None.
    `parts`: the data's own split of each image, or None. `bad`: names of unreadable images met with `skip_bad`.
    """

    def __init__(
        self,
        name: str,
        names: list[str],
        labels: list[int] | None = None,
        classes: list[str] | None = None,
        parts: Sequence[str | None] | None = None,
    ) -> None:
        self.name = name
        self.names = names
        self.labels = labels
        self.classes = classes
        self.parts: list[str | None] = list(parts) if parts is not None else [None] * len(names)
        self.positions = list(range(len(names)))
        self.skip_bad = False
        self.bad: list[str] = []

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> Image.Image:
        return self.load(index)

    def read(self, position: int) -> Image.Image:
        """The image at a place of the reader's own order. Readers define this; callers use `load`."""
        raise NotImplementedError

    def load(self, index: int) -> Image.Image:
        """Image `index` as RGB; an unreadable one raises BadImage with its name."""
        try:
            return self.read(self.positions[index]).convert("RGB")
        except Exception as error:  # image decoders raise almost anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise BadImage(f"cannot read image {self.names[index]} of {self.name}: {reason}") from error

    def select(self, indices: Sequence[int]) -> Self:
        """The same reader over some of its images; labels stay only if every one of them has one."""
        chosen = copy.copy(self)
        chosen.names = [self.names[i] for i in indices]
        chosen.parts = [self.parts[i] for i in indices]
        chosen.positions = [self.positions[i] for i in indices]
        chosen.bad = []
        if self.labels is not None:
            labels = [self.labels[i] for i in indices]
            chosen.labels = labels if min(labels, default=0) >= 0 else None
            chosen.classes = self.classes if chosen.labels is not None else None
        return chosen

    def sample(self, limit: int | None) -> list[int]:
        """`limit` indices spread over the data, the same each time; None for all."""
        return list(range(len(self))) if limit is None else choose_sample(self.names, limit)


class Entry(NamedTuple):
    """One image file of a folder or archive: its path there, its own split, its class."""

    path: str
    part: str | None
    class_name: str | None


def is_image_path(path: str) -> bool:
    """Whether a relative path looks like an image, and not like a hidden or resource-fork file."""
    pieces = path.split("/")
    return path.lower().endswith(SUFFIXES) and not any(p.startswith(".") or p == "__MACOSX" for p in pieces)


def arrange(paths: Sequence[str]) -> list[Entry]:
    """Read splits and classes off relative paths: `train/<class>/x`, `<class>/x` or a flat `x`.

    A single folder around the split or class folders is looked through. A class may be called `train`: folders are
    splits only if all of them are, or if a training and a validation folder are both there (others are then left out).
    """
    rows = [(path, path.split("/")) for path in sorted(paths)]
    while _is_wrapped([tail for _, tail in rows]):
        rows = [(path, tail[1:]) for path, tail in rows]
    if not _has_splits([tail for _, tail in rows]):
        return [Entry(path, None, tail[0] if len(tail) > 1 else None) for path, tail in rows]
    inside = [(path, tail) for path, tail in rows if len(tail) > 1 and is_split_name(tail[0])]
    return [Entry(path, tail[0].lower(), tail[1] if len(tail) > 2 else None) for path, tail in inside]


def _is_wrapped(tails: list[list[str]]) -> bool:
    tops = {tail[0] for tail in tails if len(tail) > 1}
    inner = [tail[1:] for tail in tails]
    if len(tops) != 1 or is_split_name(min(tops)) or not all(inner):
        return False
    return _has_splits(inner) or all(len(tail) > 1 for tail in inner)


def _has_splits(tails: list[list[str]]) -> bool:
    tops = {tail[0].lower() for tail in tails if len(tail) > 1}
    flat = any(len(tail) == 1 for tail in tails)
    both = bool(tops & set(TRAIN_NAMES)) and bool(tops & set(VAL_NAMES))
    return both or (bool(tops) and not flat and all(map(is_split_name, tops)))


def label_entries(class_names: Sequence[str | None]) -> tuple[list[int] | None, list[str] | None]:
    """Class names to indices in sorted order, -1 where there is none; (None, None) if no image has a class."""
    classes = sorted({name for name in class_names if name is not None})
    if not classes:
        return None, None
    index = {name: i for i, name in enumerate(classes)}
    return [-1 if name is None else index[name] for name in class_names], classes


def open_image(data: bytes) -> Image.Image:
    """Decode the bytes of an image file completely."""
    image = Image.open(BytesIO(data))
    image.load()
    return image


class FolderImages(ImageData):
    """A folder of image files in the ImageFolder layout, with or without split folders, or flat."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        entries = arrange(_list_images(self.root))
        if not entries:
            raise ValueError(f"no images in folder {self.root}; expected files such as {', '.join(SUFFIXES[:4])}")
        labels, classes = label_entries([entry.class_name for entry in entries])
        names = [entry.path for entry in entries]
        super().__init__(str(root), names, labels, classes, [entry.part for entry in entries])
        self.paths = names

    def read(self, position: int) -> Image.Image:
        return open_image((self.root / self.paths[position]).read_bytes())


def _list_images(root: Path) -> list[str]:
    found = []
    for folder, subfolders, files in os.walk(root, followlinks=True):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        inside = Path(folder).relative_to(root).as_posix()
        prefix = "" if inside == "." else inside + "/"
        found += [prefix + name for name in files if is_image_path(name)]
    return found
