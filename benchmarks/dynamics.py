"""Time of the dynamics suite relative to the forward passes it needs, and of batched DMD relative to PyDMD.

    python benchmarks/dynamics.py --only suite --out docs/results/dynamics-suite.json
    python benchmarks/dynamics.py --only dmd --threads 2 --out docs/results/dmd.json

Both sides of a ratio are measured in the same run.

suite: `measure_dynamics` over `--images` noise images, divided by the plain forward pass over the same images plus the
perturbed passes of the suite (the same blocks from the same layers in fp32, without measurements). Also without
stability, divided by only the plain forward pass.

dmd: the same float64 trajectories fitted by `fit_dmd` all at once and by PyDMD in a loop, at the same rank and with the
same number of threads for torch and numpy. `fit_dmd` is timed twice: with modes as weights of the snapshots, as
`fit_dmd` keeps them; and with the modes as (N, D, r) complex numbers, as PyDMD computes them for one trajectory at a
time. The last size is that of the paper's ViT-g: 40 layers of dim 1,536. The eigenvalues of both are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from raptor.data.stream import Batch
from raptor.devices import full_precision
from raptor.dynamics import Stability, fit_dmd
from raptor.dynamics.measure import STABILITY_BATCH, measure_dynamics
from raptor.dynamics.states import measured_groups
from raptor.vit.open import open_vit
from raptor.vit.trajectory import autocast
from raptor.vit.view import ViT

SIZES = ((384, 12), (768, 12), (1536, 40))  # dim and number of layers of the trajectories


class Repeated:
    """`num_images` noise images in batches. Two buffers are used in turn, so that only the model is measured."""

    def __init__(self, num_images: int, batch: int, size: int, device: str, num_classes: int = 10):
        self.sizes = [min(batch, num_images - start) for start in range(0, num_images, batch)]
        self.buffers = [torch.randn(batch, 3, size, size, device=device) for _ in range(2)]
        self.num_classes = num_classes

    def __iter__(self) -> Iterator[Batch]:
        for i, num in enumerate(self.sizes):
            labels = torch.arange(num) % self.num_classes  # on the host, as data keeps them
            yield Batch(self.buffers[i % 2][:num], labels, torch.arange(num))


def seconds(function: Callable[[], Any], device: str) -> float:
    _sync(device)
    start = time.monotonic()
    function()
    _sync(device)
    return time.monotonic() - start


def _sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def bare_pass(vit: ViT, batches: Repeated, precision: str) -> None:
    with torch.no_grad(), autocast(precision, vit.device):
        for batch in batches:
            vit(batch.images)


def perturbation_passes(vit: ViT, images: torch.Tensor) -> int:
    """What stability has to run on `images`: clean, once more for the noise floor, and from every layer; blocks run."""
    stability = Stability(vit.groups)
    num_paths = len(stability.eps) * len(measured_groups(vit.groups))
    num_blocks = 0
    with full_precision(vit.device):
        for i, some in enumerate(images.split(STABILITY_BATCH)):
            a_0, context = vit.embed(some)
            states = vit.unroll(a_0, context)
            for start in [0] * (i == 0) + [layer for layer in range(vit.num_layers) for _ in range(num_paths)]:
                vit.unroll(states[start], context, start=start)
                num_blocks += vit.num_layers - start
    return num_blocks


def measure_suite(args: argparse.Namespace) -> dict[str, Any]:
    device = args.device
    precision = "bf16" if args.device == "cuda" else "fp32"
    vit = open_vit(args.model, pretrained=False, num_classes=0, device=device)
    size = vit.preprocess.size
    num = args.images
    batches = Repeated(num, args.batch, size, device)

    def suite(stability_images: int) -> None:
        measure_dynamics(
            vit,
            batches,
            num_images=num,
            classes=range(5),
            stability_images=stability_images,
            precision=precision,
            rank_images=min(64, num),
        )

    images = torch.cat([b.images for b in Repeated(args.stability_images, args.batch, size, device)])
    num_blocks = perturbation_passes(vit, images)  # also warms up
    bare_pass(vit, batches, precision)
    suite(0)
    result: dict[str, Any] = {"model": args.model, "precision": precision, "images": num, "batch": args.batch}
    times: dict[str, list[float]] = {}
    runs: dict[str, Callable[[], Any]] = {
        "bare": lambda: bare_pass(vit, batches, precision),
        "perturbations": lambda: perturbation_passes(vit, images),
        "suite_without_stability": lambda: suite(0),
        "suite": lambda: suite(args.stability_images),
    }
    for _ in range(args.repeats):
        for name, function in runs.items():
            times.setdefault(name, []).append(seconds(function, device))
    median = {name: statistics.median(values) for name, values in times.items()}
    return result | {
        "stability_images": args.stability_images,
        "perturbation_passes_per_image": Stability(vit.groups).count_block_calls(vit.num_layers) / vit.num_layers,
        "perturbation_blocks_run": num_blocks,
        "seconds": median,
        "ratio_to_bare_plus_perturbations": median["suite"] / (median["bare"] + median["perturbations"]),
        "ratio_without_stability_to_bare": median["suite_without_stability"] / median["bare"],
    }


def trajectories(num: int, dim: int, num_steps: int = 12, seed: int = 0) -> torch.Tensor:
    """Smooth unit-norm paths with a spectrum like a ViT's: a slow turn plus updates that shrink with depth."""
    generator = torch.Generator().manual_seed(seed)
    updates = torch.randn(num, num_steps + 1, dim, generator=generator, dtype=torch.float64)
    updates *= 0.9 ** torch.arange(num_steps + 1)[:, None]
    x_nld = updates.cumsum(1)
    return x_nld / x_nld.norm(dim=-1, keepdim=True)


