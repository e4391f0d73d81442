"""Speed of one distillation step: Raptor's against the step as published, in the same run, on one GPU.

    python benchmarks/distill_step.py --out docs/results/distill_step.json

ViT-B/14-reg shape (261 tokens, dim 768), k = 2, stage 2, the paper's block on both sides, images already on the GPU.
The step as published: fp32, nn.MultiheadAttention returning weights, plain AdamW, its targets given for free. Ours runs
the teacher in the same step. TFLOP/s counts teacher forward + 3 x student forward, matrix products only; what
activation checkpointing computes again is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from raptor.phases.cut import Phases
from raptor.surrogate.surrogate import make_surrogate
from raptor.train.graphs import GraphedStep
from raptor.train.losses import Targets, token_weights
from raptor.train.step import DistillStep, Parts
from raptor.vit.open import open_vit

PHASES = (7, 5)
WEIGHTS = {"cls": 0.45, "registers": 0.10, "patches": 0.45}


class PublishedBlock(nn.Module):
    """The paper's block the way its formula reads: attention that returns its weights, no fused kernels."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, num_heads, batch_first=True)
        self.wi = nn.Linear(dim, 8 * dim)
        self.wo = nn.Linear(4 * dim, dim)
        self.g1 = nn.Parameter(torch.full((dim,), 1e-5))
        self.g2 = nn.Parameter(torch.full((dim,), 1e-5))
        self.depth = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 3 * dim))

    def forward(self, x: Tensor, layer: Tensor) -> Tensor:
        t1, t2, t3 = (self.depth(layer.view(1, 1)) + 1).chunk(3, dim=-1)
        y = self.norm1(x)
        x = x + t1 * self.g1 * self.attn(y, y, y, need_weights=True)[0]
        p, q = self.wi(self.norm2(x)).chunk(2, dim=-1)
        return t3 * (x + t2 * self.g2 * self.wo(F.silu(p) * q))


def published_step(dim: int, num_heads: int, num_layers: int, num_tokens: int, batch: int) -> Callable[[], None]:
    blocks = nn.ModuleList(PublishedBlock(dim, num_heads) for _ in PHASES).cuda()
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-4, weight_decay=1e-4)
    states = [torch.randn(batch, num_tokens, dim, device="cuda") for _ in range(num_layers + 1)]
    depths = torch.arange(1.0, num_layers + 1, device="cuda")
    parts = (slice(0, 1), slice(1, 5), slice(5, num_tokens))

    def step() -> None:
        x = states[0]
        loss = torch.zeros((), device="cuda")
        for layer in range(num_layers):
            x = blocks[int(layer >= PHASES[0])](x, depths[layer])
            errors = [F.mse_loss(x[:, part], states[layer + 1][:, part]) for part in parts]
            loss = loss + torch.stack([w * e for w, e in zip(WEIGHTS.values(), errors)]).sum() / num_layers
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(blocks.parameters(), 1.0)
        optimizer.step()

    return step


def raptor_step(name: str, batch: int, checkpointing: bool = False) -> tuple[Callable[[], None], float]:
    """Our step and the floating-point operations it has to do."""
    teacher = open_vit(f"timm/{name}", pretrained=False, num_classes=0, device="cuda")
    student = make_surrogate(teacher, PHASES, block="paper", conditioning="mlp")
    variance = torch.ones(teacher.num_layers, teacher.groups.num_tokens)
    phases = Phases.from_lengths(PHASES)
    targets = Targets.of(teacher, phases, variance, last_phase_weights=WEIGHTS, stage2_weights=WEIGHTS)
    module = DistillStep(teacher, student, targets, compile_blocks=True, checkpointing=checkpointing, half_teacher=True)
    assert torch.allclose(token_weights(teacher.groups, WEIGHTS).sum(), torch.tensor(1.0))
    optimizer = torch.optim.AdamW([p for _, p in module.trained_parameters()], lr=1e-4, weight_decay=1e-4, fused=True)
    size = teacher.preprocess.size
    images = [torch.randn(batch, 3, size, size, device="cuda") for _ in range(2)]
    turn = iter(range(10**9))
    graph = GraphedStep(module, "stage2", images[0], Parts(True, False), precision="bf16")

    def step() -> None:
        graph(images[next(turn) % 2], 0.0)
        for parameters in module.clip_groups("stage2"):
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    d = teacher.dim
    t = teacher.groups.num_tokens
    layers = teacher.num_layers
    attention = 4 * t * t * d
    forward_teacher = layers * (2 * t * 12 * d * d + attention)
    forward_student = layers * (2 * t * 16 * d * d + attention)
    return step, batch * float(forward_teacher + 3 * forward_student)


