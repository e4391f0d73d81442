"""Time of each optimizer's own part of a training step, and the share of a step that Muon adds, in one process.

    python benchmarks/optimizers.py --out docs/results/optimizers.json
    python benchmarks/optimizers.py --model timm/vit_small_patch14_reg4_dinov2 --data DATA --phases 7 3 2 --device cuda

The optimizers take turns on the blocks of one surrogate with random gradients; a step of stage 2 with AdamW is what a
dry run measures. Medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from raptor.devices import device_name
from raptor.phases.cut import Phases
from raptor.surrogate.surrogate import make_surrogate, shared_blocks
from raptor.train import distill
from raptor.train.optimizer import OPTIMIZERS, ParameterGroup, is_matrix, make_optimizers
from raptor.train.plan import Plan
from raptor.vit.open import open_vit


def optimizer_seconds(
    model: str, opening: dict[str, Any], phases: list[int], device: str, rounds: int
) -> dict[str, float]:
    """Of one call of each optimizer on the blocks of a surrogate."""
    blocks = shared_blocks(make_surrogate(open_vit(model, **opening), Phases.from_lengths(phases))).to(device)
    for parameter in blocks.parameters():
        parameter.grad = torch.randn_like(parameter)
    seconds: dict[str, list[float]] = {name: [] for name in OPTIMIZERS}
    made = {name: _made(name, blocks, device) for name in OPTIMIZERS}
    for _ in range(rounds + 1):
        for name, optimizers in made.items():
            began = _now(device)
            for optimizer in optimizers:
                optimizer.step()
            seconds[name].append(_now(device) - began)
    return {name: median(found[1:]) for name, found in seconds.items()}


def _made(name: str, blocks: torch.nn.Module, device: str) -> list[torch.optim.Optimizer]:
    named = list(blocks.named_parameters())
    taken = [(n, p) for n, p in named if name == "muon" and is_matrix(n, p)]
    others = [(n, p) for n, p in named if not (name == "muon" and is_matrix(n, p))]
    groups = [ParameterGroup(taken, 0.0, "muon"), ParameterGroup(others, 0.0)]
    return make_optimizers(groups, 1e-6, (0.9, 0.999), fused=device == "cuda")


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def step_seconds(batch_size: int, rounds: int, **options: Any) -> float:
    """Of a step of stage 2 with AdamW."""
    with tempfile.TemporaryDirectory() as out:
        settings = dict(recipe="adamw", batch_size=batch_size, stage1_share=0.0, budget="64steps", out=f"{out}/run")
        plans = [distill(dry_run=True, **settings, **options) for _ in range(rounds)]  # type: ignore[arg-type]
    return median(plan.parts[-1].seconds for plan in plans if isinstance(plan, Plan))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="scenes")
    parser.add_argument("--data", default="scenes")
    parser.add_argument("--phases", type=int, nargs="+", default=[3, 3, 6])
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    opening: dict[str, Any] = {} if args.model == "scenes" else {"pretrained": False}
    options = dict(
        model=args.model, data=args.data, phases=args.phases, device=args.device, train_images=512, **opening
    )
    own = optimizer_seconds(args.model, opening, args.phases, args.device, 20 * args.rounds)
    batches = []
    for size in args.batch_sizes:
        step = step_seconds(size, args.rounds, num_images=64, **options)
        batches.append({"batch_size": size, "step": step, "added": (own["muon"] - own["adamw"]) / step})
    result = {
        "command": " ".join(["python benchmarks/optimizers.py", *sys.argv[1:]]),
        "device": device_name(torch.device(args.device)),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "optimizer_seconds": own,
        "batches": batches,
    }
    print(json.dumps(result, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
