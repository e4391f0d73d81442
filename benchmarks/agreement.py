"""Agreement of surrogates with their teacher on images that they were and were not trained on.

    python benchmarks/agreement.py runs/vitb16-varied-k2 runs/vitb16-varied-k3 runs/vitb16-varied-k4 \
        --data DATA/photos-diverse.zip 'DATA/imagenet-20-*.zip' --limit 128 --out docs/results/vitb16/agreement.json

The surrogates are of one teacher and given as run folders or saved surrogates. For each set and each of its --splits:
the share of images on which the largest logit of surrogate and teacher is the same, by the teacher's own head on centre
crops, with Wilson's 95 % interval over images. The --limit images are spread over the set and the same each time.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from raptor.data import iterate, open_data
from raptor.data.images import ImageData
from raptor.devices import device_name, pick_precision
from raptor.vit.pair import check_teacher, open_pair
from raptor.vit.trajectory import autocast
from raptor.vit.view import ViT


def of_counts(num_right: float, num: int) -> tuple[float, float, float]:
    """A share of `num` images with its 95 % interval by Wilson's formula."""
    ends = stats.binomtest(round(num_right), num).proportion_ci(0.95, method="wilson")
    return num_right / num, float(ends.low), float(ends.high)


def open_all(models: Sequence[str], **opening: Any) -> tuple[dict[str, ViT], ViT]:
    """The surrogates by the name they were given with, and their common teacher."""
    surrogates: dict[str, ViT] = {}
    teacher = None
    for name in models:
        surrogate, of_it = open_pair(name, **opening)
        if surrogate is None:
            raise ValueError(f"{name} is not a surrogate: give a run folder or a saved surrogate")
        teacher = teacher or of_it
        check_teacher(surrogate, teacher, name)
        surrogates[name] = surrogate
    if teacher is None or not teacher.num_classes:
        raise ValueError("the teacher has no head of its own: agreement is by its predictions")
    return surrogates, teacher


@torch.no_grad()
def same_predictions(
    surrogates: dict[str, ViT], teacher: ViT, data: ImageData, limit: int | None, precision: str, batch_size: int = 16
) -> dict[str, Tensor]:
    """For each surrogate, whether it predicts its teacher's class, (N,) bool. The teacher sees each image once."""
    same: dict[str, list[Tensor]] = {name: [] for name in surrogates}
    for batch in iterate(data, teacher.preprocess, batch_size, device=teacher.device, limit=limit):
        with autocast(precision, teacher.device):
            wanted_b = teacher(batch.images).argmax(-1)
            for name, surrogate in surrogates.items():
                same[name].append(surrogate(batch.images).argmax(-1) == wanted_b)
    return {name: torch.cat(found) for name, found in same.items()}


def agreement(same_n: Tensor) -> dict[str, Any]:
    """The share of images on which both agree, and its interval."""
    share, low, high = of_counts(int(same_n.sum()), len(same_n))
    return {"num_images": len(same_n), "agreement": share, "interval": [round(low, 3), round(high, 3)]}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="run folders or saved surrogates of one teacher")
    parser.add_argument("--data", nargs="+", required=True, help="image sets, as raptor's --data takes them")
    parser.add_argument("--splits", nargs="+", default=["train", "val"], help="parts of each: train, val, test, all")
    parser.add_argument("--limit", type=int, default=None, help="images of each part")
    parser.add_argument("--weights", default=None, help="the teacher's weight file, where it has moved")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="auto", help="fp32, bf16 or auto: bf16 on a GPU")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(words)
    surrogates, teacher = open_all(args.models, weights=args.weights, device=args.device)
    precision = pick_precision(args.precision, args.device)
    sets = {}
    for spec in args.data:
        for split in args.splits:
            data = open_data(spec, split, size=teacher.preprocess.size)
            same = same_predictions(surrogates, teacher, data, args.limit, precision)
            sets[f"{spec}, {split}"] = {name: agreement(same_n) for name, same_n in same.items()}
    result = {
        "command": shlex.join(["python", "benchmarks/agreement.py", *(sys.argv[1:] if words is None else words)]),
        "device": device_name(torch.device(args.device)),
        "precision": precision,
        "torch": str(torch.__version__),
        "teacher": teacher.name,
        "sets": sets,
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
