"""Time of recording a trajectory with its similarity, relative to the plain forward pass, measured in the same run.

    python benchmarks/trajectory.py --out docs/results/trajectory.json

ViT-B/14-reg, bf16, batch 256 on a GPU. Also the peak memory over 1,000 and 100,000 images (on a CPU in a new process
each), and the memory that keeping all states would need.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from raptor.data.stream import Batch
from raptor.phases.similarity import measure_similarity
from raptor.vit.open import open_vit
from raptor.vit.trajectory import Trajectories, autocast


class Repeated:
    """`num_images` noise images in batches. Two buffers are used in turn, so that only the model is measured."""

    def __init__(self, num_images: int, batch: int, size: int, device: str):
        self.num_batches = max(1, round(num_images / batch))
        self.buffers = [torch.randn(batch, 3, size, size, device=device) for _ in range(2)]

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        for i in range(self.num_batches):
            yield Batch(self.buffers[i % 2], None, torch.arange(len(self.buffers[0])))


def own_peak(command: list[str]) -> float:
    """Peak memory in GiB of a new process that runs `command`."""
    return float(subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=None)
    parser.add_argument("--model", default="timm/vit_base_patch14_reg4_dinov2")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of timings")
    parser.add_argument(
        "--peak-of", type=int, default=None, help="only record this many images and print the peak memory"
    )
    args = parser.parse_args()
    cuda = args.device == "cuda"
    precision = "fp32"
    if cuda:
        precision = "bf16"
    random: dict[str, Any] = {"pretrained": False, "num_classes": 0} if args.model.startswith("timm/") else {}
    vit = open_vit(args.model, device=args.device, **random)
    size = vit.preprocess.size

    def sync() -> None:
        if cuda:
            torch.cuda.synchronize()

    def bare(num_images: int) -> None:
        with torch.no_grad(), autocast(precision, vit.device):
            for batch in Repeated(num_images, args.batch, size, args.device):
                vit(batch.images)

    def recorded(num_images: int) -> None:
        batches = Repeated(num_images, args.batch, size, args.device)
        states = (states for states, _, _ in Trajectories(vit, batches, precision))
        measure_similarity(states, vit.num_layers, vit.groups)

    def seconds(function, num_images: int) -> float:
        sync()
        start = time.monotonic()
        function(num_images)
        sync()
        return time.monotonic() - start

    def peak(num_images: int) -> float:
        if not cuda:
            return own_peak([*sys.argv, "--peak-of", str(num_images)])
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        recorded(num_images)
        return torch.cuda.max_memory_allocated() / 2**30

    if args.peak_of is not None:
        recorded(args.peak_of)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        return
    few = min(args.images // 10, 40 * args.batch)
    for function in (bare, recorded):
        seconds(function, 4 * args.batch)
    pairs = [(seconds(bare, few), seconds(recorded, few)) for _ in range(args.repeats)]
    ratio = statistics.median(r / b for b, r in pairs)
    small = peak(1000)
    large = peak(args.images)
    held = args.images * vit.num_layers * vit.groups.num_tokens * vit.dim * 2 / 2**30
    result = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "model": args.model,
        "precision": precision,
        "batch": args.batch,
        "images_per_s_bare": few / statistics.median(b for b, _ in pairs),
        "images_per_s_recorded": few / statistics.median(r for _, r in pairs),
        "time_ratio": ratio,
        "peak_gib_1000_images": small,
        f"peak_gib_{args.images}_images": large,
        "memory_ratio": large / small,
        "gib_if_all_states_were_held_in_bf16": held,
    }
    print(json.dumps(result, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
