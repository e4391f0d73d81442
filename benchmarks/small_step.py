"""Speed of one distillation step of a small ViT with the default recipe, variant by variant, in one process on one GPU.

    python benchmarks/small_step.py --out docs/results/small_step

DINOv2-S/14-reg shape (261 tokens, dim 384), random weights, the teacher's block with a table, bf16, the step as a CUDA
graph, images already on the GPU, clipping and AdamW included. The variants are made one after the other, then measured
in turn for several rounds: images/s are from the median round. Each says how far its gradient is from that of the same
step in fp32. `--out` is a folder: `small_step.json` is written again after each variant, and `kernels-*.txt` are the
slowest kernels of the first variant and of the fastest of its batch. A variant that fails leaves its error and the
others go on; none is begun after `--limit` seconds, and measuring takes about 25 more. A switch takes functions out of
the product while a variant is made.

`--device cpu` runs the same on a tiny model, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from raptor.phases.cut import Phases
from raptor.surrogate.block import fast_switched
from raptor.surrogate.fast import attend
from raptor.surrogate.kernels import attention
from raptor.surrogate.surrogate import make_surrogate
from raptor.train import frozen
from raptor.train.graphs import GraphedStep
from raptor.train.losses import Targets
from raptor.train.step import DistillStep, Parts
from raptor.vit.open import open_vit
from raptor.vit.view import ViT

STARTED = time.monotonic()
WEIGHTS = {"cls": 0.45, "registers": 0.10, "patches": 0.45}
SWITCHES: dict[str, tuple[Any, str, Any]] = {  # name: module, its function, and what replaces that
    "own teacher": (frozen, "frozen_blocks", lambda teacher: []),  # its blocks run as they are
    "torch attention": (attention, "takes_kernel", lambda *_: False),
}
PRODUCT = {name: getattr(module, function) for name, (module, function, _) in SWITCHES.items()}
TILES = {  # of our attention kernels
    "FORWARD": [(128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2)],
    "BACKWARD": [(128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2), (64, 32, 4, 2)],
}


@dataclass
class Variant:
    """One step to be measured."""

    name: str
    on: tuple[str, ...] = ()
    stage: str = "stage2"
    lam: float = 0.0
    phases: tuple[int, ...] = (7, 5)
    batch: int = 128
    adapters: int = 0


VARIANTS = [
    Variant("stage 2"),
    Variant("stage 2, copies", ("copies",)),
    Variant("stage 1 forced", (), "stage1", 0.5),
    Variant("stage 1 forced, copies", ("copies",), "stage1", 0.5),
    Variant("stage 2, torch attention", ("torch attention",)),
    Variant("stage 2, own teacher", ("own teacher",)),
    Variant("stage 1", (), "stage1"),
    Variant("stage 2, k=3", phases=(7, 3, 2)),
    Variant("stage 2, batch 256", batch=256),
    Variant("stage 2, adapters", adapters=16),
]


def say(text: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s  {text}", flush=True)


@contextmanager
def switched(variant: Variant) -> Iterator[None]:
    """Inside the context the variant's switches are on, the others off."""
    for name, (module, function, replacement) in SWITCHES.items():
        setattr(module, function, replacement if name in variant.on else PRODUCT[name])
    with fast_switched("copies" not in variant.on):  # with copies no block folds, of teacher or student
        yield


class Eager:
    """The step without a graph, for a CPU."""

    def __init__(self, module: DistillStep, stage: str, _images: Tensor, parts: Parts, precision: str):
        self.module = module
        self.stage = stage
        self.parts = parts
        self.precision = precision

    def __call__(self, images: Tensor, lam: float) -> Tensor:
        self.module.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            loss, layer_losses = self.module(images, self.stage, torch.tensor(lam, device=images.device), self.parts)
        loss.backward()
        return layer_losses.detach()


