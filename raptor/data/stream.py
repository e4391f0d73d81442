"""Batches of images: in order for analyses, shuffled and cropped at random for training as a function of the step."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from raptor.data.augment import change_colours, draw_boxes, draw_colours, draw_crops, paste, random_resized_crop
from raptor.data.by_name import open_data
from raptor.data.image_file import BadImage
from raptor.data.images import ImageData, Pixels, Progress, chunks_of, fill_uint8
from raptor.data.preprocess import Preprocess
from raptor.data.split import choose_sample
from raptor.devices import CACHE_SHARE, ONE_PROCESS, Ranks, free_bytes, processes_here, to_device
from raptor.provenance import note_images
from raptor.run import check_stop

_GREY = 128


@dataclass(frozen=True)
class Batch:
    """images float32 (B, 3, S, S) normalised, on the device; labels (B,) there or None; indices (B,) on the CPU.

    start: how many images of the stream come before it; None where it is not known.
    """

    images: Tensor
    labels: Tensor | None
    indices: Tensor
    start: int | None = None

    @property
    def places(self) -> range | None:
        """The places of its images in the stream."""
        if self.start is None:
            return None
        return range(self.start, self.start + len(self.indices))


class ImageStream:
    """Batches for an analysis: every image once, in the order of the data; the last batch may be smaller.

    It can be iterated again; `len` counts batches. Ranks take whole batches in turn, so that each batch is one that a
    single process would have; `num_images` counts those of all ranks. A stop signal is answered between two batches.

    Args:
        data: opened images, or what `open_data` takes: of a name its own validation part, or all images without one.
        progress: called with (images done, images in total) after each batch.
        limit: only a fixed sample of that many images.
        ranks: the processes that share the batches. All of them make the stream, because they compare their images.
        shuffle: in a fixed random order, for what is measured within batches: a folder may have one class in each.
    """

    def __init__(
        self,
        data: Any,
        preprocess: Preprocess,
        batch_size: int,
        *,
        device: str | torch.device = "cpu",
        num_workers: int | None = None,
        progress: Progress | None = None,
        limit: int | None = None,
        ranks: Ranks = ONE_PROCESS,
        shuffle: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"--batch_size must be at least 1; got {batch_size}")
        if not isinstance(data, ImageData):
            data = open_data(data, "own")
        check_same_on_ranks(data, ranks)
        self.data: ImageData = data
        self.preprocess = preprocess
        self.batch_size = batch_size
        self.device = torch.device(device)
        self.num_workers = num_workers
        self.progress = progress
        self.indices = data.sample(limit)
        self.num_images = len(self.indices)
        if shuffle:
            # A generator of its own: the order must not depend on what was drawn before.
            order = torch.randperm(self.num_images, generator=torch.Generator().manual_seed(0))
            self.indices = list(map(self.indices.__getitem__, order.tolist()))
        note_images(data, self.num_images)
        self.ranks = ranks

    def __len__(self) -> int:
        return len(self.ranks.share(range(0, self.num_images, self.batch_size)))

    def __iter__(self) -> Iterator[Batch]:
        labels = None
        if self.data.labels is not None:
            labels = torch.tensor(self.data.labels)
        starts = self.ranks.share(range(0, self.num_images, self.batch_size))
        chunks = self.ranks.share(chunks_of(self.indices, self.batch_size))
        batches = self.data.batches(chunks, self.preprocess, self.device, num_workers=self.num_workers, crop=True)
        for start, chunk, (images_u8, indices) in zip(starts, chunks, batches):
            check_stop()
            if len(indices):  # otherwise all images of the batch are bad and are skipped
                own = None
                if labels is not None:
                    own = to_device(labels[indices], self.device)
                yield Batch(self.preprocess.normalise(images_u8), own, indices, start)
            if self.progress is not None:
                self.progress(start + len(chunk), self.num_images)

    def whole(self) -> Self:
        """The same stream, not shared: for what rank 0 does by itself."""
        stream = copy.copy(self)
        stream.ranks = ONE_PROCESS
        return stream

    def sample(self, limit: int) -> Self:
        """The same stream over `limit` of its images, spread over the data."""
        stream = copy.copy(self)
        chosen = choose_sample(self.data.keys.take(self.indices), limit)
        stream.indices = list(map(self.indices.__getitem__, chosen))
        stream.num_images = len(chosen)
        return stream

    def bad_images(self) -> list[str]:
        """Names of the unreadable images that were skipped, on any rank, in the order of the data."""
        bad = set(chain.from_iterable(self.ranks.gather(self.data.bad)))
        if not bad:  # otherwise a million names would be compared
            return []
        return [name for name in self.data.names if name in bad]


iterate = ImageStream
"""Batches for an analysis; see `ImageStream`."""


def check_same_on_ranks(data: ImageData, ranks: Ranks) -> None:
    """Raise on every rank unless all of them opened the same images: they would mix results, or wait for ever.

    The ranks meet here, so a stream with `ranks=` is made on all of them. What rank 0 does by itself, as in
    `ranks.first`, takes a stream without them: `ImageStream.whole`, or one that is made without `ranks`.
    """
    if ranks.size == 1:
        return
    found = ranks.gather(f"{data.fingerprint()} ({len(data):,} images)")
    for rank, own in enumerate(found):
        if own != found[0]:
            raise ValueError(
                f"{data.name} is not the same on all processes: {found[0]} on rank 0, {own} on rank {rank}; give all "
                "of them the same files"
            )


def sharing(batches: Any) -> Ranks:
    """The ranks that share these batches; a list of batches belongs to this process."""
    return getattr(batches, "ranks", ONE_PROCESS)


def stable_seed(*parts: int | str) -> int:
    """A seed that depends only on its parts: the same in every process and version."""
    # The separator keeps ("a", "bc") and ("ab", "c") apart.
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class TrainStream:
    """Training batches as a pure function of (seed, stage, step).

    Each epoch is a permutation drawn from (seed, stage, epoch); the incomplete last batch is dropped. Augmentations
    are drawn for the global batch from (seed, stage, step) and sliced: rank r holds rows r B/W .. (r+1) B/W, so ranks
    put end to end equal one process.

    Args:
        batch_size: the global batch, over all ranks.
        augment: `none` for the centre crop of every analysis, `crop` for random resized crops and flips.
        crop_scale: the share of the image's area that a random crop covers.
        mixup: parameter of the Beta distribution of each image's share in its mix with the image before it in the
            global batch (before the first: the last); 0 mixes none. A rank reads the image before its rows too.
        cutmix: the share of the steps that paste a rectangle of that other image instead.
        jitter, grey: how far brightness, contrast and saturation change, and the share of images without colour.
        sizes: image sizes; each step draws one from (seed, stage, step), the same on every rank. None keeps that of
            `preprocess`. Images are decoded at the largest.
        even: every rank must have as many rows as any other, as where gradients are averaged.
        cache: `memory` keeps all images decoded as uint8, each once, on the device if they take at most 30 % of what is
            free there; `none` decodes each time with `num_workers` reading ahead; `auto` keeps them when they take at
            most 30 % of what is free on the device or the host.
        num_decoded: of the images that are kept, decode only so many on each rank; the others are grey. This is for a
            plan: memory and the time of a step are the same.
        ranks: the processes that share each batch, all of which make the stream. Each decodes a part of what is kept.
    """

    def __init__(
        self,
        data: ImageData,
        preprocess: Preprocess,
        batch_size: int,
        *,
        seed: int = 0,
        augment: str = "none",
        crop_scale: tuple[float, float] = (0.35, 1.0),
        mixup: float = 0.0,
        cutmix: float = 0.0,
        jitter: float = 0.0,
        grey: float = 0.0,
        sizes: Sequence[int] | None = None,
        device: str | torch.device = "cpu",
        even: bool = True,
        num_workers: int | None = None,
        cache: str = "auto",
        num_decoded: int | None = None,
        progress: Progress | None = None,
        ranks: Ranks = ONE_PROCESS,
    ) -> None:
        self.mixes = mixup > 0 or cutmix > 0
        check_stream(len(data), batch_size, augment, crop_scale, sizes, self.mixes, jitter > 0 or grey > 0)
        if even and batch_size % ranks.size:
            near = ranks.size * max(1, batch_size // ranks.size)
            raise ValueError(
                f"a batch of {batch_size} does not divide over {ranks.size} processes: choose --batch_size {near}"
            )
        if sizes:
            largest = max(sizes)
            preprocess = replace(preprocess, size=largest, resize=round(preprocess.resize * largest / preprocess.size))
        self.sizes = tuple(sizes or (preprocess.size,))
        note_images(data)
        check_same_on_ranks(data, ranks)
        self.data = data
        self.preprocess = preprocess
        self.batch_size = batch_size
        self.seed = seed
        self.augment = augment
        self.crop_scale = crop_scale
        self.mixup = mixup
        self.cutmix = cutmix
        self.jitter = jitter
        self.grey = grey
        self.device = torch.device(device)
        self.num_workers = num_workers
        self.num_decoded = num_decoded
        # Shares of whole images that differ by at most one where the batch does not divide.
        first = ranks.rank * batch_size // ranks.size
        end = (ranks.rank + 1) * batch_size // ranks.size
        self.rows = slice(first, end)
        self._read_rows = torch.arange(first, end)
        if self.mixes:  # the first image of a rank with the last one of the rank before it
            self._read_rows = torch.arange(first - 1, end) % batch_size
        self.steps_per_epoch = len(data) // batch_size
        # The order of one epoch is kept: drawing a million numbers at each step would take longer than the step.
        self._epoch: tuple[str, int] | None = None
        self._order = torch.empty(0)
        self._reader: tuple[str, int, Iterator[Pixels]] | None = None
        self._label_table: Tensor | None = None
        if data.labels is not None:
            self._label_table = torch.tensor(data.labels).to(self.device)
        # Images that several names hold are decoded once.
        self._rows, self._where = data.distinct()
        self.images: Tensor | None = None
        place = self._cache_place(cache, ranks)
        if place is not None:
            self.images = self._keep_images(place, ranks, progress)

    def _cache_place(self, cache: str, ranks: Ranks) -> torch.device | None:
        """Where decoded images are kept, on all ranks alike: the device, else the host, else nowhere (None)."""
        host = torch.device("cpu")
        if cache == "none" or (cache == "auto" and not self.data.worth_caching(self.device)):
            return None
        num_bytes = 3 * self.preprocess.resize**2 * len(self._rows)
        for place in dict.fromkeys([self.device, host]):
            needed = num_bytes
            if place.type == "cpu":  # which the processes of a machine share
                needed *= processes_here()
            if all(ranks.gather(needed <= CACHE_SHARE * free_bytes(place))):
                return place
        return host if cache == "memory" else None

    def _keep_images(self, place: torch.device, ranks: Ranks, progress: Progress | None) -> Tensor:
        """All images on `place`, uint8 (N, 3, resize, resize). The ranks decode a part each."""
        side = self.preprocess.resize
        images = torch.empty(len(self._rows), 3, side, side, dtype=torch.uint8, device=place)
        if self.num_decoded is not None:
            images[self.num_decoded :] = _GREY
        decoded = images[: self.num_decoded]
        indices = self._rows.tolist()[: self.num_decoded]
        own = decoded[ranks.rank :: ranks.size]
        if ranks.size > 1:
            own = torch.empty_like(own, device="cpu")
        error = None
        try:
            fill_uint8(
                own,
                self.data,
                self.preprocess,
                indices[ranks.rank :: ranks.size],
                self.num_workers,
                progress,
                reduced=True,
            )
        except BadImage as caught:
            error = str(caught)
        # All ranks learn of a bad image: a rank that stopped by itself would leave the others waiting.
        for other in ranks.gather(error):
            if other is not None:
                raise BadImage(other)
        if ranks.size > 1:
            ranks.fill(decoded, own)
        return images

    def _global_indices(self, step: int, stage: str) -> Tensor:
        # Nothing depends on earlier steps, which is what an exact resume needs.
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._epoch != (stage, epoch):
            self._order = torch.randperm(len(self.data), generator=self._generator(stage, "epoch", epoch))
            self._epoch = (stage, epoch)
        return self._order[place * self.batch_size : (place + 1) * self.batch_size]

    def _generator(self, stage: str, kind: str, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(stable_seed(self.seed, stage, kind, number))

    def indices(self, step: int, stage: str = "stage1") -> Tensor:
        """This rank's image indices (B_local,) at a step, on the CPU."""
        return self._global_indices(step, stage)[self.rows]

    def size(self, step: int, stage: str = "stage1") -> int:
        """The image size of a step."""
        return self.sizes[stable_seed(self.seed, stage, "size", step) % len(self.sizes)]

    def shares(self, step: int, stage: str = "stage1") -> Tensor:
        """The share of each image of this rank in its mix at a step, float32 (B_local,) on the CPU."""
        # NumPy, since torch draws from a Beta distribution by its global generator only.
        draws = np.random.default_rng(stable_seed(self.seed, stage, "mixup", step))
        return torch.from_numpy(draws.beta(self.mixup, self.mixup, self.batch_size)).float()[self.rows]

    def boxes(self, step: int, stage: str = "stage1") -> Tensor | None:
        """The rectangles that are pasted into the images of this rank, (B_local, 4); None in a step without any."""
        generator = self._generator(stage, "cutmix", step)
        if torch.rand((), generator=generator) >= self.cutmix:
            return None
        return draw_boxes(self.batch_size, generator)[self.rows]

    def batch(self, step: int, stage: str = "stage1", size: int | None = None) -> Tensor:
        """Normalised images float32 (B_local, 3, size, size) on the device, of the step's size or of `size`."""
        if self.images is None:
            images_u8 = self._read(step, stage)
        else:
            indices = self._global_indices(step, stage)[self._read_rows]
            rows = to_device(self._where[indices], self.images.device)
            images_u8 = to_device(self.images.index_select(0, rows), self.device)
        if self.augment == "none":
            images = self.preprocess.normalise(self.preprocess.crop(images_u8))
        else:
            # Drawn for the global batch and sliced: no image depends on the number of ranks.
            generator = self._generator(stage, "crop", step)
            crops_b5 = draw_crops(self.batch_size, self.preprocess.resize, generator, self.crop_scale)[self._read_rows]
            side = self.size(step, stage) if size is None else size
            cropped = random_resized_crop(images_u8, to_device(crops_b5, self.device), side)
            if self.jitter or self.grey:
                generator = self._generator(stage, "colour", step)
                factors_b3 = draw_colours(self.batch_size, generator, self.jitter, self.grey)[self._read_rows]
                cropped = change_colours(cropped, to_device(factors_b3, self.device))
            images = self.preprocess.normalise(cropped)
        if not self.mixes:
            return images
        # Each image with the one before it pasted or mixed into it.
        before = images[:-1]
        own = images[1:]
        boxes_b4 = self.boxes(step, stage)
        if boxes_b4 is not None:
            return paste(own, before, to_device(boxes_b4, self.device))
        if not self.mixup > 0:
            return own
        share_b111 = to_device(self.shares(step, stage), self.device).view(-1, 1, 1, 1)
        return torch.lerp(before, own, share_b111)

    def labels(self, step: int, stage: str = "stage1") -> Tensor:
        """Labels (B_local,) of the same images, on the device."""
        if self._label_table is None:
            raise ValueError(f"{self.data.name} has no labels; use an image folder with one folder per class")
        return self._label_table[to_device(self.indices(step, stage), self.device)]

    def _read(self, step: int, stage: str) -> Tensor:
        """uint8 (B_read, 3, resize, resize) from the data itself, read ahead as long as the steps follow each other."""
        if self._reader is None or self._reader[:2] != (stage, step):
            self.close()  # first, so that the processes of two readers never run at once
            chunks = (self._global_indices(later, stage)[self._read_rows].tolist() for later in count(step))
            batches = self.data.batches(
                chunks,
                self.preprocess,
                self.device,
                num_workers=self.num_workers,
                replace=True,
                reduced=True,
            )
            self._reader = (stage, step, batches)
        reader = self._reader[2]
        images = next(reader).images
        if len(images) != len(self._read_rows):
            raise BadImage(f"an image of step {step} cannot be read, nor another of its class")
        self._reader = (stage, step + 1, reader)
        return images

    def close(self) -> None:
        """Stop reading ahead; the next batch starts again."""
        self._reader = None


def check_stream(
    num_images: int,
    batch_size: int,
    augment: str,
    crop_scale: tuple[float, float] = (0.35, 1.0),
    sizes: Sequence[int] | None = None,
    mixes: bool = False,
    recolours: bool = False,
) -> None:
    """Raise for options that `TrainStream` cannot use together."""
    for options, is_given in (("--sizes are", sizes), ("--jitter and --grey are", recolours)):
        if is_given and augment != "crop":
            raise ValueError(f"{options} of random crops: take --augment crop")
    if not 0 < crop_scale[0] <= crop_scale[1] <= 1:
        raise ValueError(f"--crop_scale must rise within 0..1; got {crop_scale}")
    if mixes and batch_size == 1:
        raise ValueError("--mixup and --cutmix need a second image in the batch: take --batch_size 2 or more")
    if not 1 <= batch_size <= num_images:
        raise ValueError(
            f"a batch of {batch_size} cannot be filled from {num_images} images: give --batch_size {num_images} or less"
        )
