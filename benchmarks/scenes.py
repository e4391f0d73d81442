"""The built-in images: how fast they are drawn, and how far a linear probe on their pixels gets beside the ViT.

    python benchmarks/scenes.py --out docs/results/scenes.json

Ridge regression (penalty chosen on a split of train) on the raw pixels of 5,000 training scenes, scored on 2,000
validation scenes at 48 px; the built-in teacher's own head on the same 2,000.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from raptor.certificate.ridge import accuracy, fit_ridge
from raptor.data import open_data
from raptor.data.scenes.layout import CLASSES
from raptor.data.scenes.render import draw_scenes
from raptor.train.teacher import evaluate
from raptor.vit.open import open_vit


def images_per_second(size: int, num_images: int = 512, repeats: int = 5) -> float:
    """The best of a few timings."""
    indices = torch.arange(num_images)
    draw_scenes(indices[:64], size)
    times = []
    for _ in range(repeats):
        start = time.monotonic()
        draw_scenes(indices, size)
        times.append(time.monotonic() - start)
    return num_images / min(times)


def pixel_accuracy(num_train: int = 5000, num_val: int = 2000) -> float:
    """Ridge regression on pixels."""
    train = draw_scenes(torch.arange(num_train), 48, "train")
    val = draw_scenes(torch.arange(num_val), 48, "val")
    pixels = [batch.images.flatten(1).float() / 255 for batch in (train, val)]
    return accuracy(fit_ridge(pixels[0], train.labels, len(CLASSES))(pixels[1]), val.labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    result = {
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "images_per_s": {str(size): images_per_second(size) for size in (48, 64)},
        "pixel_ridge_accuracy": pixel_accuracy(),
        "teacher_accuracy": evaluate(open_vit("scenes"), open_data("scenes", "val", limit=2000)),
    }
    print(json.dumps(result, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
