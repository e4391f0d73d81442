"""What recurrence is good for on the built-in models: depth on demand, watching, editing, correcting.

    python benchmarks/recurrence.py --out docs/results/recurrence.json

The surrogate scenes-k3 and its teacher, 512 held-out scenes, fp32. Every number stands beside its null model. It takes
about ten minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from raptor import iterate, open_data, open_vit
from raptor.data.stream import Batch
from raptor.phases import Phases
from raptor.provenance import Provenance
from raptor.recurrence.correct import measure_correction
from raptor.recurrence.depth import measure_depth
from raptor.recurrence.edit import class_means, edit
from raptor.recurrence.rules import Entropy, FixedLengths, RandomSkip, ReadOutChange, Rule, Turn
from raptor.recurrence.watch import Watcher, baseline_scores, detection
from raptor.vit.view import ViT

TARGET_CLASS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num_images", type=int, default=512)
    args = parser.parse_args()
    teacher, surrogate = open_vit("scenes"), open_vit("scenes-k3")
    images = open_data("scenes", "val", limit=args.num_images)
    batches = list(iterate(images, teacher.preprocess, 64))
    found = {
        "depth": depth(teacher, surrogate, batches),
        "watch": watch(teacher, surrogate, batches),
        "edit": edits(teacher, surrogate, batches),
        "correct": corrections(teacher, surrogate, batches),
        "provenance": asdict(Provenance.here()),
    }
    args.out.write_text(json.dumps(found, indent=1))


def depth(teacher: ViT, surrogate: ViT, batches: list[Batch]) -> dict[str, Any]:
    found = {}
    for vit in (surrogate, teacher):
        rules: dict[str, Rule] = {"full depth": Rule()}
        for threshold in (0.2, 0.25, 0.3):
            rules[f"turn < {threshold}"] = Turn(vit.groups, threshold)
        for threshold in (0.5, 1.0, 1.5):
            rules[f"entropy < {threshold}"] = Entropy(vit.finish, threshold)
        for threshold in (0.01, 0.03, 0.05):
            rules[f"kl < {threshold}"] = ReadOutChange(vit.finish, threshold)
        for probability in (0.05, 0.1, 0.2):
            rules[f"random {probability}"] = RandomSkip(probability)
        assert surrogate.phases is not None
        rules["one step fewer"] = FixedLengths([max(1, length - 1) for length in surrogate.phases])
        points = measure_depth(vit, teacher, batches, rules, phases=Phases(tuple(surrogate.phases)))
        found[vit.name] = [asdict(point) for point in points]
    return found


def watch(teacher: ViT, surrogate: ViT, batches: list[Batch]) -> dict[str, Any]:
    """Usual images are scenes, unusual ones are changed scenes; calibration and judged images differ."""
    half = len(batches) // 2
    usual, judged = batches[:half], batches[half:]
    watcher = Watcher(surrogate, teacher).calibrate(usual)
    on_usual = watcher.watch(judged)
    baselines_usual = baseline_scores(teacher, usual, judged, teacher.finish)
    found: dict[str, Any] = {"false alarms": float(on_usual.alarm_n.double().mean())}
    for name, change in CHANGES.items():
        changed = [Batch(change(batch.images), batch.labels, batch.indices) for batch in judged]
        on_changed = watcher.watch(changed)
        rows = {"surrogate": asdict(detection(on_usual.score_n, on_changed.score_n))}
        for score, values in baseline_scores(teacher, usual, changed, teacher.finish).items():
            rows[score] = asdict(detection(baselines_usual[score], values))
        found[name] = rows
    return found


def _noisy(images: torch.Tensor) -> torch.Tensor:
    return images + 0.3 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))


def _blurred(images: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.avg_pool2d(images, 5, stride=1, padding=2, count_include_pad=False)


def _low_contrast(images: torch.Tensor) -> torch.Tensor:
    mean = images.mean((2, 3), keepdim=True)
    return mean + 0.4 * (images - mean)


def _flipped(images: torch.Tensor) -> torch.Tensor:
    return images.flip(2)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "noise": _noisy,
    "blur": _blurred,
    "contrast": _low_contrast,
    "upside down": _flipped,
}


def edits(teacher: ViT, surrogate: ViT, batches: list[Batch]) -> list[dict[str, Any]]:
    assert surrogate.phases is not None
    ends = [sum(surrogate.phases[: phase + 1]) for phase in range(len(surrogate.phases))]
    rows = []
    for vit in (surrogate, teacher):
        means = class_means(vit, batches, ends)
        for phase in range(1, len(ends) + 1):
            result = edit(vit, batches[:2], means, to=TARGET_CLASS, phase=phase, phases=surrogate.phases)
            rows.append({"model": vit.name, **asdict(result)})
    return rows


def corrections(teacher: ViT, surrogate: ViT, batches: list[Batch]) -> list[dict[str, Any]]:
    assert surrogate.phases is not None
    rows = []
    for vit in (surrogate, teacher):
        for phase in range(1, len(surrogate.phases) + 1):
            for disturbance, size in (("noise", 0.3), ("noise", 1.0), ("dropped patches", 0.3)):
                result = measure_correction(
                    vit, batches[:4], phase, disturbance, size, max_extra=4, phases=surrogate.phases
                )
                rows.append({"model": vit.name, **asdict(result), "recovered": result.recovered})
    return rows


if __name__ == "__main__":
    main()
