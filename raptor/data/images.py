"""`ImageData`, the base of every reader, and how it gives batches: decoded by workers, or whole at once."""

from __future__ import annotations

import copy
import hashlib
import os
import re
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from raptor.data.names import PackedNames
from raptor.data.preprocess import Preprocess, as_rgb
from raptor.data.split import choose_sample, split_keys
from raptor.devices import to_device

Progress = Callable[[int, int], None]
"""Called with (images done, images in total)."""


_MAX_FILE_BYTES = 1 << 30  # of one image file
_MAX_CLASSES = 1_000_000
NUM_SIZES = 10_000  # files whose sizes a fingerprint reads: on a network disk each costs a request


_IN_MEMORY = re.compile(r"<_io\.BytesIO[^>]*>")  # Pillow names what it was given
_FEW_IMAGES = 2_000  # starting processes takes longer than decoding fewer
_MAX_WORKERS = 8
_MARGIN = 2  # a reduced JPEG is at least this many times the side it is resized to: .8 of 255 off on average


class BadImage(ValueError):
    """An image that cannot be read; the message names it."""


def read_file(path: Path) -> bytes:
    """The bytes of an image file; a pipe or a device, which might never end, is refused."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe would wait for a writer
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a plain file")
        check_file_size(status.st_size)
        return file.read()


def file_bytes(path: Path) -> int:
    """The size of a file; 0 for one that is gone, such as a dead link: it is a bad image when it is read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def check_file_size(num_bytes: int) -> None:
    """Raise for an image file that is too large to be one."""
    if num_bytes > _MAX_FILE_BYTES:
        raise OSError(f"it has {num_bytes:,} bytes, more than {_MAX_FILE_BYTES:,}")


def numbered_classes(labels: Sequence[int], source: str) -> list[str]:
    """Names of classes that have only numbers: `0` to the largest label."""
    if max(labels) >= _MAX_CLASSES:
        raise ValueError(f"{source} has a label {max(labels)}: labels must be less than {_MAX_CLASSES:,}")
    return [str(i) for i in range(max(labels) + 1)]


FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""The formats that are decoded, by Pillow's names. Others, such as EPS, make Pillow start another program."""


def open_image(data: bytes, side: int | None = None) -> Image.Image:
    """Decode the bytes of an image file completely, if it has one of `FORMATS`.

    side: decode a JPEG at 1/2, 1/4 or 1/8 of its size as long as neither of its sides falls below this.
    """
    image = Image.open(BytesIO(data), formats=FORMATS)
    if side is not None:
        image.draft(None, (side, side))  # other formats ignore it
    image.load()
    return image


def _shown(name: str) -> str:
    """A file's name as it can be printed and written: bytes that are not UTF-8 as \\xff."""
    return name if name.isascii() else name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


class Pixels(NamedTuple):
    """One batch as it comes out of the data: images uint8 (B, 3, S, S) on a device, their indices (B,) on the CPU."""

    images: Tensor
    indices: Tensor


