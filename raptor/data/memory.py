"""Images that come in whole batches (drawn, or kept in memory), and several sets as one."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from PIL import Image
from torch import Tensor

from raptor.data.image_file import File
from raptor.data.images import ImageData, Pixels, Progress, fill_uint8
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
        num_workers: int | None = None,
        crop: bool = False,
        replace: bool = False,
        reduced: bool = False,
    ) -> Iterator[Pixels]:
        """As in `ImageData`; there is nothing to decode ahead and no image is bad."""
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
        specs: list[str] = []
        labels: list[int] = []
        left_out: Counter[str] = Counter()
        not_chosen: Counter[str] = Counter()
        for data in sets:
            # Two sets may have images of one name.
            names += [f"{data.name}: {name}" for name in data.names]
            keys += data.keys
            specs += data.specs
            labels += data.labels or ()
            left_out.update(data.left_out)
            not_chosen.update(data.not_chosen)
        name = " ".join(data.name for data in sets)
        classes = sets[0].classes
        # A label is a place in this list, so that equal labels of other lists mean other classes.
        if classes is not None and all(data.classes == classes for data in sets):
            super().__init__(name, names, labels, classes, keys=keys)
        else:
            super().__init__(name, names, keys=keys)
        self.specs = specs
        self.num_stamped = min(data.num_stamped for data in sets)
        self.left_out = dict(left_out)
        self.not_chosen = dict(not_chosen)
        self.sets = list(sets)
        self.ends = list(accumulate(map(len, sets)))

    def originals(self, positions: Tensor) -> Tensor:
        """A set that was joined several times is one object, so its images are those of its first place."""
        first_start: dict[int, int] = {}
        found = []
        for data, end in zip(self.sets, self.ends):
            # By identity: two sets that were opened apart may hold other files by now.
            start = first_start.setdefault(id(data), end - len(data))
            rows, where = data.distinct()
            found.append(start + rows[where])
        return torch.cat(found)[positions]

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


class InMemory(WholeBatches):
    """The images of `data`, decoded once for `preprocess` and kept as uint8 on `device`: for many runs over them.

    An image that the data holds several times is kept once: `where` (N,) says which row of `images` belongs to each.
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
        super().__init__(data.name, data.names, data.labels, data.classes, data.parts, data.keys)
        self.specs = list(data.specs)
        self.num_stamped = data.num_stamped
        self.left_out = data.left_out
        self.data = data
        self.rows, self.where = data.distinct()
        images = torch.empty((len(self.rows), 3, preprocess.resize, preprocess.resize), dtype=torch.uint8)
        fill_uint8(images, data, preprocess, self.rows.tolist(), num_workers, progress)
        self.images = images.to(device)

    def file(self, position: int) -> File | None:
        return self.data.file(int(self.data.positions[position]))

    def stamp(self, position: int) -> int:
        return self.data.stamp(int(self.data.positions[position]))

    def originals(self, positions: Tensor) -> Tensor:
        return self.rows[self.where[positions]]

    def take(self, positions: Tensor, device: torch.device) -> Tensor:
        # Chosen where the images are, so that only the batch is copied.
        chosen = self.images.index_select(0, to_device(self.where[positions], self.images.device))
        return to_device(chosen, device)

    def worth_caching(self, device: torch.device) -> bool:
        # From the host to a GPU a copy of all images pays; these are decoded already.
        return device.type not in ("cpu", self.images.device.type)
