"""Patch tokens as colours through depth: teacher above surrogate, for a few images.

At every layer three principal components are fitted on the teacher's patch tokens, and both models are projected on
them, so that the same colour means the same state. Components have no natural order or sign: each layer's are rotated
onto those of the layer after it (Procrustes on the same tokens), starting from the last, so that colours flow.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from raptor.certificate.certificate import Certificate
from raptor.data import ChosenData, ImageData, iterate
from raptor.files import RunError
from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.streaming import Record
from raptor.subject import Subject
from raptor.vit.open import open_vit
from raptor.vit.pair import open_pair
from raptor.vit.saved import is_surrogate, saved_folder
from raptor.vit.view import ViT
from raptor.vit.weights import fingerprint

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
class WorstImage(Record):
    """An image that the surrogate follows badly: its picture, and its relative error at a layer."""

    name: str
    image: str
    error: float
    layer: int


@dataclass
class ImagesFile(ResultFile):
    """images.json: a few held-out images of `data` through depth.

    explained: share of the variance that the three components of a layer hold, per layer.
    worst: the images with the largest errors in the certificate.
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
    worst: list[WorstImage] = field(default_factory=list)
    provenance: Provenance = field(default_factory=Provenance)
    subject: Subject | None = None


def shown_images(data: ChosenData, num_images: int, size: int | None = None) -> ImageData:
    """The images that `num_images` to show are chosen from, and that the components are fitted on."""
    return data.judged(max(_NUM_FIT, num_images), size)


def measure_strips(teacher: ViT, surrogate: ViT | None, data: ChosenData, num_images: int) -> ImagesFile:
    """The colours of `num_images` of the images that `data` judges on."""
    if not teacher.groups.patches:
        raise ValueError(f"{teacher.name} has no patch tokens to colour")
    images = shown_images(data, num_images, teacher.preprocess.size)
    batch = next(iter(iterate(images, teacher.preprocess, max(_NUM_FIT, num_images), device=teacher.device)))
    chosen = _spread_over_classes(batch.labels, min(num_images, len(batch.images)))
    with torch.no_grad():
        patches = _patches(teacher, batch.images)
        own = None if surrogate is None else _patches(surrogate, batch.images[chosen])
    colours, bases, explained = teacher_colours(patches)
    classes = images.classes
    rows = []
    for row, i in enumerate(chosen):
        entry = ImageStrip(
            name=str(images.names[int(batch.indices[i])]),
            label=None if batch.labels is None or not classes else str(classes[int(batch.labels[i])]),
            image=png(_picture(batch.images[i], teacher)),
            teacher=png(_sprite([c[i] for c in colours], teacher.grid)),
        )
        if own is not None:
            theirs = [project(states[row], *basis) for states, basis in zip(own, bases)]
            entry.surrogate = png(_sprite(theirs, teacher.grid))
            pairs = zip(patches, own)
            entry.cosine = [float(torch.cosine_similarity(t[i], s[row], dim=-1).mean()) for t, s in pairs]
        rows.append(entry)
    return ImagesFile(
        data=data.name,
        split=data.split,
        num_images=len(rows),
        grid=teacher.grid,
        num_layers=teacher.num_layers,
        teacher=teacher.name,
        surrogate=None if surrogate is None else surrogate.name,
        explained=[float(share) for share in explained],
        images=rows,
        subject=Subject.of(teacher, images, surrogate),
    )


def worst_names(data: ChosenData, certificate: Certificate | None) -> list[str]:
    """Names of the certificate's worst images; empty where it is of other images than `data`."""
    if certificate is None or certificate.definition is None:
        return []
    if (certificate.data, certificate.split) != (data.name, data.split):
        return []
    return [certificate.definition.worst_image]


def worst_images(vit: ViT, data: ChosenData, certificate: Certificate | None) -> list[WorstImage]:
    """The certificate's worst images with their pictures."""
    found = []
    for name in worst_names(data, certificate):
        assert certificate is not None and certificate.definition is not None
        images = data.judged(certificate.num_images, vit.preprocess.size)
        names = list(images.names)
        if name in names:
            picture = png(_picture(vit.preprocess(images[names.index(name)]), vit))
            about = certificate.definition
            found.append(WorstImage(name, picture, about.worst, about.layer))
    return found


