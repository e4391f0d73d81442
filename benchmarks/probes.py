"""A grid of 12 learning rates against one: time of a training step, both measured in turn in one run.

python benchmarks/probes.py                      on the CPU, with a small ViT
python benchmarks/probes.py --device cuda        DINOv2-S/14 with registers at 224 and 518 px (random weights)
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image

from raptor.data import ImageData, open_dense
from raptor.probes import DEFAULTS
from raptor.probes.classify import Classify
from raptor.probes.depth import Depth
from raptor.probes.grid import HeadGrid, Task, grid_around, random_head
from raptor.probes.segment import Segment
from raptor.vit.open import open_vit
from raptor.vit.view import ViT

NUM_WARMUP = 3
LIMITS = {"classify": 1.2, "segment": 3.0, "depth": 3.0}


class Noise(ImageData):
    """Pictures that are decoded once and kept, so that a step is only backbone and heads."""

    def __init__(self, num_images: int, size: int) -> None:
        super().__init__("noise", [f"{i}.png" for i in range(num_images)], [0] * num_images, ["any"])
        self.size = size

    def read(self, position: int, side: int | None = None) -> Image.Image:
        pixels = np.random.default_rng(position).integers(0, 256, (self.size, self.size, 3), dtype=np.uint8)
        return Image.fromarray(pixels)


def small_vit() -> ViT:
    options: dict[str, Any] = {
        "img_size": 48,
        "patch_size": 6,
        "embed_dim": 128,
        "depth": 8,
        "num_heads": 4,
        "reg_tokens": 4,
    }
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, dynamic_img_size=True, **options)
    return open_vit(model, size=48)


def make_task(vit: ViT, task: str, num_images: int, batch_size: int, size: int, precision: str) -> Task:
    """A task on noise or scenes with as many outputs as its full-size data: 1,000 classes, 150 classes, 256 bins."""
    options = {"batch_size": batch_size, "precision": precision}
    layer = vit.num_layers
    if task == "classify":
        train = Noise(num_images, size)
        val = Noise(8, size)
        made: Task = Classify(vit, layer, train, val, size=size, **options)  # type: ignore[arg-type]
        made.num_outputs = 1000
        return made
    frames = open_dense("scenes", "train", task, limit=num_images, size=size)
    held = open_dense("scenes", "val", task, limit=8, size=size)
    if task == "depth":
        return Depth(vit, layer, frames, held, **options)
    made = Segment(vit, layer, frames, held, **options)
    made.num_outputs = 150
    return made


def step_seconds(task: Task, heads: HeadGrid, step: int) -> float:
    _wait(task.device)
    began = time.perf_counter()
    task.backward(heads.weight, heads.bias, step)
    heads.step(1.0)
    _wait(task.device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(task: Task, lr: float, num_steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step with one head and with twelve, taken in turn after three steps of warm-up each."""
    task.start(0)
    init = random_head(task, 0)
    grids = HeadGrid(init, [lr], 1e-2), HeadGrid(init, grid_around(lr), 1e-2)
    rows = [[step_seconds(task, heads, step) for heads in grids] for step in range(num_steps + NUM_WARMUP)]
    one, twelve = (list(column) for column in zip(*rows[NUM_WARMUP:]))
    return one, twelve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", nargs="+", default=list(DEFAULTS), choices=list(DEFAULTS))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument(
        "--batch", type=int, default=None, help="images per step; by default the task's own, less on the CPU"
    )
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    cuda = args.device.startswith("cuda")
    if cuda:
        name = "timm/vit_small_patch14_reg4_dinov2"
        vit = open_vit(name, pretrained=False, num_classes=0, device=args.device)
        sizes = {"classify": 224, "segment": 518, "depth": 518}
        batches = {task: defaults.batch_size for task, defaults in DEFAULTS.items()}
    else:
        name = "small ViT (dim 128, 8 blocks)"
        vit = small_vit()
        sizes = dict.fromkeys(DEFAULTS, 48)
        batches = {"classify": 256, "segment": 16, "depth": 8}
    device = "cpu"
    if cuda:
        device = torch.cuda.get_device_name()
    result: dict[str, Any] = {"device": device, "torch": torch.__version__, "model": name, "rows": []}
    for task in args.tasks:
        batch = args.batch or batches[task]
        size = sizes[task]
        made = make_task(vit, task, 3 * batch, batch, size, "bf16" if cuda else "fp32")
        columns = measure(made, DEFAULTS[task].lr, args.steps)
        one, twelve = (statistics.median(column) for column in columns)
        row = {"task": task, "size": size, "batch": batch, "outputs": made.num_outputs}
        row |= {"one_s": round(one, 4), "twelve_s": round(twelve, 4), "ratio": round(twelve / one, 3)}
        row["range_s"] = [[round(end, 4) for end in (min(column), max(column))] for column in columns]
        result["rows"].append({**row, "aim": LIMITS[task]})
        print(json.dumps(result["rows"][-1]), flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