class Items:
    """The images of a reader that are chosen, with or without targets.

    `names`: a unique name per image. `keys`: what splits and samples are chosen by, however the data is addressed.
    `parts`: the data's own split of each image, or None.
    `positions`: int64 (N,), where each image stands in the reader's own order.
    """

    has_frames = False
    """Whether files of dense data are among them: fingerprints of earlier versions did not know their sizes."""

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
        self.parts: list[str | None] = list(parts) if parts is not None else [None] * len(names)
        self.positions = torch.arange(len(names))
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def select(self, indices: Sequence[int]) -> Self:
        """The same reader over some of its images."""
        chosen = copy.copy(self)
        rows = torch.tensor(indices, dtype=torch.int64)
        chosen.names = self.names.take(rows.numpy())
        chosen.keys = self.keys.take(rows.numpy())
        chosen.parts = [self.parts[i] for i in indices]
        chosen.positions = self.positions[rows]
        chosen._fingerprint = None
        return chosen

    def num_bytes(self, position: int) -> int:
        """The size of the file at a position of the reader's own order; 0 where images are no files."""
        return 0

    def content(self, position: int) -> bytes:
        """The file at a position of the reader's own order; empty where images are no files."""
        return b""

    def stamp(self, position: int, earlier: bool = False) -> int:
        """What a fingerprint knows of an image beside its key: the size of its file, or of the file that holds it.

        earlier: as earlier versions did, see `has_frames`.
        """
        return 0 if earlier and self.has_frames else self.num_bytes(position)

    def fingerprint(self) -> str:
        """A short name of these images: of all their keys, and of the sizes of up to 10,000 files, read once."""
        if self._fingerprint is None:
            self._fingerprint = self._compute_fingerprint(self.stamp)
        return self._fingerprint

    def earlier_fingerprint(self) -> str | None:
        """The fingerprint that earlier versions gave these images, where it was another."""
        return self._compute_fingerprint(partial(self.stamp, earlier=True)) if self.has_frames else None

    def has_fingerprint(self, saved: str) -> bool:
        """Whether `saved` is the fingerprint of these images; that of images in memory knows no sizes of files."""
        return saved in (self.fingerprint(), self.earlier_fingerprint()) or saved == self._compute_fingerprint(
            lambda position: 0
        )

    def _compute_fingerprint(self, stamp: Callable[[int], int]) -> str:
        digest = hashlib.blake2b("\n".join(sorted(self.keys)).encode("utf-8", "surrogateescape"), digest_size=16)
        sized = choose_sample(self.keys, NUM_SIZES) if len(self) else []
        sizes = sorted((self.keys[i], stamp(int(self.positions[i]))) for i in sized)
        digest.update(repr(sizes).encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def unreadable(self, index: int, error: Exception) -> BadImage:
        """What to raise for image `index`, which a decoder failed to read: one line with its name."""
        reason = _IN_MEMORY.sub("it", " ".join(str(error).split())) or type(error).__name__
        return BadImage(f"cannot read image {self.names[index]} of {self.name}: {reason}")


class ImageData(Items):
    """A map-style set of images; see `Items`.

    `labels`: a class index per image, or None. `classes`: their names, or None.
    `bad`: names of unreadable images met with `skip_bad`. `specs`: the names that open it again, of each set joined.
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
        super().__init__(_shown(name), names, parts, keys)
        self.specs = [self.name]
        self.labels = labels
        self.classes = None if classes is None else list(map(_shown, classes))
        self.skip_bad = False
        self.bad: list[str] = []

    def __getitem__(self, index: int) -> Image.Image:
        return self.load(index)

    def file_size(self, index: int) -> int:
        """Bytes of the file of image `index`; 0 where images are no files."""
        return self.num_bytes(int(self.positions[index]))

    def digest(self, index: int, pixels: bool = False) -> bytes | None:
        """A short name of the file of image `index`, or of its pixels; None where it cannot be read."""
        try:
            if pixels:
                image = self.load(index)
                content = f"{image.size}".encode() + image.tobytes()
            else:
                content = self.content(int(self.positions[index]))
        except (OSError, ValueError):
            return None
        return hashlib.blake2b(content, digest_size=16).digest()

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
            return as_rgb(self.read(position) if side is None else self.read_reduced(position, side))
        except Exception as error:  # image decoders raise almost anything
            raise self.unreadable(index, error) from error

    def present(self) -> set[int]:
        """The labels that these images have."""
        return set(self.labels or ())

    def select(self, indices: Sequence[int]) -> Self:
        """The same reader over some of its images; labels stay only if each of these images has one."""
        chosen = super().select(indices)
        chosen.bad = []
        if self.labels is not None:
            labels = [self.labels[i] for i in indices]
            chosen.labels = labels if min(labels, default=0) >= 0 else None
            chosen.classes = self.classes if chosen.labels is not None else None
        return chosen

    def with_labels(self, labels: list[int], classes: list[str]) -> Self:
        """The same images with other labels."""
        chosen = self.select(range(len(self)))
        chosen.labels, chosen.classes, chosen.bad = labels, classes, self.bad
        return chosen

    def without_labels(self) -> Self:
        """The same images without labels."""
        chosen = self.select(range(len(self)))
        chosen.labels, chosen.classes, chosen.bad = None, None, self.bad
        return chosen

    def sample(self, limit: int | None) -> list[int]:
        """`limit` indices spread over the data, the same each time; None for all."""
        return list(range(len(self))) if limit is None else choose_sample(self.keys, limit)

    def worth_caching(self, device: torch.device) -> bool:
        """Whether a cache on `device` would give batches faster than the data does."""
        return True

    def originals(self, positions: Tensor) -> Tensor:
        """For each of `positions` (N,) of the reader's own order, the first position that holds the same image."""
        return positions

    def distinct(self) -> tuple[Tensor, Tensor]:
        """Indices (M,) of the images without repetitions, and for each image its place among them, (N,).

        With `skip_bad` every image is its own, because what replaces a bad one depends on its neighbours.
        """
        if self.skip_bad:
            return torch.arange(len(self)), torch.arange(len(self))
        same = self.originals(self.positions).numpy()
        _, first, which = np.unique(same, return_index=True, return_inverse=True)
        order = np.argsort(first)  # as they come in the data
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return torch.from_numpy(first[order]), torch.from_numpy(place[which])

    def batch(self, indices: Sequence[int] | Tensor, preprocess: Preprocess, device: str | torch.device) -> Tensor:
        """Images `indices` as uint8 (B, 3, resize, resize) on `device`."""
        chunk = indices.tolist() if isinstance(indices, Tensor) else list(indices)
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
            reduced: whether large JPEG files may be decoded at a smaller size, which is faster but rounds otherwise.
        """
        device = torch.device(device)
        if num_workers is None:
            num_workers = choose_workers(sum(map(len, chunks)) if isinstance(chunks, list) else len(self))
        loader: DataLoader = DataLoader(
            _Decoded(self, preprocess, crop=crop, replace=replace and self.skip_bad, reduced=reduced),
            batch_sampler=chunks,  # type: ignore[arg-type]
            num_workers=num_workers,
            collate_fn=_collate,
            pin_memory=device.type == "cuda",
            generator=torch.Generator().manual_seed(0),  # otherwise each pass would advance the global one
        )
        for images, indices, bad in loader:
            self._note_bad(bad)
            yield Pixels(images.to(device, non_blocking=True), indices)

    def _note_bad(self, bad: list[tuple[str, str]]) -> None:
        """Stop at the first bad image, or with `skip_bad` add their names to `bad`."""
        if bad and not self.skip_bad:
            raise BadImage(f"{bad[0][1]}; repair or remove it, or skip such images with --skip_bad")
        self.bad += [name for name in dict(bad) if name not in self.bad]


class FileImages(ImageData):
    """Images that are files, in a folder or an archive: they define `content`."""

    def read(self, position: int) -> Image.Image:
        return open_image(self.content(position))

    def read_reduced(self, position: int, side: int) -> Image.Image:
        return open_image(self.content(position), side)


def is_dead_worker(error: Exception) -> bool:
    """Whether a process that decodes images was killed. torch raises it wherever the program is at that moment."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")


