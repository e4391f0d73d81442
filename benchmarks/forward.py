"""Speed of a surrogate's forward pass beside its teacher's: both as they are, and both compiled, in one run.

    python benchmarks/forward.py --out docs/results/forward.json                        # on a GPU
    python benchmarks/forward.py --device cpu --batches 1 8 --out docs/results/forward-cpu.json

The built-in model with its shipped surrogate, and a ViT-S (DINOv2's, with registers and LayerScale) and a ViT-B/16
(without LayerScale) with random weights, as three blocks with a table. bf16 weights on a GPU, fp32 on a CPU. Rows:

    as_opened           a surrogate as `open_vit` gives it
    at_speed            the same after `raptor.at_speed`
    compiled            of either side: its blocks compiled; on a GPU the whole pass is captured as a CUDA graph

Teacher and surrogate take turns for several rounds; a row has the median of the rounds in milliseconds, and `ratio` is
the surrogate's time over that of the teacher in the same form. No row is begun after `--limit` seconds; what was left
out is said, and the file is written again after each batch size.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raptor.surrogate.at_speed import at_speed
from raptor.surrogate.surrogate import make_surrogate, shared_blocks
from raptor.vit.open import open_vit
from raptor.vit.view import ViT

STARTED = time.monotonic()
PHASES = (7, 3, 2)
RANDOM = {"ViT-S": "timm/vit_small_patch14_reg4_dinov2", "ViT-B": "timm/vit_base_patch16_224"}
MODELS = ("ViT-B", "ViT-S", "scenes")
Pass = Callable[[Tensor], Tensor]


@dataclass
class Pair:
    """The models of one comparison, in the precision that is measured."""

    teacher: ViT
    surrogate: ViT

    @classmethod
    def of(cls, name: str, device: str) -> Pair:
        if name == "scenes":
            pair = cls(open_vit("scenes"), open_vit("scenes-k3"))
        else:
            torch.manual_seed(0)
            teacher = open_vit(RANDOM[name], pretrained=False, num_classes=0)
            surrogate = make_surrogate(teacher, PHASES)
            with torch.no_grad():
                for parameter in [*teacher.model.parameters(), *shared_blocks(surrogate).parameters()]:
                    parameter.add_(0.02 * torch.randn_like(parameter))
            pair = cls(teacher, surrogate)
        dtype = torch.float32
        if device == "cuda":
            dtype = torch.bfloat16
        for vit in (pair.teacher, pair.surrogate):
            vit.model.to(dtype).requires_grad_(False)
            vit.to(device)
        return pair


def compiled(vit: ViT) -> ViT:
    """A copy of a model whose blocks are compiled: all of one side share a graph, as their parts are its inputs."""
    copied = replace(vit, model=copy.deepcopy(vit.model))
    for block in copied.blocks:
        block.compile(dynamic=False)
    return copied


def captured(model: nn.Module, images: Tensor) -> Callable[[], Any]:
    """A call of the model on these images, replayed as a CUDA graph where there is a GPU."""
    if not images.is_cuda:
        return lambda: model(images)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(images)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(images)
    return graph.replay


def milliseconds(call: Callable[[], Any], num: int, device: str) -> float:
    began = time.perf_counter()
    for _ in range(num):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / num


def measure(calls: dict[str, Callable[[], Any]], device: str, rounds: int, seconds: float) -> dict[str, float]:
    """The median time of each call over rounds in which all take turns, each for about `seconds`."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    num = {}
    for name, call in calls.items():
        milliseconds(call, 2, device)
        num[name] = max(1, round(1e3 * seconds / milliseconds(call, 2, device)))
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(milliseconds(call, num[name], device))
    return {name: statistics.median(values) for name, values in times.items()}


def machine(device: str) -> dict[str, Any]:
    about: dict[str, Any] = {"torch": str(torch.__version__), "python": platform.python_version(), "device": device}
    if device == "cuda":
        about["name"] = torch.cuda.get_device_name()
        about["weights"] = "bf16"
    else:
        about["name"] = platform.processor() or platform.machine()
        about["threads"] = torch.get_num_threads()
        about["weights"] = "fp32"
    return about


def row(pair: Pair, batch: int, sides: dict[str, ViT], args: argparse.Namespace) -> dict[str, Any]:
    """Times of every form at one batch size."""
    size = pair.teacher.preprocess.size
    images = torch.randn(batch, 3, size, size, device=args.device).to(pair.teacher.dtype)
    calls: dict[str, Callable[[], Any]] = {}
    prepared: dict[str, float] = {}
    for name, vit in sides.items():
        began = time.monotonic()
        if name.endswith("compiled"):
            calls[name] = captured(vit.model, images)
            calls[name]()
            prepared[name] = round(time.monotonic() - began, 1)
        else:
            calls[name] = partial(vit.model, images)
    times = measure(calls, args.device, args.rounds, args.seconds)
    ratios = {
        "as_opened": times["surrogate as_opened"] / times["teacher"],
        "at_speed": times["surrogate at_speed"] / times["teacher"],
    }
    if "teacher compiled" in times:
        ratios["compiled"] = times["surrogate compiled"] / times["teacher compiled"]
    return {"ms": times, "ratio": ratios, "prepared_s": prepared}


def compare(pair: Pair, device: str) -> float:
    """How far the last states of the fast form are from those of the surrogate itself, relative to their size."""
    size = pair.teacher.preprocess.size
    images = torch.randn(4, 3, size, size, device=device).to(pair.teacher.dtype)
    plain = pair.surrogate.record(images)[0][-1]
    fast = at_speed(pair.surrogate).record(images)[0][-1]
    return float((fast - plain).float().norm() / plain.float().norm())


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 1, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.05, help="of each form in each round")
    parser.add_argument("--limit", type=float, default=50.0, help="seconds after which no row is begun")
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # all models and batches share the code of a module's call
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    result: dict[str, Any] = {"machine": machine(args.device), "rows": {}, "left_out": []}
    for name in args.models:
        pair = Pair.of(name, args.device)
        difference = compare(pair, args.device)
        fast = at_speed(pair.surrogate)
        sides = {
            "teacher": pair.teacher,
            "surrogate as_opened": pair.surrogate,
            "surrogate at_speed": fast,
            "teacher compiled": compiled(pair.teacher),
            "surrogate compiled": compiled(fast),
        }
        for batch in args.batches:
            label = f"{name}, batch {batch}"
            if time.monotonic() - STARTED > args.limit:
                result["left_out"].append(label)
                print(f"left out: {label}")
                continue
            found = row(pair, batch, sides, args)
            result["rows"][label] = {"difference": difference, **found}
            shown = ", ".join(f"{form} {ratio:.3f}" for form, ratio in found["ratio"].items())
            print(
                f"{time.monotonic() - STARTED:5.1f} s  {label}: surrogate / teacher {shown}; {found['ms']}", flush=True
            )
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
