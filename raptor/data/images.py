"""`ImageData`, the base of every reader, and how its images become batches: decoded by worker processes."""

from __future__ import annotations

import copy
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from raptor.data.names import PackedNames
from raptor.data.preprocess import Preprocess, as_rgb
from raptor.data.split import choose_sample, split_keys
from raptor.devices import processes_here

Progress = Callable[[int, int], None]
"""Called with (images done, images in total)."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""The formats that are decoded, by Pillow's names. Others, such as EPS, make Pillow start another program."""
NUM_SIZES = 10_000  # files whose sizes a fingerprint reads: on a network disk each costs a request
_MAX_FILE_BYTES = 1 << 30  # of one image file
_IN_MEMORY = re.compile(r"<_io\.BytesIO[^>]*>")  # Pillow names what it was given
_LOOK_SIDE = 64  # of images that are only looked at
_FEW_IMAGES = 2_000  # starting processes takes longer than decoding fewer
_MAX_WORKERS = 8
_MARGIN = 2  # a reduced JPEG is at least this many times the side it is resized to: .8 of 255 off on average


class BadImage(ValueError):
    """An image that cannot be read; the message names it."""


class File(Protocol):
    """A file that holds an image: in a folder, or inside an archive."""

    @property
    def num_bytes(self) -> int: ...

    def read(self) -> bytes: ...


class DiskFile(NamedTuple):
    """A file in a folder."""

    path: Path

    @property
    def num_bytes(self) -> int:
        """Its size; 0 if it is gone, such as a dead link, which is reported when the image is read."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def read(self) -> bytes:
        """Its bytes; a pipe or a device, which might never end, is refused."""
        # Without O_NONBLOCK, opening a pipe would wait for somebody to write into it.
        with os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError("it is not a plain file")
            check_file_size(status.st_size)
            return file.read()


def check_file_size(num_bytes: int) -> None:
    """Raise for an image file that is too large to be one."""
    if num_bytes > _MAX_FILE_BYTES:
        raise OSError(f"it has {num_bytes:,} bytes, more than {_MAX_FILE_BYTES:,}")


def open_image(data: bytes, side: int | None = None) -> Image.Image:
    """Decode the bytes of an image file completely, if it has one of `FORMATS`.

    side: decode a JPEG at 1/2, 1/4 or 1/8 of its size as long as neither of its sides falls below this.
    """
    # A named list: Pillow would choose by the content, and start Ghostscript for EPS in a file called cat.jpg.
    image = Image.open(BytesIO(data), formats=FORMATS)
    if side is not None:
        image.draft(None, (side, side))  # other formats ignore it
    image.load()
    return image


def one_line(error: Exception) -> str:
    """What a decoder says of a file, in one line."""
    return _IN_MEMORY.sub("it", " ".join(str(error).split())) or type(error).__name__


def _printable(name: str) -> str:
    """A file's name as it can be printed and written: bytes that are not UTF-8 become \\xff."""
    if name.isascii():  # the usual case
        return name
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