_Row = tuple[int, Tensor | None, list[tuple[str, str]]]
"""Index of an image, its pixels, and (name, error) of each bad image that was tried."""


class _Decoded(Dataset[_Row]):
    """What a worker does per image. Errors are returned as values: an exception would arrive as a traceback."""

    def __init__(self, data: ImageData, preprocess: Preprocess, *, crop: bool, replace: bool, reduced: bool) -> None:
        self.data, self.preprocess, self.crop, self.replace = data, preprocess, crop, replace
        self.side = _MARGIN * preprocess.resize if reduced else None

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> _Row:
        bad: list[tuple[str, str]] = []
        for candidate in self._candidates(index):
            try:
                image = self.preprocess.decode(self.data.load(candidate, self.side))
                return index, self.preprocess.crop(image) if self.crop else image, bad
            except BadImage as error:
                bad.append((self.data.names[candidate], str(error)))
        return index, None, bad

    def _candidates(self, index: int) -> Iterator[int]:
        yield index
        labels = self.data.labels
        for step in range(1, len(self.data) if self.replace else 0):
            other = (index + step) % len(self.data)
            if labels is None or labels[other] == labels[index]:
                yield other


def _collate(rows: Sequence[_Row]) -> tuple[Tensor, Tensor, list[tuple[str, str]]]:
    images = [image for _, image, _ in rows if image is not None]
    indices = [index for index, image, _ in rows if image is not None]
    bad = [entry for _, _, entries in rows for entry in entries]
    return torch.stack(images) if images else torch.empty(0), torch.tensor(indices, dtype=torch.int64), bad


class WholeBatches(ImageData):
    """Data that gives a batch at once on the device that needs it: drawn there, or kept in memory."""

    fill_size = 1024

    def take(self, positions: Tensor, device: torch.device) -> Tensor:
        """Images at `positions` (B,) of the reader's own order as uint8 (B, 3, S, S) on `device`."""
        raise NotImplementedError

    def read(self, position: int) -> Image.Image:
        image = self.take(torch.tensor([position]), torch.device("cpu"))[0]
        return Image.fromarray(image.permute(1, 2, 0).numpy())

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
        """As in `ImageData`; there is nothing to decode ahead and no image is bad."""
        for chunk in chunks:
            indices = torch.tensor(chunk)
            images = preprocess.fit(self.take(self.positions[indices], torch.device(device)))
            yield Pixels(preprocess.crop(images) if crop else images, indices)


