"""Batches of images: in order for analyses, in memory, or shuffled for training as a function of the step alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from raptor.data.augment import draw_crops, random_resized_crop
from raptor.data.decode import Decoded, DecodedImages, Progress, chunks_of, decode_batches, fill_uint8, load_uint8
from raptor.data.folder import BadImage, ImageData
from raptor.data.preprocess import Preprocess
from raptor.devices import free_bytes

__all__ = ["Batch", "ImageStream", "TrainStream", "iterate", "load_uint8", "random_resized_crop", "stable_seed"]

CACHE_SHARE = 0.3


@dataclass(frozen=True)
class Batch:
    """images float32 (B, 3, S, S) normalised, on the device; labels (B,) there or None; indices (B,) on the CPU."""

    images: Tensor
    labels: Tensor | None
    indices: Tensor


class ImageStream:
    """Every image once, in order, in batches. Can be iterated again; `len` counts batches. See `iterate`."""

    def __init__(
        self,
        data: ImageData,
        preprocess: Preprocess,
        batch_size: int,
        *,
        device: str | torch.device = "cpu",
        num_workers: int = 0,
        progress: Progress | None = None,
        limit: int | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1; got {batch_size}")
        self.data, self.preprocess, self.batch_size = data, preprocess, batch_size
        self.device, self.num_workers, self.progress = torch.device(device), num_workers, progress
        self.indices = data.sample(limit)
        self.num_images = len(self.indices)

    def __len__(self) -> int:
        return -(-self.num_images // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        num_done = 0
        labels = None if self.data.labels is None else torch.tensor(self.data.labels)
        chunks = chunks_of(self.indices, self.batch_size)
        for images_u8, indices, num_seen in self._uint8_batches(chunks):
            num_done += num_seen
            if len(indices):
                images = self.preprocess.normalise(images_u8)
                own = None if labels is None else to_device(labels[indices], self.device)
                yield Batch(images, own, indices)
            if self.progress is not None:
                self.progress(num_done, self.num_images)

    def _uint8_batches(self, chunks: list[list[int]]) -> Iterator[tuple[Tensor, Tensor, int]]:
        draw = getattr(self.data, "draw", None)
        if draw is not None:
            for chunk in chunks:
                indices = torch.tensor(chunk)
                drawn = self.preprocess.fit(draw(indices, self.device).images)
                yield self.preprocess.crop(drawn), indices, len(chunk)
            return
        images = DecodedImages(self.data, self.preprocess, crop=True)
        for chunk, decoded in zip(chunks, decode_batches(images, chunks, self.num_workers, self.device)):
            yield decoded.images.to(self.device, non_blocking=True), decoded.indices, len(chunk)


def iterate(
    data: ImageData,
    preprocess: Preprocess,
    batch_size: int,
    *,
    device: str | torch.device = "cpu",
    num_workers: int = 0,
    progress: Progress | None = None,
    limit: int | None = None,
) -> ImageStream:
    """Batches for an analysis: ordered, every image once, the last batch may be smaller.

    progress: called with (images done, images in all) after each batch. limit: a fixed sample of that many images.
    """
    return ImageStream(
        data,
        preprocess,
        batch_size,
        device=device,
        num_workers=num_workers,
        progress=progress,
        limit=limit,
    )


def stable_seed(*parts: int | str) -> int:
    """A seed that depends on nothing but its parts, the same in every process and version."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` on `device`, the copy queued: from pinned memory, since from ordinary memory the host would wait."""
    if device.type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


class _StepBatches:
    """The batches of a training stream from one step on, without end."""

    def __init__(self, stream: TrainStream, stage: str, step: int) -> None:
        self.stream, self.stage, self.step = stream, stage, step

    def __iter__(self) -> Iterator[list[int]]:
        step = self.step
        while True:
            yield self.stream.indices(step, self.stage).tolist()
            step += 1