class Bench:
    """The teacher, its images, and a step for each variant."""

    def __init__(self, device: str):
        self.device = device
        torch.manual_seed(0)
        tiny = {} if device == "cuda" else {"embed_dim": 48, "num_heads": 3, "size": 28}
        name = "timm/vit_small_patch14_reg4_dinov2"
        self.teacher: ViT = open_vit(name, pretrained=False, num_classes=0, device=device, **tiny)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter_name, parameter in self.teacher.model.named_parameters():
                if parameter_name.endswith("gamma"):  # at 1e-5, as they begin, blocks do nothing
                    parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.1)
        size = self.teacher.preprocess.size
        self.base = 4
        if device == "cuda":
            self.base = 128
        self.images = torch.randn(2 * self.base, 3, size, size, generator=generator).to(device)
        self.exact: dict[tuple[Any, ...], Tensor] = {}

    def module(self, variant: Variant, compiled: bool) -> DistillStep:
        student = make_surrogate(self.teacher, variant.phases, adapters=variant.adapters)
        variance = torch.ones(self.teacher.num_layers, self.teacher.groups.num_tokens)
        phases = Phases.from_lengths(variant.phases)
        targets = Targets.of(self.teacher, phases, variance, stage1_weights=WEIGHTS, last_phase_weights=WEIGHTS)
        return DistillStep(self.teacher, student, targets, compile_blocks=compiled, half_teacher=compiled)

    def gradient(self, variant: Variant) -> Tensor:
        """Of the step in fp32 with every switch off, all parameters in one vector."""
        key = (variant.stage, variant.lam, variant.phases, variant.adapters)
        if key not in self.exact:
            plain = replace(variant, on=(), batch=128)
            with switched(plain):
                module = self.module(plain, compiled=False)
                Eager(module, plain.stage, self.images, Parts.of(plain.lam), "fp32")(
                    self.images[: self.base], plain.lam
                )
            self.exact[key] = gradient_of(module)
        return self.exact[key]

    def make(self, variant: Variant) -> tuple[Callable[[], None], dict[str, Any]]:
        """The step of a variant and what is known of it before it is timed."""
        exact = self.gradient(variant)
        began = time.monotonic()
        images = self.images[: variant.batch * self.base // 128]
        with switched(variant):
            module = self.module(variant, compiled=self.device == "cuda")
            kind: type[Eager] | type[GraphedStep] = Eager
            if self.device == "cuda":
                kind = GraphedStep
            run = kind(module, variant.stage, images, Parts.of(variant.lam), "bf16")
            losses = run(images, variant.lam)
        gradient = gradient_of(module)
        optimizer = torch.optim.AdamW([p for _, p in module.trained_parameters()], lr=1e-5, fused=True)

        def step() -> None:
            run(images, variant.lam)
            for parameters in module.clip_groups(variant.stage):
                nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()

        row = {
            "on": list(variant.on),
            "blocks": type(module._blocks[0]).__name__,
            "loss": float(losses.mean()),
            "gradient_error": float((gradient - exact).norm() / exact.norm()) if variant.batch == 128 else None,
            "prepare_s": time.monotonic() - began,
        }
        return step, row


def gradient_of(module: DistillStep) -> Tensor:
    return torch.cat([p.grad.flatten() for _, p in module.trained_parameters() if p.grad is not None]).clone()


def seconds_per_step(step: Callable[[], None], num: int, device: str) -> float:
    began = time.monotonic()
    for _ in range(num):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.monotonic() - began) / num


def tune_attention(bench: Bench) -> dict[str, float]:
    """Microseconds of torch's attention, forward and with its gradient, and of our kernels by their tiles."""
    batch, tokens, heads, dim = (128, 261, 6, 64) if bench.device == "cuda" else (1, 37, 2, 32)
    sizes = (3 * heads * dim, heads * dim)
    qkv, grad = (torch.randn(batch, tokens, size, device=bench.device).bfloat16() for size in sizes)

    def both() -> None:
        leaf = qkv.detach().requires_grad_()
        torch.autograd.grad(attend(leaf, heads, kernel=False), leaf, grad)

    times = {
        "torch forward": microseconds(partial(attend, qkv, heads, False), bench.device),
        "torch forward and backward": microseconds(both, bench.device),
    }
    for name, tiles in TILES.items():
        product = getattr(attention, name)
        for tile in tiles:
            setattr(attention, name, tile)
            attention.kernel_is_right.cache_clear()
            if not attention.kernel_is_right(qkv.device, tokens, heads, dim):  # which says why
                continue
            out, lse = attention.attention(qkv, heads)
            call: Callable[[], Any] = partial(attention.attention, qkv, heads)
            if name == "BACKWARD":
                delta = (grad.float() * out.float()).unflatten(-1, (heads, -1)).sum(-1).transpose(1, 2).contiguous()
                call = partial(attention.attention_backward, qkv, grad, lse, delta)
            times[f"{name.lower()} {' '.join(map(str, tile))}"] = microseconds(call, bench.device)
        setattr(attention, name, product)
    attention.kernel_is_right.cache_clear()
    return times


def microseconds(call: Callable[[], Any], device: str) -> float:
    """The least of five runs of some calls, the time that launching takes left out by a graph."""
    if device == "cuda":
        call()
        graph = torch.cuda.CUDAGraph()
        num = 10
        with torch.cuda.graph(graph):
            for _ in range(num):
                call()
        run = graph.replay
    else:
        run = call
        num = 1
    return 1e6 * min(seconds_per_step(run, 3, device) for _ in range(5)) / num


