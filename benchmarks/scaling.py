"""How the cost of each command grows with images, layers, tokens and width: two sizes each, against the cost model.

    python benchmarks/scaling.py --out docs/results/scaling.json --figure docs/images/scaling.png

CPU seconds of the process on one thread, the least of three runs, so that other work on the machine does not count. A
random ViT; images are decoded before. `measured` and `predicted` are exponents: log(cost ratio) / log(size ratio).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import timm
import torch

from raptor import open_vit
from raptor.certificate.measure import certify
from raptor.data import InMemory, iterate, open_data
from raptor.dynamics import measure_dynamics
from raptor.phases.cut import Phases
from raptor.phases.similarity import measure_similarity
from raptor.probes import grid
from raptor.probes.classify import Classify
from raptor.probes.grid import grid_around, step_seconds
from raptor.probes.protocol import DEFAULTS
from raptor.surrogate.surrogate import make_surrogate
from raptor.train import distill, stage
from raptor.train.plan import Plan
from raptor.vit.trajectory import Trajectories
from raptor.vit.view import ViT

PATCH = 8
BATCH = 16
HEAD_DIM = 64
CLASSES = 20
RATES = 12
STABILITY = 2
TARGETS = 3
EPS = 1  # perturbed images; what is perturbed: all, cls, patches; sizes


class Size(NamedTuple):
    """images N, layers L, tokens T (cls and patches), width D."""

    images: int = 32
    layers: int = 6
    tokens: int = 65
    width: int = 192


AXES = {
    "images": Size(images=128),
    "layers": Size(layers=12),
    "tokens": Size(tokens=257),
    "width": Size(width=384),
}


def forward(s: Size) -> float:
    """FLOPs of a forward pass per image."""
    return s.layers * s.tokens * (24 * s.width**2 + 4 * s.tokens * s.width) + 6 * PATCH**2 * s.width * (s.tokens - 1)


def phases_cost(s: Size) -> float:
    """Every image: a forward pass, and the Gram matrix of its L states at every token."""
    return s.images * (forward(s) + 2 * s.layers**2 * s.tokens * s.width)


def distill_cost(s: Size) -> float:
    """Every image of a step: the teacher's forward pass, the student's, and its backward pass, which is two."""
    return s.images * 4 * forward(s)


def evaluate_cost(s: Size) -> float:
    """Every image: teacher and surrogate, the tied null model, and the teacher once more to fit the nulls."""
    return s.images * 4 * forward(s)


def probe_cost(s: Size) -> float:
    """Every image of a step: a forward pass, and twelve heads on 2 D features, forward and backward."""
    return s.images * (forward(s) + 6 * RATES * CLASSES * 2 * s.width)


def dynamics_cost(s: Size) -> float:
    """Every image: a forward pass; if perturbed at every layer, the blocks behind it for each target and size."""
    passes = STABILITY * TARGETS * EPS * (s.layers + 1) / 2
    return (s.images + passes) * forward(s)


COSTS = {
    f.__name__.removesuffix("_cost"): f for f in (phases_cost, distill_cost, evaluate_cost, probe_cost, dynamics_cost)
}


def make_vit(size: Size) -> ViT:
    torch.manual_seed(0)
    side = PATCH * math.isqrt(size.tokens - 1)
    shape: dict[str, Any] = dict(
        img_size=side, patch_size=PATCH, embed_dim=size.width, depth=size.layers, num_heads=size.width // HEAD_DIM
    )
    return open_vit(timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, **shape), size=side)


def images_for(vit: ViT, num: int) -> tuple[InMemory, InMemory]:
    """Training and held-out images, decoded."""
    parts = [open_data("scenes", split, limit=num, size=vit.preprocess.size) for split in ("train", "val")]
    train, val = (InMemory(part, vit.preprocess, "cpu") for part in parts)
    return train, val


def seconds(work: Callable[[], object]) -> float:
    """The least CPU seconds of three runs."""
    spent = []
    for _ in range(3):
        began = time.process_time()
        work()
        spent.append(time.process_time() - began)
    return min(spent)


def measure(command: str, size: Size) -> float:
    """CPU seconds of `command` over `size.images` images; of a training or a probe, of steps over so many."""
    vit = make_vit(size)
    train, val = images_for(vit, size.images)
    held_out = iterate(val, vit.preprocess, BATCH)
    phases = Phases((size.layers // 2, size.layers - size.layers // 2))
    if command == "phases":
        return seconds(lambda: measure_similarity(Trajectories(vit, held_out), size.layers, vit.groups))
    if command == "evaluate":
        surrogate = make_surrogate(vit, phases)
        fitting = iterate(train, vit.preprocess, BATCH)
        return seconds(lambda: certify(surrogate, vit, held_out, bootstrap=0, train_batches=fitting))
    if command == "dynamics":
        options: dict[str, Any] = dict(num_images=size.images, stability_images=STABILITY, rank_images=2, eps=(1e-2,))
        return seconds(lambda: measure_dynamics(vit, held_out, **options))
    step = probe_step
    if command == "distill":
        step = partial(distill_step, phases=phases)
    return min(step(vit, train, val) for _ in range(3)) * size.images / BATCH


def distill_step(vit: ViT, train: InMemory, val: InMemory, phases: Phases) -> float:
    """Seconds of a step of stage 2."""
    options: dict[str, Any] = dict(stage1_share=0.0, budget="1steps", batch_size=BATCH, device="cpu")
    plan = distill(vit, (train, val), phases=phases, dry_run=True, **options)
    assert isinstance(plan, Plan)
    return plan.parts[0].seconds


def probe_step(vit: ViT, train: InMemory, val: InMemory) -> float:
    """Seconds of a step in which the heads of all learning rates are trained."""
    made = Classify(vit, vit.num_layers, train, val, batch_size=BATCH, precision="fp32")
    return step_seconds(made, grid_around(DEFAULTS["classify"].lr))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=None)
    parser.add_argument("--figure", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    stage._clock = lambda device: time.process_time()  # type: ignore[attr-defined]
    grid.time = SimpleNamespace(monotonic=time.process_time)  # type: ignore
    rows = []
    for command, cost in COSTS.items():
        small = Size()
        before = measure(command, small)
        for axis, large in AXES.items():
            after = measure(command, large)
            step = math.log(getattr(large, axis) / getattr(small, axis))
            rows.append(
                {
                    "command": command,
                    "axis": axis,
                    "sizes": [getattr(small, axis), getattr(large, axis)],
                    "cpu_seconds": [round(before, 4), round(after, 4)],
                    "measured": round(math.log(after / before) / step, 3),
                    "predicted": round(math.log(cost(large) / cost(small)) / step, 3),
                }
            )
            print(rows[-1], flush=True)
    command = f"python benchmarks/scaling.py --out {args.out} --figure {args.figure}"
    result = {"command": command, "torch": torch.__version__, "base": Size()._asdict(), "rows": rows}
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    if args.figure:
        draw(result, Path(args.figure))


def draw(result: dict[str, Any], path: Path) -> None:
    """CPU seconds per command against each size, log-log; lines from the cost model through the smaller size."""
    from raptor.report.style import use_style

    plt = use_style()
    figure, axes = plt.subplots(1, 4, figsize=(9.6, 2.9), sharey=True, layout="constrained")
    for axis, panel in zip(AXES, axes):
        for i, command in enumerate(COSTS):
            row = next(r for r in result["rows"] if (r["command"], r["axis"]) == (command, axis))
            low, high = row["sizes"]
            predicted = row["cpu_seconds"][0] * (high / low) ** row["predicted"]
            panel.plot(row["sizes"], [row["cpu_seconds"][0], predicted], color=f"C{i}", linewidth=1, alpha=0.6)
            panel.plot(row["sizes"], row["cpu_seconds"], "o", color=f"C{i}", label=command, markersize=4)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(row["sizes"], [str(value) for value in row["sizes"]])
        panel.set_xlabel(axis)
    axes[0].set_ylabel("CPU seconds")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
