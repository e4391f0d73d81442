"""Time of the certificate relative to the two plain forward passes it needs, measured side by side in one run.

    python benchmarks/certificate.py --model timm/vit_small_patch14_reg4_dinov2 --device cuda --precision bf16

Prints JSON: the seconds of each, and the ratios. The images are noise in memory, so that reading files is not timed.
The null models cost one more forward pass; the ratios with and without them are printed.

With --passes only forward passes are timed: of the teacher, of a surrogate with a table, and of the same surrogate with
the factors of each depth applied one by one, as they are where a gradient is taken. On a CPU that is processor time,
which other programs change less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from raptor.certificate.follow import follow
from raptor.certificate.null_models import fit_null_models
from raptor.data.stream import Batch
from raptor.surrogate.block import fast_switched
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.open import open_vit
from raptor.vit.trajectory import autocast
from raptor.vit.view import ViT


def bare_passes(surrogate: ViT, teacher: ViT, batches: list[Batch], precision: str) -> None:
    for batch in batches:
        with torch.no_grad(), autocast(precision, teacher.device):
            teacher(batch.images)
            surrogate(batch.images)


def one_by_one(surrogate: ViT, images: torch.Tensor) -> None:
    with fast_switched(False):
        surrogate(images)


def passes(surrogate: ViT, teacher: ViT, images: torch.Tensor, precision: str) -> dict[str, Callable[[], None]]:
    def run(forward: Callable[[], object]) -> None:
        with torch.no_grad(), autocast(precision, teacher.device):
            forward()

    return {
        "teacher": lambda: run(lambda: teacher(images)),
        "surrogate": lambda: run(lambda: surrogate(images)),
        "one by one": lambda: run(lambda: one_by_one(surrogate, images)),
    }


def timed(run: Callable[[], None], device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="timm/vit_small_patch14_reg4_dinov2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--num-batches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--passes", action="store_true")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", default=None)
    options = parser.parse_args()

    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    teacher = open_vit(options.model, pretrained=False, device=device)
    num_layers = teacher.num_layers
    surrogate = make_surrogate(teacher, (num_layers // 2, num_layers - num_layers // 2))
    size = teacher.preprocess.size
    images = torch.randn(options.batch_size, 3, size, size, device=device)
    batches = [Batch(images, None, torch.arange(len(images)))] * options.num_batches

    def measure(null_models) -> None:
        with torch.no_grad():
            measured = follow(surrogate, teacher, batches, None, options.precision, null_models)
            for curves in measured.curves.values():
                curves.result()

    if options.passes:
        runs = passes(surrogate, teacher, images, options.precision)
    else:
        nulls = fit_null_models(teacher, surrogate.phases or (), batches[:1], options.precision)
        runs = {
            "bare": lambda: bare_passes(surrogate, teacher, batches, options.precision),
            "certificate": lambda: measure(None),
            "certificate with null models": lambda: measure(nulls),
        }
    against = next(iter(runs))
    clock = time.perf_counter
    if options.passes and device.type == "cpu":
        clock = time.process_time
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(options.rounds + 1):
        for name, run in runs.items():
            spent = timed(run, device, clock)
            if round_:  # the first round compiles and warms up
                seconds[name].append(spent)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {name: medians[name] / medians[against] for name in medians if name != against}
    where = "cpu"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    found = {**settings, "device": where, "torch": torch.__version__, "image_size": size}
    text = json.dumps({**found, "seconds": medians, "ratios": ratios}, indent=1)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
