"""One image through a model, plain and perturbed: paths, speeds and predictions, as `raptor explore` shows them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from raptor.data.image_file import FORMATS
from raptor.data.preprocess import as_rgb
from raptor.dynamics.states import angle, unit
from raptor.report.charts import Figure, Series, described
from raptor.report.paper import draw
from raptor.vit.trajectory import perturb
from raptor.vit.view import ViT, recording

_MAX_PIXELS = 50_000_000
_SMALLEST_ANGLE = 1e-8  # a logarithmic axis has no zero


@dataclass
class PerturbedImage:
    """One image through one model, plain and perturbed.

    Attributes:
        path, perturbed_path: the group's mean state on the unit sphere, (L+1, D).
        speed: angle between a token's states at successive layers, averaged over the group, (L,), in radians.
        deviation: angle between a token's plain and perturbed states, averaged over the group, (L+1,), in radians.
        prediction, perturbed_prediction: class and probability, or None without a head.
    """

    path: np.ndarray
    perturbed_path: np.ndarray
    speed: np.ndarray
    deviation: np.ndarray
    prediction: tuple[int, float] | None
    perturbed_prediction: tuple[int, float] | None


def read_image(path: str | Path | None) -> Image.Image:
    """Read a user's image file; raise a ValueError of one line when it is none."""
    if not path:
        raise ValueError("choose an image first")
    try:
        # Pillow starts Ghostscript for an EPS file, whatever the file is called. These formats run nothing.
        with Image.open(path, formats=FORMATS) as image:
            # Before the picture is decoded: a small file may hold one of any size.
            if image.width * image.height > _MAX_PIXELS:
                raise ValueError(
                    f"the image has {image.width}x{image.height} pixels: at most {_MAX_PIXELS:,} are taken"
                )
            image.load()
            return as_rgb(image)
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError):
        raise ValueError(f"{Path(path).name} is not an image this can read") from None


@torch.no_grad()
def perturb_image(vit: ViT, image: Image.Image, layer: int, group: str, eps: float, seed: int = 0) -> PerturbedImage:
    """Follow an image twice, the second time with random noise of `eps` times each token's norm added at `layer`."""
    if not 0 <= layer <= vit.num_layers:
        raise ValueError(f"layer {layer} is not one of 0..{vit.num_layers}")
    pixels = vit.preprocess(image)[None].to(vit.device)
    # On the CPU and from a fixed seed, so that teacher and surrogate get the same noise.
    generator = torch.Generator().manual_seed(seed)

    def change(x_btd: Tensor) -> Tensor:
        noise = torch.randn(x_btd.shape, generator=generator).to(x_btd)
        return eps * x_btd.norm(dim=-1, keepdim=True) * noise / noise.norm(dim=-1, keepdim=True)

    # The model itself runs twice, with hooks: what is shown is what a user's own call would give.
    states, output = vit.record(pixels)
    states = list(states)
    with perturb(vit, layer, change, group), recording(vit) as moved:
        moved_output = vit(pixels)
    where = vit.groups.slice(group)
    plain_ltd, moved_ltd = (torch.stack([x_btd[0, where] for x_btd in s]).float() for s in (states, moved))
    return PerturbedImage(
        path=unit(plain_ltd.mean(1)).cpu().numpy(),
        perturbed_path=unit(moved_ltd.mean(1)).cpu().numpy(),
        speed=angle(plain_ltd[1:], plain_ltd[:-1]).mean(1).cpu().numpy(),
        deviation=angle(plain_ltd, moved_ltd).mean(1).cpu().numpy(),
        prediction=_prediction(vit, output),
        perturbed_prediction=_prediction(vit, moved_output),
    )


def figure_perturbed(results: dict[str, PerturbedImage], layer: int, group: str) -> Any:
    """Three panels: the paths in the plane of the first model's two main directions, the speed, the deviation."""
    first = next(iter(results.values()))
    # One plane for all models, else two paths could not be compared.
    centre = first.path.mean(0)
    plane = np.linalg.svd(first.path - centre, full_matrices=False)[2][:2]
    paths: list[Series] = []
    speeds: list[Series] = []
    deviations: list[Series] = []
    for i, (name, found) in enumerate(results.items()):
        colour = f"palette-{i}"
        x, y = plane @ (found.path - centre).T
        paths.append(Series(name, x, y, colour=colour))
        x, y = plane @ (found.perturbed_path - centre).T
        paths.append(Series(f"{name}, perturbed", x, y, colour=colour, side="null"))
        speeds.append(Series(name, 1, found.speed, colour=colour))
        # Before the perturbation both paths are the same, and a logarithm of 0 has no place.
        after = np.maximum(found.deviation[layer:], _SMALLEST_ANGLE)
        deviations.append(Series(name, layer, after, colour=colour))
    panels = [
        described("perturbed-image-paths", paths, title=f"Path of {group} tokens through depth"),
        described("perturbed-image-speed", speeds),
        described(
            "perturbed-image-deviation",
            deviations,
            title=f"Deviation after a perturbation at layer {layer}",
            mark=layer,
        ),
    ]
    return draw(Figure([panels], size=(4.6, 4.2)))


def _prediction(vit: ViT, output: Tensor) -> tuple[int, float] | None:
    if not vit.num_classes:
        return None
    probability, label = output.float().softmax(-1).max(-1)
    return int(label[0]), float(probability[0])
