"""Steps of full-size ViTs under the per-device settings of the ImageNet recipes: rate, peak memory, loss.

    python benchmarks/full_size.py --data FOLDER --out FOLDER
    python benchmarks/full_size.py --data FOLDER --out FOLDER --cases giant:64 --steps 20

A case is a shape and the images per device: 64 on one GPU, 8 on each of eight, which run without a CUDA graph (and here
without exchanging gradients). Random weights, real images (imagenet-20-train-*.zip of the data folder), `distill` as
the recipe says: the paper's block, k = 3, both stages, compiled. All cases compile at the same time, each in a process
(a dry run), then they train one after the other. The images are decoded before, so the rate is that of the step. What
is not done after `--seconds` is left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import yaml

RECIPES = Path(__file__).parents[1] / "raptor" / "recipes"
RECIPE_BATCH = 64
RECIPE_IMAGES = 40e6  # 2 x 20 epochs of 1,000,000 images
GIB = 2**30
STARTED = time.monotonic()


class Shape(NamedTuple):
    model: str
    recipe: str
    phases: tuple[int, ...]


SHAPES = {
    "tiny": Shape("timm/vit_tiny_patch16_224", "imagenet-small", (4, 4, 4)),  # to try this script
    "small": Shape("timm/vit_small_patch14_reg4_dinov2", "imagenet-small", (4, 4, 4)),
    "base": Shape("timm/vit_base_patch14_reg4_dinov2", "imagenet-base", (4, 4, 4)),
    "large": Shape("timm/vit_large_patch14_reg4_dinov2", "imagenet-large", (8, 8, 8)),
    "giant": Shape("timm/vit_giant_patch14_reg4_dinov2", "imagenet-giant", (14, 13, 13)),
}


def say(case: str, text: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s  {case:10} {text}", flush=True)


def write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


# One case, in a process of its own.


def options_of(shape: Shape, batch: int, steps: int, data: Path, num_images: int) -> dict[str, Any]:
    """Of `distill`: the recipe's, and those that make it short."""
    recipe = yaml.safe_load((RECIPES / f"{shape.recipe}.yaml").read_text())
    images = [str(path) for path in sorted(data.glob("imagenet-20-train-*.zip"))] or ["scenes"]
    options = dict(data=images, pretrained=False, phases=list(shape.phases), batch_size=batch, budget=f"{steps}steps")
    # A rank of several has no CUDA graph.
    options |= {"graph": None if batch == RECIPE_BATCH else False}
    return {**recipe, **options, "train_images": num_images, "num_images": min(128, num_images // 2)}


class SharedMemory:
    """Highest memory in use on the device by all processes, in GiB, as nvidia-smi tells it each second."""

    def __init__(self) -> None:
        self.peak = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> SharedMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._over.wait(1.0):
            try:
                used = subprocess.run(query, capture_output=True, text=True, timeout=5).stdout.split()
                self.peak = max([self.peak, *(float(value) / 1024 for value in used)])
            except (OSError, ValueError, subprocess.SubprocessError):
                return


def measure_case(case: str, args: argparse.Namespace) -> None:
    """Compile, wait for the turn, train; what is known goes to CASE.json each time."""
    import torch

    from raptor.train import distill, loop
    from raptor.train import stage as stage_module
    from raptor.train.plan import Plan

    name, batch = case.split(":")
    shape = SHAPES[name]
    steps = args.steps
    path = args.out / f"full_size-{name}-{batch}.json"
    options = options_of(shape, int(batch), steps, args.data, args.images)
    on_gpu = torch.cuda.is_available()
    result: dict[str, Any] = {"case": case, "model": shape.model, "batch": int(batch), "steps": steps}
    result |= {"device": torch.cuda.get_device_name() if on_gpu else "cpu", "torch": torch.__version__}
    loop.LOG_EVERY = 2  # type: ignore[attr-defined]
    if steps >= 100:
        loop.LOG_EVERY = 5
    stage_module._NUM_TIMED["cuda"] = (3, 2)  # type: ignore[attr-defined]
    folder = Path(tempfile.mkdtemp(prefix="full-size-"))
    try:
        began = time.monotonic()
        plan = distill(shape.model, **options, dry_run=True, out=str(folder / "run"))
        assert isinstance(plan, Plan)
        result |= {"compile_seconds": time.monotonic() - began, "step_peak_gib": plan.memory_bytes / GIB}
        write(path, result)
        say(case, f"compiled in {result['compile_seconds']:.0f} s, a step takes {result['step_peak_gib']:.1f} GiB")
        del plan
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        (args.turns / f"ready-{name}-{batch}").touch()
        while not (args.turns / f"go-{name}-{batch}").exists():
            time.sleep(0.05)
        began = time.monotonic()
        with SharedMemory() as shared:
            done = distill(shape.model, **options, out=str(folder / "run"))
        result |= rates(folder / "run", int(batch), steps)
        result |= {"seconds_in_all": time.monotonic() - began, "smi_peak_gib_all_processes": shared.peak}
        result |= {"cuda_graph": done.summary.cuda_graph, "r2_last": done.summary.validation.r2_last}  # type: ignore[union-attr]
        if on_gpu:
            result["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
            result["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        say(case, f"{result['images_per_s']:.0f} images/s, peak {result.get('peak_gib', 0):.1f} GiB")
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
        say(case, result["error"].splitlines()[0])
    finally:
        write(path, result)
        (args.turns / f"ready-{name}-{batch}").touch()
        shutil.rmtree(folder, ignore_errors=True)


def rates(folder: Path, batch: int, steps: int) -> dict[str, Any]:
    """images/s of each kind of step (median over log lines without the first of each kind), and the losses."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    forced_until = 0.25 * next(line["num_steps"] for line in lines if line["stage"] == "stage1")
    kinds: dict[str, list[float]] = {"stage1 with teacher forcing": [], "stage1": [], "stage2": []}
    for line in lines:
        forced = line["stage"] == "stage1" and line["step"] < forced_until
        kinds["stage1 with teacher forcing" if forced else line["stage"]].append(line["images_per_s"])
    medians = {kind: statistics.median(values[1:] or values) for kind, values in kinds.items() if values}
    shares = dict(zip(kinds, (1 / 8, 3 / 8, 1 / 2)))
    per_image = sum(share / medians[kind] for kind, share in shares.items() if kind in medians)
    return {
        "images_per_s": 1 / per_image * sum(shares[kind] for kind in medians),
        "images_per_s_by_kind": medians,
        "log_lines": kinds,
        "hours_of_the_recipe": RECIPE_IMAGES * per_image / 3600 * batch / RECIPE_BATCH,
        "loss_first": lines[0]["loss"],
        "loss_last_of_stage1": next(line["loss"] for line in reversed(lines) if line["stage"] == "stage1"),
        "loss_last": lines[-1]["loss"],
        "finite": all(math.isfinite(line["loss"]) for line in lines),
        "num_steps": sum({line["stage"]: line["num_steps"] for line in lines}.values()),
    }


# All cases.


def wait(done: Any, until: float) -> bool:
    """Wait for `done()`; whether it came before `until`."""
    while not done() and time.monotonic() < until:
        time.sleep(0.05)
    return bool(done())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("GPU_DATA", ".")), help="default: $GPU_DATA")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder; default: $OUT")
    parser.add_argument("--cases", nargs="+", default=["base:64", "large:64", "base:8", "large:8"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--images", type=int, default=2048, help="to train on")
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--one", default=None, help="of its own processes")
    parser.add_argument("--turns", type=Path, default=None, help="of its own processes")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        return measure_case(args.one, args)
    until = STARTED + args.seconds
    turns = Path(tempfile.mkdtemp(prefix="turns-"))
    again = [sys.executable, __file__, "--data", args.data, "--out", args.out, "--turns", turns]
    again += ["--steps", str(args.steps), "--images", str(args.images)]
    children = {case: subprocess.Popen([*again, "--one", case]) for case in args.cases}
    marks = {case: case.replace(":", "-") for case in args.cases}
    try:
        # Cases that need longer to compile would disturb those that train.
        wait(lambda: all((turns / f"ready-{marks[case]}").exists() for case in args.cases), until)
        for case, child in children.items():
            (turns / f"go-{marks[case]}").touch()
            if not wait(lambda child=child: child.poll() is not None, until):
                say(case, "not finished in time")
    finally:
        for child in children.values():
            child.kill()
            child.wait()
        shutil.rmtree(turns, ignore_errors=True)
    found = [path for mark in marks.values() if (path := args.out / f"full_size-{mark}.json").exists()]
    write(args.out / "full_size.json", {"rows": [json.loads(path.read_text()) for path in found]})
    for path in found:
        path.unlink()
    say("all", f"{len(found)} of {len(children)} cases in {args.out / 'full_size.json'}")


if __name__ == "__main__":
    main()
