"""A surrogate on other images than those it was judged on: further data sets, and corruptions of the same images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from raptor.certificate.follow import check_finite, check_pair, curve_intervals, follow
from raptor.certificate.heads import Head
from raptor.certificate.refit import Refitted
from raptor.certificate.verdict import Estimate
from raptor.data.images import ImageData, ImagesOf, Pixels
from raptor.data.stream import Batch, sharing, stable_seed
from raptor.devices import to_device
from raptor.streaming import Record, jsonable
from raptor.vit.view import ViT

# The severities 1 to 5 of ImageNet-C (Hendrycks and Dietterich, 2019) for images of 224 px: deviation of the noise as
# a share of white, deviation of the blur in pixels (scaled with the image's side), JPEG quality, share of the contrast.
SEVERITIES: dict[str, tuple[float, ...]] = {
    "noise": (0.08, 0.12, 0.18, 0.26, 0.38),
    "blur": (1.0, 2.0, 3.0, 4.0, 6.0),
    "jpeg": (25, 18, 15, 10, 7),
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
}
SHIFT_COLUMNS = (
    "images",
    "number",
    "R2, last layer",
    "R2, lowest",
    "eps",
    "agreement",
    "refitted head",
    "one class for all",
)
_DEFAULT_SEVERITY = 3
_SIDE = 224


@dataclass(frozen=True)
class Corruption:
    """One of `SEVERITIES` at a severity of 1 to 5."""

    kind: str
    severity: int = _DEFAULT_SEVERITY

    @classmethod
    def parse(cls, word: str) -> Corruption | None:
        """`noise` or `noise:5` as a corruption; None for the name of data."""
        kind, colon, severity = word.partition(":")
        if kind not in SEVERITIES:
            return None
        if not colon:
            return cls(kind)
        if severity not in ("1", "2", "3", "4", "5"):
            raise ValueError(f"--shift {word}: the severity of {kind} is 1 to 5, such as {kind}:{_DEFAULT_SEVERITY}")
        return cls(kind, int(severity))

    def __str__(self) -> str:
        return f"{self.kind}:{self.severity}"

    def __call__(self, images_u8: Tensor, seeds: Sequence[int]) -> Tensor:
        """Images uint8 (B, 3, S, S), corrupted where they are; each has a seed that decides its noise."""
        strength = SEVERITIES[self.kind][self.severity - 1]
        side = images_u8.shape[-1]
        if self.kind == "noise":
            # Not torchvision's own noise, which is drawn from the global generator. Drawn on the CPU, so that it is the
            # same on every device.
            noises = []
            for seed in seeds:
                noises.append(torch.randn(images_u8.shape[1:], generator=torch.Generator().manual_seed(seed)))
            noise = to_device(torch.stack(noises), images_u8.device)
            return (images_u8 + 255 * strength * noise).round().clamp(0, 255).to(torch.uint8)
        if self.kind == "blur":
            sigma = strength * side / _SIDE
            reach = min(round(4 * sigma), side - 1)  # the image is reflected at its sides
            return F.gaussian_blur(images_u8, [2 * reach + 1] * 2, [sigma] * 2)
        if self.kind == "jpeg":  # blocks of 8 px at any size: small images suffer more than those of ImageNet-C
            # torchvision encodes one image at a time, on the CPU.
            encoded = [F.jpeg(image, int(strength)) for image in images_u8.cpu()]
            return to_device(torch.stack(encoded), images_u8.device)
        return F.adjust_contrast(images_u8, strength)


class CorruptedImages(ImagesOf):
    """The images of `data` as a model sees them, after resize and crop, corrupted; the labels stay."""

    def __init__(self, data: ImageData, corruption: Corruption) -> None:
        # Its keys are those of `data`, so that the same images are sampled and the noise of an image stays its own.
        super().__init__(data)
        self.name = str(corruption)
        self.corruption = corruption

    def batches(self, chunks: Iterable[list[int]], *args: Any, **kwargs: Any) -> Iterator[Pixels]:
        """As in `ImageData`. The noise of an image depends only on its key."""
        seen = self.data.select(self.positions.tolist())
        seen.bad = self.bad
        for images, indices in seen.batches(chunks, *args, **kwargs):
            if len(indices):  # a batch may consist of skipped images
                seeds = [stable_seed(str(self.corruption), self.keys[index]) for index in indices.tolist()]
                images = self.corruption(images, seeds)
            yield Pixels(images, indices)


@dataclass(frozen=True)
class Shift(Record):
    """A surrogate against its teacher on one set of images.

    Attributes:
        name: the data, or the corruption and its severity.
        r2_last, r2_lowest, lowest_layer: R2 over all tokens; 0 is the mean of the teacher's states on this very set.
        eps: the largest relative error over the layers, with its 95 % interval at the layer `eps_layer`.
        agreement: None without a head. floor: of a predictor that always gives one class.
        refitted: agreement with norm and head refitted, where `raptor head` has done it.
    """

    name: str
    num_images: int
    r2_last: Estimate
    r2_lowest: float | None
    lowest_layer: int
    eps: Estimate
    eps_layer: int
    agreement: Estimate | None = None
    floor: float | None = None
    refitted: Estimate | None = None

    def cells(self) -> tuple[str, ...]:
        """The row in words, in the order of `SHIFT_COLUMNS`."""
        lowest = Estimate(self.r2_lowest)
        cells = [self.name, f"{self.num_images:,}", str(self.r2_last), f"{lowest} at layer {self.lowest_layer}"]
        cells.append(f"{self.eps} at layer {self.eps_layer}")
        if self.agreement is None:  # there is no head
            return (*cells, "", "", "")
        refitted = "" if self.refitted is None else str(self.refitted)
        return (*cells, str(self.agreement), refitted, str(Estimate(self.floor)))


def measure_shift(
    surrogate: ViT,
    teacher: ViT,
    batches: Iterable[Batch],
    *,
    name: str,
    head: Head | None = None,
    refitted: Refitted | None = None,
    precision: str = "fp32",
    bootstrap: int = 1000,
    seed: int = 0,
) -> Shift:
    """Both models on one set of images, in one pass; of all ranks that share the batches."""
    check_pair(surrogate, teacher)
    found = follow(surrogate, teacher, batches, head, precision, refitted=refitted)

    def finish() -> Shift:
        check_finite(found.curves["surrogate"], surrogate, teacher)
        curves = found.curves["surrogate"].result()
        intervals = curve_intervals(curves, bootstrap, seed)
        relative_l = curves.relative["all"]
        r2_l = curves.r2["all"]
        layer = int(relative_l.argmax())
        lowest = int(r2_l.argmin())
        predictions = found.predictions(bootstrap, seed)
        return Shift(
            name=name,
            num_images=curves.num_images,
            r2_last=Estimate.of(r2_l[-1], intervals["r2"][:, -1, 0]),
            r2_lowest=jsonable(r2_l[lowest]),
            lowest_layer=lowest + 1,
            eps=Estimate.of(relative_l[layer], intervals["relative"][:, layer, 0]),
            eps_layer=layer + 1,
            agreement=predictions.get("agreement"),
            floor=found.floors().get("agreement"),
            refitted=predictions.get("refitted_agreement"),
        )

    return sharing(batches).first(finish)