def kernels(step: Callable[[], None], device: str) -> str:
    """A table of the 25 slowest kernels of one step."""
    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        step()
        if cuda:
            torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -(row.device_time_total if cuda else row.cpu_time_total))
    times = [(row.device_time_total if cuda else row.cpu_time_total) / 1e3 for row in rows]
    lines = [f"{sum(times):9.3f} ms {sum(row.count for row in rows):6} calls  all"]
    lines += [f"{ms:9.3f} ms {row.count:6} calls  {row.key[:110]}" for ms, row in zip(times[:25], rows)]
    return "\n".join(lines) + "\n"


def tflops(teacher: ViT, images_per_s: float, variant: Variant) -> float:
    """TFLOP/s: teacher forward + 3 x student forward, matrix products only; a forced layer counts as another."""
    d = teacher.dim
    t = teacher.groups.num_tokens
    layers = teacher.num_layers
    forward = layers * (2 * t * 12 * d * d + 4 * t * t * d)
    return images_per_s * forward * (7 if variant.lam else 4) / 1e12


def measure(bench: Bench, steps: Mapping[str, Callable[[], None]], rounds: int, num: int) -> dict[str, list[float]]:
    """Seconds per step of each variant in each round; the variants take turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds_per_step(step, 2, bench.device)
            times[name].append(seconds_per_step(step, num, bench.device))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=85.0, help="seconds after which no variant is begun")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps of a variant in a round")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    about = "CPU"
    if args.device == "cuda":
        about = torch.cuda.get_device_name()
    result: dict[str, Any] = {"device": about, "torch": torch.__version__, "rows": {}}

    def write() -> None:
        (out / "small_step.json").write_text(json.dumps(result, indent=1) + "\n")

    bench = Bench(args.device)
    say(f"{about}, torch {torch.__version__}, {bench.teacher.groups.num_tokens} tokens, dim {bench.teacher.dim}")
    try:
        result["attention_us"] = tune_attention(bench)
        say(f"attention, us: {result['attention_us']}")
    except Exception:  # whatever goes wrong, the other measurements are worth having
        result["attention_us"] = {"error": traceback.format_exc()[-2000:]}
        say(f"attention failed: {traceback.format_exc()[-300:]}")
    steps: dict[str, Callable[[], None]] = {}

    def prepare(variant: Variant) -> None:
        try:
            step, row = bench.make(variant)
            row["first_seconds"] = min(seconds_per_step(step, 5, args.device) for _ in range(2))
            steps[variant.name] = step
            result["rows"][variant.name] = row
            rate = variant.batch / row["first_seconds"]
            error = row["gradient_error"]
            say(f"{variant.name}: {rate:.0f} images/s, prepared in {row['prepare_s']:.0f} s, gradient off by {error}")
        except Exception:
            result["rows"][variant.name] = {"error": traceback.format_exc()[-4000:]}
            say(f"{variant.name} failed: {traceback.format_exc()[-600:]}")
        write()

    for variant in VARIANTS:
        if time.monotonic() - STARTED < args.limit:
            prepare(variant)
        else:
            say(f"left out: {variant.name}")
    rate_all(bench, steps, result["rows"], args.rounds, args.steps)
    write()
    joint = [v.name for v in VARIANTS if v.name in steps and (v.stage, v.batch, v.adapters) == ("stage2", 128, 0)]
    if joint:
        for name in {joint[0], max(joint, key=lambda one: result["rows"][one]["images_per_s"])}:
            table = kernels(steps[name], args.device)
            (out / f"kernels-{name.replace(', ', '-').replace(' ', '-')}.txt").write_text(table)
            print(f"{name}\n{table}")
    say("done")


def rate_all(
    bench: Bench, steps: Mapping[str, Callable[[], None]], rows: dict[str, Any], rounds: int, num: int
) -> None:
    """Measure all steps in turn and put the rates into their rows."""
    variants = {variant.name: variant for variant in VARIANTS}
    for name, times in measure(bench, steps, rounds, num).items():
        row = rows[name]
        median = statistics.median(times)
        row |= {"rounds": times, "seconds": median, "images_per_s": variants[name].batch / median}
        row["tflops"] = tflops(bench.teacher, row["images_per_s"], variants[name])
    for name in steps:
        row = rows[name]
        base = rows.get(name.split(", ")[0], {})
        row["ratio"] = row["images_per_s"] / base["images_per_s"] if "images_per_s" in base else None
        print(f"{name:30}{row['images_per_s']:8.0f} images/s {row['tflops']:5.0f} TFLOP/s  ratio {row['ratio']}")


if __name__ == "__main__":
    main()