class Items:
    """The images of a reader that are chosen, with or without targets.

    Attributes:
        names: a unique name per image.
        keys: what splits and samples are chosen by, however the data is addressed.
        parts: the data's own split of each image, or None.
        positions: int64 (N,), where each image stands in the reader's own order.
    """

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        parts: Sequence[str | None] | None = None,
        keys: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        self.names = PackedNames.pack(names)
        self.keys = PackedNames.pack(split_keys(names) if keys is None else keys)
        self.parts: list[str | None] = [None] * len(names)
        if parts is not None:
            self.parts = list(parts)
        self.positions = torch.arange(len(names))
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {len(self):,} images>"

    def select(self, indices: Sequence[int]) -> Self:
        """The same reader over some of its images."""
        chosen = copy.copy(self)  # shallow: what the reader has opened is shared
        rows = torch.tensor(indices, dtype=torch.int64)
        chosen.names = self.names.take(rows.numpy())
        chosen.keys = self.keys.take(rows.numpy())
        chosen.parts = list(map(self.parts.__getitem__, indices))
        chosen.positions = self.positions[rows]
        chosen._fingerprint = None
        return chosen

    def file(self, position: int) -> File | None:
        """The file at a position of the reader's own order; None if the images are not files."""
        return None

    def num_bytes(self, position: int) -> int:
        """The size of that file; 0 if there is none."""
        file = self.file(position)
        return 0 if file is None else file.num_bytes

    def content(self, position: int) -> bytes:
        """The bytes of that file; empty if there is none."""
        file = self.file(position)
        return b"" if file is None else file.read()

    def picture(self, index: int) -> Image.Image:
        """Image `index` for a look at it: RGB, and smaller if that is decoded faster."""
        raise NotImplementedError

    def stamp(self, position: int) -> int:
        """What the fingerprint knows of an image beside its key: the size of its file, or of the file that holds it."""
        return self.num_bytes(position)

    def fingerprint(self) -> str:
        """A short name of these images: a hash of all their keys and of the sizes of up to 10,000 files, read once."""
        if self._fingerprint is None:
            keys = "\n".join(sorted(self.keys))
            stamps = []
            if len(self):
                for index in choose_sample(self.keys, NUM_SIZES):
                    stamps.append((self.keys[index], self.stamp(int(self.positions[index]))))
            # Sorted, so that the same images in another order, as of other archives, have the same fingerprint.
            stamps.sort()
            digest = hashlib.blake2b(keys.encode("utf-8", "surrogateescape"), digest_size=16)
            digest.update(repr(stamps).encode("utf-8", "surrogateescape"))
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def unreadable(self, index: int, error: Exception) -> BadImage:
        """What to raise for image `index`, which a decoder failed to read: one line with its name."""
        return BadImage(f"cannot read image {self.names[index]} of {self.name}: {one_line(error)}")


