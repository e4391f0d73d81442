"""Patch tokens as colours through depth: teacher above surrogate, for a few images.

At every layer three principal components are fitted on the teacher's patch tokens, and both models are projected on
them, so that the same colour means the same state. Components have no natural order or sign: each layer's are rotated
onto those of the layer after it (Procrustes on the same tokens), starting from the last, so that colours flow.
"""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from PIL import Image
from torch import Tensor

from raptor.certificate.definition import Definition
from raptor.data import ChosenData, ImageData, iterate
from raptor.data.stream import Batch
from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.streaming import Record
from raptor.subject import Subject
from raptor.vit.view import ViT

_NUM_FIT = 64  # images the components are fitted on, the shown ones among them
_SPREAD = 2.0  # standard deviations from the middle of a colour channel to its end
_PICTURE_SIDE = 128
_MAX_GRID = 24  # finer grids of patches are averaged down, to keep the page small


@dataclass
class ImageStrip(Record):
    """One image through depth, as PNGs in base64.

    Attributes:
        image: the image.
        teacher, surrogate: the maps of all L+1 layers side by side, one pixel per patch.
        cosine: mean cosine between the patches of both models, per layer.
    """

    name: str
    label: str | None
    image: str
    teacher: str
    surrogate: str | None = None
    cosine: list[float | None] | None = None


@dataclass
class ImagesFile(ResultFile):
    """images.json: a few held-out images of `data` through depth.

    explained: share of the variance that the three components of a layer hold, per layer.
    """

    FILE: ClassVar[str] = "images.json"

    data: str
    num_images: int
    grid: tuple[int, int]
    num_layers: int
    teacher: str
    surrogate: str | None
    explained: list[float | None]
    images: list[ImageStrip]
    split: str = "val"
    provenance: Provenance = field(default_factory=Provenance)
    subject: Subject | None = None


def shown_images(
    data: ChosenData, num_images: int, size: int | None = None, measured: Subject | None = None
) -> ImageData:
    """The images that `num_images` to show are chosen from, and that the components are fitted on.

    measured: of a folder that is no run: they are among the images that its results are about, or ValueError.
    """
    num = max(_NUM_FIT, num_images)
    if measured is None:
        return data.judged(num, size)
    images = data.judged(measured.num_images, size)
    if images.fingerprint() != measured.images:
        raise ValueError(f"{data.name} holds other images than those that were measured")
    return images.select(images.sample(min(num, len(images))))


def measure_strips(
    teacher: ViT, surrogate: ViT | None, data: ChosenData, num_images: int, measured: Subject | None = None
) -> ImagesFile:
    """The colours of `num_images` of the images that `data` judges on. measured: see `shown_images`."""
    if not teacher.groups.patches:
        raise ValueError(f"{teacher.name} has no patch tokens to colour")
    # One batch: components are fitted on all of its images, and few of them are shown. Fitted on the few only, they
    # would hold what sets these images apart, not what sets their patches apart.
    images = shown_images(data, num_images, teacher.preprocess.size, measured)
    batch = next(iter(iterate(images, teacher.preprocess, max(_NUM_FIT, num_images), device=teacher.device)))
    chosen = sorted(_of_different_classes(batch)[:num_images])
    with torch.no_grad():
        patches = _patches(teacher, batch.images)
    # The teacher's components colour both models: components of their own would differ in sign and order.
    colours, bases, explained = teacher_colours(patches)
    own = []
    if surrogate is not None:  # only the shown images: the components are the teacher's
        with torch.no_grad():
            own = _patches(surrogate, batch.images[chosen])
    rows = []
    for place, i in enumerate(chosen):
        entry = ImageStrip(
            name=str(images.names[int(batch.indices[i])]),
            label=None,
            image=png(shown_picture(batch.images[i], teacher)),
            teacher=png(_sprite([colour_npc[i] for colour_npc in colours], teacher.grid)),
        )
        if batch.labels is not None and images.classes:
            entry.label = str(images.classes[int(batch.labels[i])])
        if own:
            own_colours = [project(own_npd[place], *basis) for own_npd, basis in zip(own, bases)]
            entry.surrogate = png(_sprite(own_colours, teacher.grid))
            entry.cosine = []
            for own_npd, x_npd in zip(own, patches):
                entry.cosine.append(float(torch.cosine_similarity(x_npd[i], own_npd[place], dim=-1).mean()))
        rows.append(entry)
    return ImagesFile(
        data=data.name,
        split=data.split,
        num_images=len(rows),
        grid=teacher.grid,
        num_layers=teacher.num_layers,
        teacher=teacher.name,
        surrogate=getattr(surrogate, "name", None),
        explained=list(explained),
        images=rows,
        subject=Subject.of(teacher, images, surrogate),
    )


