"""Decode images to uint8, in worker processes or not, and deal with those that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from raptor.data.folder import BadImage, ImageData
from raptor.data.preprocess import Preprocess

Progress = Callable[[int, int], None]
DECODE_BATCH = 64
DRAW_BATCH = 1024


class Decoded(NamedTuple):
    """One batch as a worker returns it: images uint8 (B, 3, S, S), their indices, (name, error) of the bad ones."""

    images: Tensor
    indices: Tensor
    bad: list[tuple[str, str]]


class DecodedImages(Dataset[tuple[int, Tensor | None, list[tuple[str, str]]]]):
    """What a worker does per image. Errors travel as values, since a worker's exception arrives as a traceback.

    With `replace`, a bad image gives way to the next readable one of its class, so that a batch keeps its size.
    """

    def __init__(self, data: ImageData, preprocess: Preprocess, *, crop: bool, replace: bool = False) -> None:
        self.data, self.preprocess, self.crop, self.replace = data, preprocess, crop, replace

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[int, Tensor | None, list[tuple[str, str]]]:
        bad: list[tuple[str, str]] = []
        for candidate in self._candidates(index):
            try:
                image = self.preprocess.decode(self.data.load(candidate))
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


def _collate(rows: Sequence[tuple[int, Tensor | None, list[tuple[str, str]]]]) -> Decoded:
    images = [image for _, image, _ in rows if image is not None]
    indices = [index for index, image, _ in rows if image is not None]
    bad = [entry for _, _, entries in rows for entry in entries]
    return Decoded(torch.stack(images) if images else torch.empty(0), torch.tensor(indices, dtype=torch.int64), bad)


def note_bad(data: ImageData, bad: list[tuple[str, str]]) -> None:
    """Stop at the first bad image, or with `skip_bad` add their names to `data.bad`."""
    if bad and not data.skip_bad:
        raise BadImage(f"{bad[0][1]}; repair or remove it, or skip such images with --skip-bad")
    data.bad += [name for name in dict(bad) if name not in data.bad]


def decode_batches(
    images: DecodedImages, batches: Iterable[list[int]], num_workers: int, device: torch.device
) -> Iterator[Decoded]:
    """Decode batches of indices, with workers that read ahead if there are any."""
    loader: DataLoader = DataLoader(
        images,
        batch_sampler=batches,  # type: ignore[arg-type]
        num_workers=num_workers,
        collate_fn=_collate,
        pin_memory=device.type == "cuda",
        generator=torch.Generator().manual_seed(0),  # else each pass would advance the global one
    )
    for decoded in loader:
        note_bad(images.data, decoded.bad)
        yield decoded


def chunks_of(indices: list[int], size: int) -> list[list[int]]:
    """Consecutive pieces of `size` indices; the last may be shorter."""
    return [indices[i : i + size] for i in range(0, len(indices), size)]


def load_uint8(
    data: ImageData,
    preprocess: Preprocess,
    num_workers: int = 0,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Decode once: uint8 (N, 3, resize, resize) in the order of `data.sample(limit)`, less the bad images skipped."""
    indices = data.sample(limit)
    images, num_rows = fill_uint8(data, preprocess, indices, torch.device("cpu"), num_workers, progress, replace=False)
    return images[:num_rows]


def fill_uint8(
    data: ImageData,
    preprocess: Preprocess,
    indices: list[int],
    device: torch.device,
    num_workers: int,
    progress: Progress | None,
    *,
    replace: bool,
) -> tuple[Tensor, int]:
    """A uint8 tensor (len(indices), 3, resize, resize) on `device`, and how many of its first rows are filled.

    With `replace`, bad images that may be skipped give way to others, and every row is filled.
    """
    side = preprocess.resize
    images = torch.empty(len(indices), 3, side, side, dtype=torch.uint8, device=device)
    draw = getattr(data, "draw", None)
    chunks, num_rows, num_done = chunks_of(indices, DECODE_BATCH if draw is None else DRAW_BATCH), 0, 0
    if draw is not None:
        parts: Iterator[Tensor] = (preprocess.fit(draw(torch.tensor(chunk), device).images) for chunk in chunks)
    else:
        decoded = DecodedImages(data, preprocess, crop=False, replace=replace and data.skip_bad)
        parts = (part.images for part in decode_batches(decoded, chunks, num_workers, device))
    for chunk, part in zip(chunks, parts):
        if len(part):
            images[num_rows : num_rows + len(part)].copy_(part, non_blocking=True)
        num_rows, num_done = num_rows + len(part), num_done + len(chunk)
        if progress is not None:
            progress(num_done, len(indices))
    return images, num_rows