def open_run(
    folder: Path,
    config: Mapping[str, Any],
    device: str,
    trust_hub: bool = False,
    weights: str | None = None,
    teacher: str | ViT | None = None,
    allow_other_teacher: bool = False,
) -> tuple[ViT, ViT | None]:
    """Teacher and surrogate of a run folder: the models saved there, else the one its config names.

    weights: the teacher's weight file, where it was moved since the run was made. Other weights are refused.
    """
    if saved_folder(str(folder)) is not None:
        if weights is not None and not is_surrogate(folder):
            raise RunError(f"{folder} holds a model with its own weights: leave out --weights")
        surrogate, model = open_pair(
            folder,
            teacher=teacher,
            allow_other_teacher=allow_other_teacher,
            device=device,
            trust_hub=trust_hub,
            weights=weights,
        )
        return model, surrogate
    if config.get("model") is None:
        raise ValueError(f"{folder} holds no model, and no config.yaml that names one")
    if teacher is not None:
        raise RunError(f"{folder} holds no surrogate and has no teacher: leave out --teacher and --module")
    options = {key: config[key] for key in ("weights", "size") if config.get(key) is not None}
    options |= {} if weights is None else {"weights": weights}
    vit = open_vit(str(config["model"]), device=device, trust_hub=trust_hub, **options)
    if weights is not None and fingerprint(vit.model) != config.get("fingerprint"):
        raise RunError(f"{weights} does not hold the weights that {folder} was made with: leave out --weights")
    return vit, None


def teacher_colours(patches: Sequence[Tensor]) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]], list[float]]:
    """Colours (N, P, 3) in 0..1 of every layer's tokens (N, P, D), the (mean, axes) behind them, variance explained."""
    bases: list[tuple[Tensor, Tensor]] = []
    explained: list[float] = []
    after: Tensor | None = None
    for x_npd in reversed(patches):
        points = x_npd.flatten(0, 1).double()
        mean, axes, share = components(points)
        scores = (points - mean) @ axes
        if after is not None:
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
    variances, vectors = torch.linalg.eigh(centred.mT @ centred / len(points_nd))
    top, axes = variances.flip(0)[:3].clamp_min(0), vectors.flip(1)[:, :3]
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    scale = top.sqrt().clamp_min(1e-12)
    return mean, axes * largest.sign() / scale, float(top.sum() / variances.clamp_min(0).sum().clamp_min(1e-30))


def project(x_pd: Tensor, mean: Tensor, axes: Tensor) -> Tensor:
    """Colours (..., 3) in 0..1 of tokens (..., D)."""
    return (0.5 + (x_pd.double() - mean) @ axes / (2 * _SPREAD)).clamp(0, 1)


def png(rgb_hwc: Tensor) -> str:
    """A picture (H, W, 3) in 0..1 as a PNG in base64."""
    file = io.BytesIO()
    Image.fromarray((255 * rgb_hwc).round().to(torch.uint8).cpu().numpy()).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def _patches(vit: ViT, images: Tensor) -> list[Tensor]:
    """States of the patch tokens, (B, P, D) for each of the L+1 layers."""
    states, _ = vit.record(images)
    return [state[:, vit.groups.slice("patches")].float() for state in states]


def _sprite(colours: Sequence[Tensor], grid: tuple[int, int]) -> Tensor:
    """Maps (P, 3) of every layer side by side, (H, (L+1) W, 3)."""
    maps = torch.stack([c.reshape(*grid, 3) for c in colours]).permute(0, 3, 1, 2)
    if max(grid) > _MAX_GRID:
        maps = torch.nn.functional.interpolate(maps, [min(side, _MAX_GRID) for side in grid], mode="area")
    return torch.cat(list(maps.permute(0, 2, 3, 1)), dim=1)


def _picture(image_chw: Tensor, vit: ViT) -> Tensor:
    """A normalised image back in 0..1, (H, W, 3), at most 128 px wide."""
    mean, std = (
        torch.tensor(v, device=image_chw.device).view(3, 1, 1) for v in (vit.preprocess.mean, vit.preprocess.std)
    )
    picture = (image_chw * std + mean).clamp(0, 1)
    if picture.shape[-1] > _PICTURE_SIDE:
        picture = torch.nn.functional.interpolate(picture[None], _PICTURE_SIDE, mode="area")[0]
    return picture.permute(1, 2, 0)


def _spread_over_classes(labels: Tensor | None, num: int) -> list[int]:
    """Positions of `num` images, of different classes as far as there are any."""
    if labels is None:
        return list(range(num))
    seen: dict[int, int] = {}
    order = []
    for i, label in enumerate(labels.tolist()):
        order.append((seen.get(label, 0), i))
        seen[label] = seen.get(label, 0) + 1
    return sorted(i for _, i in sorted(order)[:num])