class ImageData(Items):
    """A map-style set of images; see `Items`.

    Attributes:
        labels: a class index per image, or None.
        classes: the names of the classes, or None.
        bad: names of unreadable images met with `skip_bad`.
        specs: the names that open it again, one for each set that was joined.
        left_out: how many files of each kind the reader found and does not read.
        not_chosen: how many images of the named data these lack, by the reason.
    """

    fill_size = 64
    """Images per batch where the batches only fill a cache."""

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        labels: list[int] | None = None,
        classes: list[str] | None = None,
        parts: Sequence[str | None] | None = None,
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__(_printable(name), names, parts, keys)
        self.specs = [self.name]
        self.labels = labels
        self.classes: list[str] | None = None
        if classes is not None:
            self.classes = list(map(_printable, classes))
        self.skip_bad = False
        self.bad: list[str] = []
        self.left_out: dict[str, int] = {}
        self.not_chosen: dict[str, int] = {}

    def __getitem__(self, index: int) -> Image.Image:
        return self.load(index)

    def read(self, position: int) -> Image.Image:
        """The image at a position of the reader's own order. Readers define this; callers use `load`."""
        raise NotImplementedError

    def read_reduced(self, position: int, side: int) -> Image.Image:
        """The same, or decoded faster at a smaller size, both sides at least `side`."""
        return self.read(position)

    def load(self, index: int, side: int | None = None) -> Image.Image:
        """Image `index`, upright RGB; an unreadable one raises BadImage with its name. `side`: as in `read_reduced`."""
        position = int(self.positions[index])
        try:
            if side is None:
                return as_rgb(self.read(position))
            return as_rgb(self.read_reduced(position, side))
        except Exception as error:  # image decoders raise almost anything
            raise self.unreadable(index, error) from error

    def picture(self, index: int) -> Image.Image:
        return self.load(index, _LOOK_SIDE)

    def present(self) -> set[int]:
        """The labels that these images have."""
        return set(self.labels or ())

    def select(self, indices: Sequence[int], why: str = "") -> Self:
        """The same reader over some of its images; labels stay only if each of these images has one.

        why: what leaves the others out, to be told.
        """
        chosen = super().select(indices)
        chosen.bad = []
        if why and len(chosen) < len(self):
            chosen.not_chosen = self.not_chosen | {why: len(self) - len(chosen)}
        if self.labels is not None:
            chosen.labels = list(map(self.labels.__getitem__, indices))
            if min(chosen.labels, default=0) < 0:
                chosen.labels = None
                chosen.classes = None
        return chosen

    def with_labels(self, labels: list[int] | None, classes: list[str] | None) -> Self:
        """The same images with other labels."""
        chosen = self.select(range(len(self)))
        chosen.labels = labels
        chosen.classes = classes
        chosen.bad = self.bad
        return chosen

    def without_labels(self) -> Self:
        """The same images without labels."""
        return self.with_labels(None, None)

    def sample(self, limit: int | None) -> list[int]:
        """`limit` indices spread over the data, the same each time; None for all."""
        if limit is None:
            return list(range(len(self)))
        return choose_sample(self.keys, limit)

    def worth_caching(self, device: torch.device) -> bool:
        """Whether a cache on `device` would give batches faster than the data does."""
        return True

    def originals(self, positions: Tensor) -> Tensor:
        """For each of `positions` (N,) of the reader's own order, the first position that holds the same image."""
        return positions

    def distinct(self) -> tuple[Tensor, Tensor]:
        """Indices (M,) of the images without repetitions, and for each image its place among them, (N,).

        With `skip_bad` no two images count as the same, because what replaces a bad one depends on its neighbours.
        """
        if self.skip_bad:
            every = torch.arange(len(self))
            return every, every
        same = self.originals(self.positions).numpy()
        _, first, which = np.unique(same, return_index=True, return_inverse=True)
        order = np.argsort(first)  # as they come in the data
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return torch.from_numpy(first[order]), torch.from_numpy(place[which])

    def batch(self, indices: Sequence[int] | Tensor, preprocess: Preprocess, device: str | torch.device) -> Tensor:
        """Images `indices` as uint8 (B, 3, resize, resize) on `device`."""
        chunk = torch.as_tensor(indices).tolist()
        return next(self.batches([chunk], preprocess, device)).images

    def batches(
        self,
        chunks: Iterable[list[int]],
        preprocess: Preprocess,
        device: str | torch.device,
        *,
        num_workers: int | None = None,
        crop: bool = False,
        replace: bool = False,
        reduced: bool = False,
    ) -> Iterator[Pixels]:
        """A batch on `device` per chunk of indices, decoded ahead by `num_workers` processes.

        Args:
            chunks: the indices of each batch; it may be endless.
            num_workers: None for a number that suits the data and the machine, see `choose_workers`.
            crop: whether the centre crop of side `size` is taken; otherwise images have the side `resize`.
            replace: with `skip_bad`, replace a bad image by the next readable one of its class, so that a batch keeps
                its size. Otherwise a batch lacks its bad images.
            reduced: whether large JPEG files may be decoded at a smaller size, which is faster but rounds differently.
        """
        device = torch.device(device)
        if num_workers is None:
            # An endless iterable, as of training, is taken to go through all images.
            num_images = sum(map(len, chunks)) if isinstance(chunks, list) else len(self)
            num_workers = choose_workers(num_images)
        loader: DataLoader = DataLoader(
            _Decoded(self, preprocess, crop=crop, replace=replace and self.skip_bad, reduced=reduced),
            batch_sampler=chunks,  # type: ignore[arg-type]
            num_workers=num_workers,
            collate_fn=_collate,
            pin_memory=device.type == "cuda",
            generator=torch.Generator().manual_seed(0),  # otherwise each pass would advance the global one
        )
        for images, indices, bad in loader:
            for name, error in bad:
                if not self.skip_bad:
                    raise BadImage(f"{error}; repair or remove it, or skip such images with --skip_bad")
                if name not in self.bad:
                    self.bad.append(name)
            # Not blocking: the copy to a GPU runs while the host decodes on.
            yield Pixels(images.to(device, non_blocking=True), indices)