def pydmd_loop(x_nld: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues `(N, r)` and mode norms of PyDMD's exact DMD, one trajectory after the other."""
    from pydmd import DMD

    eigenvalues = []
    norms = []
    for x_ld in x_nld:
        dmd = DMD(svd_rank=rank, exact=True)
        dmd.fit(x_ld.T)
        eigenvalues.append(dmd.eigs)
        norms.append(np.linalg.norm(dmd.modes, axis=0))
    return np.array(eigenvalues), np.array(norms)


def largest_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest distance between two spectra, each eigenvalue to the nearest of the other."""
    distance = np.abs(ours[:, :, None] - theirs[:, None, :])
    return float(max(distance.min(1).max(), distance.min(2).max()))


def measure_dmd(args: argparse.Namespace, dim: int, num_steps: int) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    x_nld = trajectories(args.trajectories, dim, num_steps)
    x = x_nld.numpy()
    fits: dict[str, Any] = {}

    def theirs() -> None:
        fits["theirs"] = pydmd_loop(x, args.rank)

    def modes() -> None:
        fits["ours"] = fit_dmd(x_nld, args.rank)

    def modes_written_out() -> None:
        fit_dmd(x_nld, args.rank).modes(x_nld)

    ours = (modes, modes_written_out)
    for warm in ours:
        warm()
    pydmd_loop(x[:5], args.rank)
    times = [[seconds(f, "cpu") for f in (theirs, *ours)] for _ in range(args.repeats)]
    loop, *batched = (min(column) for column in zip(*times))  # best of, as each is short
    difference = largest_difference(fits["ours"].eigenvalues, fits["theirs"][0])
    assert difference < 1e-8, f"eigenvalues differ by {difference}"
    names = [f.__name__ for f in ours]
    return {
        "dim": dim,
        "layers": num_steps,
        "rank": args.rank,
        "trajectories": args.trajectories,
        "pydmd_ms_each": 1e3 * loop / len(x),
        "ours_ms_each": {name: 1e3 * one / len(x) for name, one in zip(names, batched)},
        "speedup": {name: loop / one for name, one in zip(names, batched)},
        "largest_eigenvalue_difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=None)
    parser.add_argument("--only", choices=("suite", "dmd"), default=None)
    parser.add_argument("--model", default="timm/vit_small_patch14_reg4_dinov2")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--stability-images", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trajectories", type=int, default=2000)
    parser.add_argument("--rank", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    threadpool_limits(args.threads, user_api="blas")  # numpy's BLAS, which PyDMD uses
    device = "cpu"
    if args.device == "cuda":
        device = torch.cuda.get_device_name()
    result: dict[str, Any] = {"device": device, "torch": torch.__version__, "threads": args.threads}
    if args.only != "dmd":
        result["suite"] = measure_suite(args)
    if args.only != "suite":
        result["dmd"] = [measure_dmd(args, *size) for size in SIZES]
    print(json.dumps(result, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
