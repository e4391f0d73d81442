"""One image through a model, plain and perturbed: paths, speeds and predictions, as `raptor explore` shows them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from raptor.data.images import FORMATS
from raptor.data.preprocess import as_rgb
from raptor.dynamics.states import angle, unit
from raptor.vit.trajectory import perturb
from raptor.vit.view import ViT, recording

_MAX_PIXELS = 50_000_000


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
        with Image.open(path, formats=FORMATS) as image:
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
    generator = torch.Generator().manual_seed(seed)

    def change(x_btd: Tensor) -> Tensor:
        noise = torch.randn(x_btd.shape, generator=generator).to(x_btd)
        return eps * x_btd.norm(dim=-1, keepdim=True) * noise / noise.norm(dim=-1, keepdim=True)

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
    """Three panels: the paths in the plane of the teacher's two main directions, the speed, the deviation."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from raptor.report.style import STYLE

    large = {"font.size": 11, "axes.titlesize": 12, "legend.fontsize": 10}
    with rc_context(STYLE | large):  # type: ignore[arg-type]
        # pyplot would keep every figure for as long as the page is served
        figure = Figure(figsize=(12, 7.5), layout="constrained")
        panels = figure.subplot_mosaic([["path", "speed"], ["path", "deviation"]])
        _draw(list(panels.values()), results, layer, group)
    return figure


def _draw(axes: Any, results: dict[str, PerturbedImage], layer: int, group: str) -> None:
    from raptor.report.style import PALETTE

    first = next(iter(results.values()))
    centre = first.path.mean(0)
    plane = np.linalg.svd(first.path - centre, full_matrices=False)[2][:2]
    for (name, found), colour in zip(results.items(), PALETTE):
        for path, style, label in ((found.path, "-", name), (found.perturbed_path, ":", f"{name}, perturbed")):
            xy = (path - centre) @ plane.T
            axes[0].plot(xy[:, 0], xy[:, 1], style, color=colour, label=label, marker=".", markersize=4)
        axes[1].plot(np.arange(1, len(found.speed) + 1), found.speed, color=colour, label=name)
        after = np.arange(layer, len(found.deviation))
        axes[2].semilogy(after, np.maximum(found.deviation[layer:], 1e-8), color=colour, marker=".", label=name)
    axes[0].set(title=f"path of {group} tokens through depth", xlabel="first direction", ylabel="second direction")
    axes[1].set(title="angular speed", xlabel="layer", ylabel="radians per layer")
    axes[2].set(title=f"deviation after a perturbation at layer {layer}", xlabel="layer", ylabel="radians")
    for panel in axes[1:]:
        panel.set_xlim(0, len(first.deviation) - 1)
    axes[2].axvline(layer, color="0.6", linestyle=":")
    axes[0].legend(loc="best")
    axes[1].legend()


def _prediction(vit: ViT, output: Tensor) -> tuple[int, float] | None:
    if not vit.num_classes:
        return None
    probability, label = output.float().softmax(-1).max(-1)
    return int(label[0]), float(probability[0])