def _of_different_classes(batch: Batch) -> list[int]:
    """The places of a batch, the first image of each class before the second of any."""
    labels = [None] * len(batch.images) if batch.labels is None else batch.labels.tolist()
    num_seen: Counter[int | None] = Counter()
    turns = []
    for label in labels:
        turns.append(num_seen[label])
        num_seen[label] += 1
    # Sorting keeps the order of equal turns, so the same images are chosen each time.
    return sorted(range(len(turns)), key=turns.__getitem__)


def add_pictures(definition: Definition, vit: ViT, data: ImageData) -> None:
    """Put their pictures beside the hardest images of a verdict on `data`."""
    names = list(data.names)
    for image in definition.hardest:
        image.picture = png(shown_picture(vit.preprocess(data[names.index(image.name)]), vit))


def teacher_colours(patches: Sequence[Tensor]) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]], list[float]]:
    """Colours (N, P, 3) in 0..1 of every layer's tokens (N, P, D), the (mean, axes) behind them, variance explained."""
    bases: list[tuple[Tensor, Tensor]] = []
    explained: list[float] = []
    after: Tensor | None = None
    for x_npd in reversed(patches):
        points = x_npd.flatten(0, 1).double()
        mean, axes, share = components(points)
        scores = (points - mean) @ axes
        if after is not None:  # the last layer has nothing to be rotated onto
            u, _, vh = torch.linalg.svd(scores.mT @ after)
            axes = axes @ (u @ vh)
            scores = scores @ (u @ vh)
        after = scores
        bases.insert(0, (mean, axes))
        explained.insert(0, share)
    colours = [project(x_npd, *basis) for x_npd, basis in zip(patches, bases)]
    return colours, bases, explained


def components(points_nd: Tensor) -> tuple[Tensor, Tensor, float]:
    """Mean (D,), axes (D, 3) that give scores of unit variance, and their share of the variance."""
    mean = points_nd.mean(0)
    centred = points_nd - mean
    # Eigenvectors of the D x D covariance: far fewer coordinates than patches of 64 images.
    variances, vectors = torch.linalg.eigh(centred.mT @ centred / len(points_nd))
    top, axes = variances.flip(0)[:3].clamp_min(0), vectors.flip(1)[:, :3]
    # The sign of an eigenvector is arbitrary: the largest entry of each is made positive.
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    scale = top.sqrt().clamp_min(1e-12)
    return mean, axes * largest.sign() / scale, float(top.sum() / variances.clamp_min(0).sum().clamp_min(1e-30))


def project(x_pd: Tensor, mean: Tensor, axes: Tensor) -> Tensor:
    """Colours (..., 3) in 0..1 of tokens (..., D)."""
    return (0.5 + (x_pd.double() - mean) @ axes / (2 * _SPREAD)).clamp(0, 1)


def png(rgb_hwc: Tensor) -> str:
    """A picture (H, W, 3) in 0..1 as a PNG in base64."""
    # `optimize`, because a page holds a map per layer of each image.
    file = io.BytesIO()
    Image.fromarray((255 * rgb_hwc).round().to(torch.uint8).cpu().numpy()).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def _patches(vit: ViT, images: Tensor) -> list[Tensor]:
    """States of the patch tokens, (B, P, D) for each of the L+1 layers."""
    states, _ = vit.record(images)
    where = vit.groups.slice("patches")
    return [x_btd[:, where].float() for x_btd in states]


def _sprite(colours: Sequence[Tensor], grid: tuple[int, int]) -> Tensor:
    """Maps (P, 3) of every layer side by side, (H, (L+1) W, 3)."""
    maps = torch.stack(list(colours)).unflatten(1, grid).permute(0, 3, 1, 2)
    if max(grid) > _MAX_GRID:
        height, width = grid
        smaller = [min(height, _MAX_GRID), min(width, _MAX_GRID)]
        maps = torch.nn.functional.interpolate(maps, smaller, mode="area")
    return torch.cat(list(maps.permute(0, 2, 3, 1)), dim=1)


def shown_picture(image_chw: Tensor, vit: ViT, max_side: int | None = _PICTURE_SIDE) -> Tensor:
    """A normalised image back in 0..1, (H, W, 3), at most `max_side` px wide."""
    mean = torch.tensor(vit.preprocess.mean, device=image_chw.device).view(3, 1, 1)
    std = torch.tensor(vit.preprocess.std, device=image_chw.device).view(3, 1, 1)
    # Rounding leaves values a little outside of 0..1, which a PNG cannot hold.
    seen_chw = (image_chw * std + mean).clamp(0, 1)
    if max_side is not None and seen_chw.shape[-1] > max_side:
        seen_chw = torch.nn.functional.interpolate(seen_chw[None], max_side, mode="area")[0]
    return seen_chw.permute(1, 2, 0)