class TrainStream:
    """Training batches as a pure function of (seed, stage, step).

    Each epoch is a permutation drawn from (seed, stage, epoch); the incomplete last batch is dropped. Augmentations
    are drawn for the global batch from (seed, stage, step) and sliced: rank r holds rows r B/W .. (r+1) B/W, so ranks
    put end to end equal one process.

    Args:
        batch_size: the global batch, over all ranks.
        augment: `none` for the centre crop of every analysis, `crop` for random resized crops and flips.
        crop_scale: the share of the image's area that a random crop covers.
        cache: `memory` keeps all images decoded as uint8, on the device if they take at most 30 % of what is free
            there; `none` decodes each time with `num_workers` reading ahead; `auto` keeps them when they take at most
            30 % of what is free on the device or the host.
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
        device: str | torch.device = "cpu",
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        cache: str = "auto",
        progress: Progress | None = None,
    ) -> None:
        _check(len(data), batch_size, augment, crop_scale, rank, world_size, cache)
        self.data, self.preprocess, self.batch_size = data, preprocess, batch_size
        self.seed, self.augment, self.crop_scale = seed, augment, crop_scale
        self.device, self.num_workers = torch.device(device), num_workers
        local = batch_size // world_size
        self.rows = slice(rank * local, (rank + 1) * local)
        self.steps_per_epoch = len(data) // batch_size
        self._epoch: tuple[str, int] | None = None
        self._order = torch.empty(0)
        self._reader: tuple[str, int, Iterator[Decoded]] | None = None
        self._label_table = None if data.labels is None else torch.tensor(data.labels).to(self.device)
        self.images: Tensor | None = None
        if cache == "memory" or (cache == "auto" and self._pays_to_cache(world_size)):
            store = self.device if self._fits_device() else torch.device("cpu")
            everything = list(range(len(data)))
            self.images, num_rows = fill_uint8(data, preprocess, everything, store, num_workers, progress, replace=True)
            if num_rows < len(data):
                raise BadImage(
                    f"{len(data) - num_rows} images of {data.name} cannot be read, nor others of their class"
                )

    def _num_bytes(self) -> int:
        return 3 * self.preprocess.resize**2 * len(self.data)

    def _fits_device(self) -> bool:
        return self._num_bytes() <= CACHE_SHARE * free_bytes(self.device)

    def _pays_to_cache(self, world_size: int) -> bool:
        if hasattr(self.data, "draw") and self.device.type == "cpu":
            return False  # drawing ahead on the CPU would only delay the first step
        held = getattr(self.data, "images", None)
        if isinstance(held, Tensor) and held.device.type == self.device.type:
            return False  # it is there already
        on_host = CACHE_SHARE * free_bytes(torch.device("cpu")) / world_size
        return self._fits_device() or self._num_bytes() <= on_host

    def indices(self, step: int, stage: str = "stage1") -> Tensor:
        """This rank's image indices (B_local,) at a step, on the CPU."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._epoch != (stage, epoch):
            generator = torch.Generator().manual_seed(stable_seed(self.seed, stage, "epoch", epoch))
            self._order = torch.randperm(len(self.data), generator=generator)
            self._epoch = (stage, epoch)
        return self._order[place * self.batch_size : (place + 1) * self.batch_size][self.rows]

    def crops(self, step: int, stage: str = "stage1") -> Tensor:
        """This rank's crop parameters (B_local, 5) at a step, on the CPU; see `draw_crops`."""
        generator = torch.Generator().manual_seed(stable_seed(self.seed, stage, "crop", step))
        return draw_crops(self.batch_size, self.preprocess.resize, generator, self.crop_scale)[self.rows]

    def batch(self, step: int, stage: str = "stage1") -> Tensor:
        """Normalised images float32 (B_local, 3, size, size) on the device."""
        images_u8 = self._uint8_batch(step, stage)
        if self.augment == "none":
            return self.preprocess.normalise(self.preprocess.crop(images_u8))
        crops = to_device(self.crops(step, stage), self.device)
        return self.preprocess.normalise(random_resized_crop(images_u8, crops, self.preprocess.size))

    def labels(self, step: int, stage: str = "stage1") -> Tensor:
        """Labels (B_local,) of the same images, on the device."""
        if self._label_table is None:
            raise ValueError(f"{self.data.name} has no labels; use an image folder with one folder per class")
        return self._label_table[to_device(self.indices(step, stage), self.device)]

    def _uint8_batch(self, step: int, stage: str) -> Tensor:
        """uint8 (B_local, 3, resize, resize) on the device."""
        if self.images is not None:
            own = to_device(self.indices(step, stage), self.images.device)
            return to_device(self.images.index_select(0, own), self.device)
        draw = getattr(self.data, "draw", None)
        if draw is not None:
            return self.preprocess.fit(draw(self.indices(step, stage), self.device).images)
        return self._read(step, stage).to(self.device, non_blocking=True)

    def _read(self, step: int, stage: str) -> Tensor:
        if self._reader is None or self._reader[:2] != (stage, step):
            self.close()
            images = DecodedImages(self.data, self.preprocess, crop=False, replace=self.data.skip_bad)
            batches = _StepBatches(self, stage, step)
            self._reader = (stage, step, decode_batches(images, batches, self.num_workers, self.device))
        reader = self._reader[2]
        decoded = next(reader)
        if len(decoded.images) != self.rows.stop - self.rows.start:
            raise BadImage(f"an image of step {step} cannot be read, nor another of its class")
        self._reader = (stage, step + 1, reader)
        return decoded.images

    def close(self) -> None:
        """Stop reading ahead; the next batch starts again."""
        self._reader = None


def _check(
    num_images: int,
    batch_size: int,
    augment: str,
    crop_scale: tuple[float, float],
    rank: int,
    world_size: int,
    cache: str,
) -> None:
    if augment not in ("none", "crop"):
        raise ValueError(f"unknown augmentation {augment!r}; use none or crop")
    if cache not in ("auto", "memory", "none"):
        raise ValueError(f"unknown cache {cache!r}; use auto, memory or none")
    if not 0 < crop_scale[0] <= crop_scale[1] <= 1:
        raise ValueError(f"crop_scale must rise within 0..1; got {crop_scale}")
    if not 1 <= batch_size <= num_images:
        raise ValueError(f"a batch of {batch_size} cannot be filled from {num_images} images; choose a smaller batch")
    if batch_size % world_size:
        raise ValueError(f"a batch of {batch_size} does not divide over {world_size} processes")
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
