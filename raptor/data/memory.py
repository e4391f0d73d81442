"""Images that come in whole batches (drawn, or kept in memory), and several sets as one."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from raptor.data.image_file import File
from raptor.data.images import ImageData, ImagesOf, Pixels, Progress, fill_uint8
from raptor.data.preprocess import Preprocess
from raptor.devices import to_device


class WholeBatches(ImageData):
    """Data that gives a batch at once on the device that needs it: drawn there, or kept in memory."""

    fill_size = 1024

    def take(self, positions: Tensor, device: torch.device) -> Tensor:
        """Images at `positions` (B,) of the reader's own order as uint8 (B, 3, S, S) on `device`."""
        raise NotImplementedError

    def read(self, position: int, side: int | None = None) -> Image.Image:
        image = self.take(torch.tensor([position]), torch.device("cpu"))[0]
        return Image.fromarray(image.permute(1, 2, 0).numpy())

    def batches(
        self,
        chunks: Iterable[list[int]],
        preprocess: Preprocess,
        device: str | torch.device,
        *,
        crop: bool = False,
        **_decoding: Any,
    ) -> Iterator[Pixels]:
        """As in `ImageData`; nothing is decoded, so that no image is bad."""
        for chunk in chunks:
            indices = torch.tensor(chunk)
            images = preprocess.fit(self.take(self.positions[indices], torch.device(device)))
            if crop:
                images = preprocess.crop(images)
            yield Pixels(images, indices)


class JoinedImages(ImageData):
    """Several sets one after the other; with labels if all of them have the same classes."""

    def __init__(self, sets: Sequence[ImageData]) -> None:
        names: list[str] = []
        keys: list[str] = []
        for data in sets:
            names += [f"{data.name}: {name}" for name in data.names]  # two sets may have images of one name
            keys += data.keys
        super().__init__(" ".join(data.name for data in sets), names, keys=keys)
        # A label is a place in this list, so that equal labels of other lists mean other classes.
        classes = sets[0].classes
        if classes is not None and all(data.classes == classes for data in sets):
            self.labels = [label for data in sets for label in data.labels or ()]
            self.classes = classes
        self.specs = [spec for data in sets for spec in data.specs]
        self.num_stamped = min(data.num_stamped for data in sets)
        self.left_out = dict(sum((Counter(data.left_out) for data in sets), Counter()))
        self.not_chosen = dict(sum((Counter(data.not_chosen) for data in sets), Counter()))
        # A set that is joined several times has one place. By identity: two sets that were opened apart may hold other
        # files by now.
        starts: dict[int, int] = {}
        self.sets: list[ImageData] = []
        self.ends: list[int] = []
        positions = []
        for data in sets:
            if id(data) not in starts:
                starts[id(data)] = self.ends[-1] if self.ends else 0
                self.sets.append(data)
                self.ends.append(starts[id(data)] + len(data))
            rows, where = data.distinct()
            positions.append(starts[id(data)] + rows[where])
        self.positions = torch.cat(positions)

    def _place(self, position: int) -> tuple[ImageData, int]:
        """The set that holds an image, and where the image stands in that set's own order."""
        number = bisect_right(self.ends, position)
        data = self.sets[number]
        start = self.ends[number] - len(data)
        return data, int(data.positions[position - start])

    def file(self, position: int) -> File | None:
        data, own = self._place(position)
        return data.file(own)

    def stamp(self, position: int) -> int:
        data, own = self._place(position)
        return data.stamp(own)

    def read(self, position: int, side: int | None = None) -> Image.Image:
        data, own = self._place(position)
        return data.read(own, side)


class InMemory(ImagesOf, WholeBatches):
    """The images of `data`, decoded once for `preprocess` and kept as uint8 on `device`: for many runs over them.

    An image that the data holds several times is kept once, so that a position is a row of `images`.
    """

    def __init__(
        self,
        data: ImageData,
        preprocess: Preprocess,
        device: str | torch.device = "cpu",
        num_workers: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        # A bad image is replaced by a neighbour of its class, so the kept ones would depend on the order of the data.
        if data.skip_bad:
            raise ValueError("images that may be skipped cannot be kept in memory: remove the bad ones first")
        super().__init__(data)
        rows, self.positions = data.distinct()
        self.data = data.select(rows.tolist())
        images = torch.empty((len(rows), 3, preprocess.resize, preprocess.resize), dtype=torch.uint8)
        fill_uint8(images, self.data, preprocess, list(range(len(rows))), num_workers, progress)
        self.images = images.to(device)

    def file(self, position: int) -> File | None:
        return self.data.file(int(self.data.positions[position]))

    def take(self, positions: Tensor, device: torch.device) -> Tensor:
        # Chosen where the images are, so that only the batch is copied.
        return to_device(self.images.index_select(0, to_device(positions, self.images.device)), device)

    def worth_caching(self, device: torch.device) -> bool:
        # From the host to a GPU a copy of all images pays; these are decoded already.
        return device.type not in ("cpu", self.images.device.type)