class Pixels(NamedTuple):
    """One batch as it comes out of the data: images uint8 (B, 3, S, S) on a device, their indices (B,) on the CPU."""

    images: Tensor
    indices: Tensor


_Row = tuple[int, Tensor | None, list[tuple[str, str]]]
"""Index of an image, its pixels, and (name, error) of each bad image that was tried."""


class _Decoded(Dataset[_Row]):
    """What a worker does per image. Errors are returned as values: an exception would arrive as a traceback."""

    def __init__(self, data: ImageData, preprocess: Preprocess, *, crop: bool, replace: bool, reduced: bool) -> None:
        self.data = data
        self.preprocess = preprocess
        self.crop = crop
        self.replace = replace
        self.side: int | None = None
        if reduced:
            self.side = _MARGIN * preprocess.resize

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> _Row:
        bad: list[tuple[str, str]] = []
        labels = self.data.labels
        num_tried = 1
        if self.replace:
            num_tried = len(self.data)
        # The image itself and, where a bad one is replaced, the following images of its class.
        for step in range(num_tried):
            other = (index + step) % len(self.data)
            if step and labels is not None and labels[other] != labels[index]:
                continue
            try:
                image = self.preprocess.decode(self.data.load(other, self.side))
            except BadImage as error:
                bad.append((self.data.names[other], str(error)))
                continue
            if self.crop:
                image = self.preprocess.crop(image)
            return index, image, bad
        return index, None, bad


def _collate(rows: Sequence[_Row]) -> tuple[Tensor, Tensor, list[tuple[str, str]]]:
    images = []
    indices = []
    bad = []
    for index, image, tried in rows:
        bad += tried
        if image is not None:
            images.append(image)
            indices.append(index)
    stacked = torch.stack(images) if images else torch.empty(0)
    return stacked, torch.tensor(indices, dtype=torch.int64), bad


def is_dead_worker(error: Exception) -> bool:
    """Whether a process that decodes images was killed. torch raises it wherever the program is at that moment."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")


def choose_workers(num_images: int) -> int:
    """How many processes decode ahead: none for few images, else this process's share of the cores less its own."""
    if num_images < _FEW_IMAGES:
        return 0
    num_cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # a container or a job may have fewer than the machine
        num_cores = len(os.sched_getaffinity(0))
    # All processes of a machine decode at once, and each has its own workers.
    return min(_MAX_WORKERS, max(0, num_cores // processes_here() - 1))


def chunks_of(indices: list[int], size: int) -> list[list[int]]:
    """Consecutive pieces of `size` indices; the last may be shorter."""
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def fill_uint8(
    images_nchw: Tensor,
    data: ImageData,
    preprocess: Preprocess,
    indices: list[int],
    num_workers: int | None,
    progress: Progress | None,
    reduced: bool = False,
) -> None:
    """Fill `images_nchw`, uint8 (len(indices), 3, resize, resize), with the images of `indices`.

    Bad images that may be skipped are replaced by others of their class; BadImage if there are none left.
    """
    chunks = chunks_of(indices, data.fill_size)
    batches = data.batches(
        chunks, preprocess, images_nchw.device, num_workers=num_workers, replace=True, reduced=reduced
    )
    num_rows = 0
    num_done = 0
    for chunk, (images, _) in zip(chunks, batches):
        if len(images):
            images_nchw[num_rows : num_rows + len(images)] = images
        num_rows += len(images)
        num_done += len(chunk)
        if progress is not None:
            progress(num_done, len(indices))
    num_missing = len(indices) - num_rows
    if num_missing:
        raise BadImage(f"{num_missing} images of {data.name} cannot be read, and neither can others of their class")