def measure(step: Callable[[], None], batch: int, seconds: float) -> dict[str, float]:
    """Median seconds per step over about `seconds` of running, images/s and peak memory since its last reset."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    times = []
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        first = time.monotonic()
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        times.append((time.monotonic() - first) / 5)
    median = statistics.median(times)
    return {"seconds": median, "images_per_s": batch / median, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def kernels(step: Callable[[], None], num: int = 30) -> list[dict[str, Any]]:
    """The slowest kernels of one step: name, milliseconds and number of calls."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)
    total = {"name": "all", "ms": sum(row.device_time_total for row in rows) / 1e3, "calls": sum(r.count for r in rows)}
    return [total] + [{"name": r.key[:80], "ms": r.device_time_total / 1e3, "calls": r.count} for r in rows[:num]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=None)
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds per measurement")
    parser.add_argument("--profile", action="store_true", help="also the kernels of each of our steps")
    parser.add_argument("--batches", type=int, nargs="*", default=[64, 256], help="batch sizes of our step")
    parser.add_argument("--no_checkpointing", action="store_true", help="leave the step with checkpointing out")
    parser.add_argument("--model", default="vit_base_patch14_reg4_dinov2")
    args = parser.parse_args()
    shape: Any = timm.create_model(args.model, num_classes=0)
    dim = shape.embed_dim
    heads = shape.blocks[0].attn.num_heads
    layers = len(shape.blocks)
    tokens = (224 // shape.patch_embed.patch_size[0]) ** 2 + shape.num_prefix_tokens
    rows: dict[str, dict[str, Any]] = {}
    ours = [(f"raptor, batch {batch}", batch, False) for batch in args.batches]
    if not args.no_checkpointing:
        ours.append(("raptor, batch 256, checkpointing", 256, True))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {tokens} tokens, dim {dim}, {layers} blocks")
    print(f"{'step':36}{'images/s':>10}{'ratio':>8}{'TFLOP/s':>9}{'peak GiB':>10}")
    torch.cuda.reset_peak_memory_stats()
    published = measure(published_step(dim, heads, layers, tokens, 64), 64, args.seconds)
    rows["as published, batch 64"] = published
    report(rows, published, args.out)
    torch.cuda.empty_cache()
    for label, batch, again in ours:
        torch.cuda.reset_peak_memory_stats()
        step, flops = raptor_step(args.model, batch, again)
        rows[label] = measure(step, batch, args.seconds)
        rows[label]["tflops"] = flops / rows[label]["seconds"] / 1e12
        if args.profile:
            rows[label]["kernels"] = kernels(step)
        report(rows, published, args.out)
        del step
        torch.cuda.empty_cache()


def report(rows: dict[str, dict[str, Any]], published: dict[str, float], out: str | None) -> None:
    """Print the newest row, and write the file with all of them: a machine may be taken back at any time."""
    label, row = list(rows.items())[-1]
    row["ratio"] = row["images_per_s"] / published["images_per_s"]
    tflops = ""
    if "tflops" in row:
        tflops = f"{row['tflops']:.0f}"
    line = f"{label:36}{row['images_per_s']:10.0f}{row['ratio']:8.1f}{tflops:>9}{row['peak_gib']:10.1f}"
    print(line, flush=True)
    if out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        Path(out).write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
