"""`ImageData`, the base of every reader, and how its images become batches: decoded by worker processes."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from raptor.data.image_file import BadImage, File, one_line, open_image
from raptor.data.names import PackedNames
from raptor.data.preprocess import Preprocess, as_rgb
from raptor.data.split import choose_sample, split_keys
from raptor.devices import processes_here

Progress = Callable[[int, int], None]
"""Called with (images done, images in total)."""
NUM_SIZES = 10_000  # files whose sizes a fingerprint reads: on a network disk each costs a request
_FEW_IMAGES = 2_000  # starting processes takes longer than decoding fewer
_MAX_WORKERS = 8
_MARGIN = 2  # a reduced JPEG is at least this many times the side it is resized to: .8 of 255 off on average


class Pixels(NamedTuple):
    """One batch as it comes out of the data: images uint8 (B, 3, S, S) on a device, their indices (B,) on the CPU."""

    images: Tensor
    indices: Tensor


class ImageData:
    """A map-style set of images. A reader defines `file` where its images are files, and `read` where they are not.

    Attributes:
        name: as results name it.
        specs: the names that open it again, one for each set that was joined.
        names: a unique name per image.
        keys: what splits and samples are chosen by, however the data is addressed.
        parts: the data's own split of each image, or None.
        labels: a class index per image, or None.
        classes: the names of the classes, or None.
        positions: int64 (N,), where each image stands in the reader's own order. An image that the data holds several
            times has one position.
        bad: names of unreadable images met with `skip_bad`.
        left_out: how many files of each kind the reader found and does not read.
        not_chosen: how many images of the named data these lack, by the reason.
    """

    fill_size = 64
    """Images per batch where the batches only fill a cache."""
    num_stamped = NUM_SIZES
    """Images that a fingerprint asks for their `stamp`."""

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        labels: list[int] | None = None,
        classes: list[str] | None = None,
        parts: Sequence[str | None] | None = None,
        keys: Sequence[str] | None = None,
    ) -> None:
        self.name = _printable(name)
        self.specs = [self.name]
        self.names = PackedNames.pack(names)
        self.keys = PackedNames.pack(split_keys(names) if keys is None else keys)
        self.parts: list[str | None] = [None] * len(names)
        if parts is not None:
            self.parts = list(parts)
        self.labels = labels
        self.classes: list[str] | None = None
        if classes is not None:
            self.classes = list(map(_printable, classes))
        self.positions = torch.arange(len(names))
        self.skip_bad = False
        self.bad: list[str] = []
        self.left_out: dict[str, int] = {}
        self.not_chosen: dict[str, int] = {}
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {len(self):,} images>"

    def __getitem__(self, index: int) -> Image.Image:
        return self.load(index)

    def file(self, position: int) -> File | None:
        """The file at a position of the reader's own order; None if the images are not files."""
        return None

    def read(self, position: int, side: int | None = None) -> Image.Image:
        """The image at a position of the reader's own order; callers use `load`.

        side: it may be decoded faster at a smaller size, both sides at least this.
        """
        file = self.file(position)
        assert file is not None, "a reader without files defines `read`"
        return open_image(file.read(), side)

    def stamp(self, position: int) -> int:
        """What the fingerprint knows of an image beside its key: the size of its file."""
        file = self.file(position)
        return 0 if file is None else file.num_bytes

    def load(self, index: int, side: int | None = None) -> Image.Image:
        """Image `index`, upright RGB; an unreadable one raises BadImage with its name. `side`: as in `read`."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.name} has {len(self):,} images, numbered from 0: there is no image {index}")
        try:
            return as_rgb(self.read(int(self.positions[index]), side))
        except Exception as error:  # image decoders raise almost anything
            raise self.unreadable(index, error) from error

    def unreadable(self, index: int, error: Exception) -> BadImage:
        """What to raise for image `index`, which a decoder failed to read: one line with its name."""
        return BadImage(f"cannot read image {self.names[index]} of {self.name}: {one_line(error)}")

    def select(self, indices: Sequence[int], why: str = "") -> Self:
        """The same reader over some of its images; labels stay only if each of these images has one.

        why: what leaves the others out, to be told.
        """
        chosen = copy.copy(self)  # shallow: what the reader has opened is shared
        rows = torch.tensor(indices, dtype=torch.int64)
        chosen.names = self.names.take(rows.numpy())
        chosen.keys = self.keys.take(rows.numpy())
        chosen.parts = list(map(self.parts.__getitem__, indices))
        chosen.positions = self.positions[rows]
        chosen.bad = []
        chosen._fingerprint = None
        if why and len(chosen) < len(self):
            chosen.not_chosen = self.not_chosen | {why: len(self) - len(chosen)}
        if self.labels is not None:
            chosen.labels = list(map(self.labels.__getitem__, indices))
            if min(chosen.labels, default=0) < 0:
                chosen.labels = None
                chosen.classes = None
        return chosen

    def with_labels(self, labels: list[int] | None, classes: list[str] | None) -> Self:
        """The same images with other labels, or with none."""
        chosen = copy.copy(self)
        chosen.labels = labels
        chosen.classes = classes
        return chosen

    def present(self) -> set[int]:
        """The labels that these images have."""
        return set(self.labels or ())

    def sample(self, limit: int | None) -> list[int]:
        """`limit` indices spread over the data, the same each time; None for all."""
        if limit is None:
            return list(range(len(self)))
        return choose_sample(self.keys, limit)

    def fingerprint(self) -> str:
        """A short name of these images: a hash of all their keys and of the sizes of up to 10,000 files, read once."""
        if self._fingerprint is None:
            stamps = []
            if len(self):
                sample = choose_sample(self.keys, NUM_SIZES)
                keys = self.keys.take(sample)
                stamped = set(choose_sample(keys, self.num_stamped))  # of the sample: hashing a million keys takes long
                for row, index in enumerate(sample):
                    stamp = self.stamp(int(self.positions[index])) if row in stamped else 0
                    stamps.append((keys[row], stamp))
            # Sorted, so that the same images in another order, as of other archives, have the same fingerprint.
            stamps.sort()
            all_keys = "\n".join(sorted(self.keys))
            digest = hashlib.blake2b(all_keys.encode("utf-8", "surrogateescape"), digest_size=16)
            digest.update(repr(stamps).encode("utf-8", "surrogateescape"))
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def worth_caching(self, device: torch.device) -> bool:
        """Whether a cache on `device` would give batches faster than the data does."""
        return True

    def distinct(self) -> tuple[Tensor, Tensor]:
        """Indices (M,) of the images without repetitions, and for each image its place among them, (N,).

        With `skip_bad` no two images count as the same, because what replaces a bad one depends on its neighbours.
        """
        if self.skip_bad:
            every = torch.arange(len(self))
            return every, every
        _, first, which = np.unique(self.positions.numpy(), return_index=True, return_inverse=True)
        order = np.argsort(first)  # as they come in the data
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return torch.from_numpy(first[order]), torch.from_numpy(place[which])

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
        side = _MARGIN * preprocess.resize if reduced else None
        loader: DataLoader = DataLoader(
            range(len(self)),  # type: ignore[arg-type]
            batch_sampler=chunks,  # type: ignore[arg-type]
            num_workers=num_workers,
            collate_fn=partial(_decode, self, preprocess, crop, replace and self.skip_bad, side),
            pin_memory=device.type == "cuda",
            worker_init_fn=_leave_group,
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


def _leave_group(_worker: int) -> None:
    """Ctrl-C, and the SIGTERM of `timeout`, reach a whole group of processes: the first one alone answers them."""
    os.setpgid(0, 0)


class ImagesOf(ImageData):
    """The images of another set in another form: names, labels and fingerprints are those of `data`."""

    def __init__(self, data: ImageData) -> None:
        super().__init__(data.name, data.names, data.labels, data.classes, data.parts, data.keys)
        self.specs = list(data.specs)
        self.num_stamped = data.num_stamped
        self.left_out = data.left_out
        self.not_chosen = data.not_chosen
        self.skip_bad = data.skip_bad
        self.bad = data.bad
        self.data = data

    def stamp(self, position: int) -> int:
        return self.data.stamp(int(self.data.positions[position]))


def _decode(
    data: ImageData, preprocess: Preprocess, crop: bool, replace: bool, side: int | None, chunk: list[int]
) -> tuple[Tensor, Tensor, list[tuple[str, str]]]:
    """What a worker does per batch: the pixels, the indices and (name, error) of each bad image.

    Errors are returned as values, because an exception would arrive as a traceback.
    """
    images = []
    indices = []
    bad = []
    for index in chunk:
        # The image itself and, where a bad one is replaced, the following images of its class.
        for step in range(len(data) if replace else 1):
            other = (index + step) % len(data)
            if step and data.labels is not None and data.labels[other] != data.labels[index]:
                continue
            try:
                image = preprocess.decode(data.load(other, side))
            except BadImage as error:
                bad.append((data.names[other], str(error)))
                continue
            images.append(preprocess.crop(image) if crop else image)
            indices.append(index)
            break
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


def _printable(name: str) -> str:
    """A file's name as it can be printed and written: bytes that are not UTF-8 become \\xff."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
