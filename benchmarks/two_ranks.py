"""Two ranks on one GPU (or CPU) over gloo: a run that is stopped and goes on, and how much of the exchange is hidden.

    python benchmarks/two_ranks.py --data FOLDER --out FOLDER

Starts itself through torchrun. First `distill` of a ViT-S shape: SIGTERM reaches rank 1 only, both ranks stop after the
same step, the same call goes on to the end, and both hold the same weights. Then steps of a ViT-B shape as Fabric wraps
them, with the exchange of gradients and without it (`no_backward_sync`), and the exchange alone, in buckets as DDP has:

    exposed = step - step without exchange        hidden = 1 - exposed / exchange alone

A tied block's gradient is complete only when the backward pass has left its first layer, so the first phase's is
exchanged after the pass: with k equal phases about (k - 1) / k can be hidden at most. Steps are not compiled. Two ranks
that share a GPU also share its time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

STARTED = time.monotonic()
BUCKET_BYTES = 25 * 2**20  # of DDP
_NUM_WARM = 2  # rounds that are not timed


def say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"{time.monotonic() - STARTED:6.1f} s  {text}", flush=True)


def stop_rank(folder: Path, own_rank: int) -> None:
    """Send SIGTERM to this process, if it is rank 1, as soon as two steps are logged."""

    def look() -> None:
        path = folder / "metrics.jsonl"
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if path.exists() and len(path.read_text().splitlines()) >= 2:
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.01)

    if own_rank == 1:
        threading.Thread(target=look, daemon=True).start()


def stopped(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A run that one rank's signal stops, continued."""
    import torch.distributed as dist

    from raptor.run import Interrupted
    from raptor.surrogate.surrogate import shared_blocks
    from raptor.train import distill, loop

    loop.LOG_EVERY = 1  # type: ignore[attr-defined]
    rank = int(os.environ["RANK"])
    images = [str(path) for path in sorted(args.data.glob("imagenet-20-train-*.zip"))] or ["scenes"]
    options: dict[str, Any] = dict(data=images, pretrained=False, k=3, phases=[4, 4, 4], recipe="paper", compile=False)
    options |= dict(budget=f"{args.steps}steps", batch_size=args.batch, train_images=max(4 * args.batch, 64))
    options |= dict(num_images=16, num_workers=4, out=str(folder / "run"))
    stop_rank(folder / "run", rank)
    began = time.monotonic()
    said = ""
    try:
        distill(args.small, **options)
    except Interrupted as error:
        said = str(error)
    seconds = time.monotonic() - began
    say(f"rank 0: {said or 'not stopped'}")
    done: Any = distill(args.small, **options)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    sums = [float(value.double().abs().sum()) for value in shared_blocks(done.surrogate).state_dict().values()]
    every: list[Any] = [None, None]
    dist.all_gather_object(every, (said, sums))
    return {
        "said": [text for text, _ in every],
        "stopped_alike": every[0][0] == every[1][0] and "stopped after step" in every[0][0],
        "same_weights": every[0][1] == every[1][1],
        "seconds_until_stopped": seconds,
        "steps_logged_once": [line["step"] for line in lines] == [*range(args.steps // 2)] * 2,
        "losses": [line["loss"] for line in lines],
        "images_per_s": statistics.median(line["images_per_s"] for line in lines),
        "backend": dist.get_backend(),
        "num_processes": done.summary.num_processes,
        "cuda_graph": done.summary.cuda_graph,
    }


def exchange(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Median seconds of a step with and without the exchange, and of the exchange alone."""
    import torch
    import torch.distributed as dist

    from raptor.devices import open_fabric
    from raptor.phases.cut import Phases
    from raptor.surrogate.surrogate import make_surrogate
    from raptor.train.losses import Targets
    from raptor.train.step import DistillStep
    from raptor.vit.open import open_vit

    kind = "cpu"
    if torch.cuda.is_available():
        kind = "cuda"
    fabric = open_fabric(kind, "bf16" if kind == "cuda" else "fp32")
    torch.manual_seed(0)
    teacher = open_vit(args.base, pretrained=False, num_classes=0).to(fabric.device)
    phases = Phases.from_lengths((4, 4, 4))
    student = make_surrogate(teacher, phases, block="paper", conditioning="mlp")
    ones_lt = torch.ones(teacher.num_layers, teacher.groups.num_tokens)
    module = DistillStep(teacher, student, Targets.of(teacher, phases, ones_lt), half_teacher=kind == "cuda")
    parameters = [p for _, p in module.trained_parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=kind == "cuda")
    wrapped, optimizer = fabric.setup(module, optimizer)
    size = teacher.preprocess.size
    images = torch.randn(args.batch // fabric.world_size, 3, size, size, device=fabric.device)

    def step(reduce: bool) -> None:
        optimizer.zero_grad(set_to_none=True)
        with fabric.no_backward_sync(wrapped, enabled=not reduce):
            loss, _ = wrapped(images, "stage2")
            fabric.backward(loss)
        optimizer.step()

    total = sum(p.numel() for p in parameters)
    sizes = [BUCKET_BYTES // 4] * (total * 4 // BUCKET_BYTES) + [total % (BUCKET_BYTES // 4)]
    buckets = [torch.zeros(size, device=fabric.device) for size in sizes if size]

    def reduce_alone() -> None:
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()

    def seconds(work: Callable[[], None]) -> float:
        dist.barrier()
        began = time.monotonic()
        work()
        if kind == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - began

    kinds = {"step": lambda: step(True), "step without exchange": lambda: step(False), "exchange alone": reduce_alone}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(_NUM_WARM + args.repeats):
        for name, work in kinds.items():
            taken = seconds(work)
            if number >= _NUM_WARM:
                times[name].append(taken)
    both = statistics.median(times["step"])
    bare = statistics.median(times["step without exchange"])
    alone = statistics.median(times["exchange alone"])
    return {
        "device": torch.cuda.get_device_name() if kind == "cuda" else "cpu",
        "torch": torch.__version__,
        "model": args.base,
        "batch_per_rank": args.batch // fabric.world_size,
        "exchanged_mib": total * 4 / 2**20,
        "milliseconds": {"step": 1000 * both, "step without exchange": 1000 * bare, "exchange alone": 1000 * alone},
        "all_milliseconds": {name: [1000 * value for value in values] for name, values in times.items()},
        "exposed_ms": 1000 * (both - bare),
        "hidden": 1 - (both - bare) / alone,
    }


def on_rank(args: argparse.Namespace) -> None:
    """What each rank does; rank 0 writes after each part."""
    path = args.out / "two_ranks.json"
    folder = Path(args.folder)
    last = threading.Timer(args.seconds, os._exit, (1,))  # a rank may wait for ever for one that failed
    last.daemon = True
    last.start()
    result: dict[str, Any] = {}
    for name, function in {"stop and go on": stopped, "exchange of gradients": exchange}.items():
        try:
            result[name] = function(args, folder)
            say(f"{name}: done")
        except Exception as error:
            traceback.print_exc()
            result[name] = {"error": f"{type(error).__name__}: {error}"}
        if os.environ["RANK"] == "0":
            path.write_text(json.dumps(result, indent=1) + "\n")
    if "hidden" in result["exchange of gradients"]:
        found = result["exchange of gradients"]
        say(f"{found['milliseconds']}; {found['hidden']:.0%} of the exchange is hidden")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("GPU_DATA", ".")), help="default: $GPU_DATA")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder; default: $OUT")
    parser.add_argument("--batch", type=int, default=64, help="images per step of both ranks together")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--small", default="timm/vit_small_patch14_reg4_dinov2", help="model of the run")
    parser.add_argument("--base", default="timm/vit_base_patch14_reg4_dinov2", help="model of the timed steps")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--folder", default=None, help="of its own processes")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.folder:
        return on_rank(args)
    folder = tempfile.mkdtemp(prefix="two-ranks-")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host without a network may not resolve its own name
    again = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    try:
        code = subprocess.run([*again, __file__, *sys.argv[1:], "--folder", folder]).returncode
        say("done" if code == 0 else f"torchrun ended with {code}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