class JoinedImages(ImageData):
    """Several sets one after the other; with labels where all of them have the same classes."""

    def __init__(self, sets: Sequence[ImageData]) -> None:
        names = [f"{data.name}: {name}" for data in sets for name in data.names]
        keys = [key for data in sets for key in data.keys]
        classes, labels = sets[0].classes, None
        if classes is not None and all(data.classes == classes for data in sets):
            labels = [label for data in sets for label in data.labels or ()]
        name = " ".join(data.name for data in sets)
        super().__init__(name, names, labels, None if labels is None else classes, keys=keys)
        self.specs = [spec for data in sets for spec in data.specs]
        self.sets = list(sets)
        self.has_frames = any(data.has_frames for data in sets)
        self.ends = list(accumulate(map(len, sets)))

    def originals(self, positions: Tensor) -> Tensor:
        """A set that was joined several times is one object, so its images are those of its first place."""
        starts = [end - len(data) for data, end in zip(self.sets, self.ends)]
        first = {id(data): start for data, start in reversed(list(zip(self.sets, starts)))}
        both = [(first[id(data)], *data.distinct()) for data in self.sets]
        return torch.cat([start + rows[where] for start, rows, where in both])[positions]

    def _place(self, position: int) -> tuple[ImageData, int]:
        """The set that holds an image, and where the image stands in that set's own order."""
        number = bisect_right(self.ends, position)
        data = self.sets[number]
        return data, int(data.positions[position - (self.ends[number - 1] if number else 0)])

    def num_bytes(self, position: int) -> int:
        data, own = self._place(position)
        return data.num_bytes(own)

    def stamp(self, position: int, earlier: bool = False) -> int:
        data, own = self._place(position)
        return data.stamp(own, earlier)

    def content(self, position: int) -> bytes:
        data, own = self._place(position)
        return data.content(own)

    def read(self, position: int) -> Image.Image:
        data, own = self._place(position)
        return data.read(own)

    def read_reduced(self, position: int, side: int) -> Image.Image:
        data, own = self._place(position)
        return data.read_reduced(own, side)


class InMemory(WholeBatches):
    """The images of `data`, decoded once for `preprocess` and kept as uint8 on `device`: for many runs over them.

    An image that the data holds several times is kept once: `where` (N,) says which row of `images` is each image's.
    """

    def __init__(
        self,
        data: ImageData,
        preprocess: Preprocess,
        device: str | torch.device = "cpu",
        num_workers: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        if data.skip_bad:
            raise ValueError("images that may be skipped cannot be kept in memory: remove the bad ones first")
        super().__init__(data.name, list(data.names), data.labels, data.classes, data.parts, data.keys)
        self.specs = list(data.specs)
        self.rows, self.where = data.distinct()
        images = torch.empty((len(self.rows), 3, preprocess.resize, preprocess.resize), dtype=torch.uint8)
        fill_uint8(images, data, preprocess, self.rows.tolist(), num_workers, progress)
        self.images = images.to(device)

    def originals(self, positions: Tensor) -> Tensor:
        return self.rows[self.where[positions]]

    def take(self, positions: Tensor, device: torch.device) -> Tensor:
        chosen = self.images.index_select(0, to_device(self.where[positions], self.images.device))
        return to_device(chosen, device)

    def worth_caching(self, device: torch.device) -> bool:
        return device.type not in ("cpu", self.images.device.type)


class JoinedInMemory(JoinedImages, WholeBatches):
    """Sets in memory one after the other; each stays where it is, so nothing is decoded or copied."""

    def __init__(self, sets: Sequence[InMemory]) -> None:
        super().__init__(sets)
        self.kept = list(sets)

    def take(self, positions: Tensor, device: torch.device) -> Tensor:
        images: Tensor | None = None
        owner = torch.bucketize(positions, torch.tensor(self.ends), right=True)
        for number, (data, end) in enumerate(zip(self.kept, self.ends)):
            rows = (owner == number).nonzero()[:, 0]
            if len(rows):
                part = data.take(data.positions[positions[rows] - (end - len(data))], device)
                images = part.new_empty(len(positions), *part.shape[1:]) if images is None else images
                images[to_device(rows, device)] = part
        assert images is not None
        return images

    def worth_caching(self, device: torch.device) -> bool:
        return any(data.worth_caching(device) for data in self.kept)


def choose_workers(num_images: int) -> int:
    """How many processes decode ahead: none for few images, else this process's share of the cores less its own."""
    if num_images < _FEW_IMAGES:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or 1))
    return min(_MAX_WORKERS, max(0, cores // ranks - 1))


def chunks_of(indices: list[int], size: int) -> list[list[int]]:
    """Consecutive pieces of `size` indices; the last may be shorter."""
    return [indices[i : i + size] for i in range(0, len(indices), size)]


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

    Bad images that may be skipped are replaced by others of their class; BadImage where there are none left.
    """
    chunks, num_rows, num_done = chunks_of(indices, data.fill_size), 0, 0
    device = images_nchw.device
    parts = data.batches(chunks, preprocess, device, num_workers=num_workers, replace=True, reduced=reduced)
    for chunk, (part, _) in zip(chunks, parts):
        if len(part):
            images_nchw[num_rows : num_rows + len(part)] = part
        num_rows, num_done = num_rows + len(part), num_done + len(chunk)
        if progress is not None:
            progress(num_done, len(indices))
    if num_rows < len(indices):
        raise BadImage(
            f"{len(indices) - num_rows} images of {data.name} cannot be read, and neither can others of their class"
        )
