"""What `raptor explore` shows for one image: paths, speeds and predictions of teacher and surrogate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from raptor.dynamics.angles import angle
from raptor.report.style import use_style
from raptor.trajectory import perturb
from raptor.vit import ViT, recording

MAX_PIXELS = 50_000_000


@dataclass
class Explored:
    """One image through one model, plain and perturbed.

    Attributes:
        path, perturbed_path: the group's mean state on the unit sphere, (L+1, D).
        speed: angle between the group's mean states at successive layers, (L,), in radians.
        deviation: angle between plain and perturbed state at each layer, (L+1,), in radians.
        prediction, perturbed_prediction: class and probability, or None without a head.
    """

    path: np.ndarray
    perturbed_path: np.ndarray
    speed: np.ndarray
    deviation: np.ndarray
    prediction: tuple[int, float] | None
    perturbed_prediction: tuple[int, float] | None


def read_image(path: str | Path | None) -> Image.Image:
    """A user's file as an image; anything else is one clear line."""
    if not path:
        raise ValueError("choose an image first")
    try:
        with Image.open(path) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"the image has {image.width}x{image.height} pixels: at most {MAX_PIXELS:,} are taken")
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError):
        raise ValueError(f"{Path(path).name} is not an image this can read") from None


@torch.no_grad()
def explore_image(vit: ViT, image: Image.Image, layer: int, group: str, eps: float, seed: int = 0) -> Explored:
    """Follow one image, and again with a random perturbation of `eps` times each token's norm added at `layer`."""
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
    plain, other = (_path(s, vit, group) for s in (states, moved))
    return Explored(
        path=plain.cpu().numpy(),
        perturbed_path=other.cpu().numpy(),
        speed=angle(plain[1:], plain[:-1]).cpu().numpy(),
        deviation=angle(plain, other).cpu().numpy(),
        prediction=_prediction(vit, output),
        perturbed_prediction=_prediction(vit, moved_output),
    )


def figure_explored(results: dict[str, Explored], layer: int, group: str) -> Any:
    """Three panels: the paths in the plane of the teacher's two main directions, the speed, the deviation."""
    from raptor.report.style import PALETTE

    plt = use_style()
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8))
    first = next(iter(results.values()))
    centre = first.path.mean(0)
    plane = np.linalg.svd(first.path - centre, full_matrices=False)[2][:2]
    for (name, found), colour in zip(results.items(), PALETTE):
        for path, style, label in ((found.path, "-", name), (found.perturbed_path, ":", f"{name}, perturbed")):
            xy = (path - centre) @ plane.T
            axes[0].plot(xy[:, 0], xy[:, 1], style, color=colour, label=label, marker=".", markersize=4)
        axes[1].plot(np.arange(1, len(found.speed) + 1), found.speed, color=colour, label=name)
        axes[2].semilogy(np.arange(len(found.deviation)), np.maximum(found.deviation, 1e-8), color=colour, label=name)
    axes[0].set(title=f"path of {group} through depth", xlabel="first direction", ylabel="second direction")
    axes[1].set(title="angular speed", xlabel="layer", ylabel="radians a layer")
    axes[2].set(title=f"deviation after a perturbation at layer {layer}", xlabel="layer", ylabel="radians")
    axes[2].axvline(layer, color="0.6", linestyle=":")
    axes[0].legend()
    axes[1].legend()
    return figure


def _path(states: list[Tensor], vit: ViT, group: str) -> Tensor:
    where = vit.groups.slice(group)
    mean_ld = torch.stack([x_btd[0, where].float().mean(0) for x_btd in states])
    return mean_ld / mean_ld.norm(dim=-1, keepdim=True)


def _prediction(vit: ViT, output: Tensor) -> tuple[int, float] | None:
    if not vit.num_classes:
        return None
    probability, label = output.float().softmax(-1).max(-1)
    return int(label[0]), float(probability[0])
