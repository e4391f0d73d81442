"""Images/s that one core decodes for training, from JPEG files of ImageNet's usual size: 500 x 375, about 110 kB.

    python benchmarks/decoding.py --data FILE.zip --out docs/results/scale/decoding.json

The photographs of `--data` are resized to 500 x 375 and saved as JPEG with a quality that gives the mean size of an
ImageNet file. CPU seconds of one thread in one process, the least of three passes, without and with the random crop
(which a GPU does where there is one). A rate of N images/s needs N over this many cores.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from raptor.data import TrainStream, open_data
from raptor.data.images import ImageData
from raptor.data.preprocess import Preprocess
from raptor.vit.open import open_vit

WIDTH = 500
HEIGHT = 375
MEAN_BYTES = 110_000
BATCH = 32


def write_images(source: ImageData, folder: Path) -> dict[str, Any]:
    """The photographs of `source` in ImageNet's size; the quality that was taken and the bytes per file."""
    images = [source.load(i).resize((WIDTH, HEIGHT)) for i in range(len(source))]
    for quality in range(75, 101):
        for number, image in enumerate(images):
            image.save(folder / f"{number:05}.jpg", quality=quality)
        size = sum(path.stat().st_size for path in folder.iterdir()) / len(images)
        if size >= MEAN_BYTES:
            break
    return {"quality": quality, "bytes_per_file": round(size)}


def rate(folder: Path, preprocess: Preprocess, augment: str) -> float:
    """images/s of CPU time, the best of three passes."""
    data = open_data(str(folder), "all")
    stream = TrainStream(data, preprocess, BATCH, augment=augment, cache="none", num_workers=0)
    num_steps = len(data) // BATCH
    rates = []
    for turn in range(3):
        began = time.process_time()
        for step in range(num_steps):
            stream.batch(turn * num_steps + step)
        rates.append(num_steps * BATCH / (time.process_time() - began))
    return max(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="photographs")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    preprocess = open_vit("timm/vit_small_patch14_reg4_dinov2", pretrained=False, num_classes=0).preprocess
    with tempfile.TemporaryDirectory() as place:
        result = write_images(open_data(args.data, "all", limit=args.images), Path(place))
        rates = {augment: round(rate(Path(place), preprocess, augment), 1) for augment in ("none", "crop")}
    result |= {"size": [WIDTH, HEIGHT], "images": args.images, "images_per_s_of_a_core": rates}
    result |= {"command": "python benchmarks/decoding.py --data FILE.zip --out docs/results/scale/decoding.json"}
    result |= {"machine": f"{os.cpu_count()} CPU cores", "versions": {"torch": torch.__version__}}
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
