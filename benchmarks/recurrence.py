"""What recurrence is good for on the built-in models: depth on demand, watching, editing, correcting.

    python benchmarks/recurrence.py --out docs/results/recurrence.json
    python benchmarks/recurrence.py --draw docs/results/recurrence.json    # the figures beside it

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

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

from raptor import iterate, open_data, open_vit
from raptor.data.stream import Batch
from raptor.phases.cut import Phases
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
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="measure, and write this file")
    what.add_argument("--draw", type=Path, help="draw the figures of this file")
    parser.add_argument("--num_images", type=int, default=512)
    args = parser.parse_args()
    if args.draw is not None:
        draw(json.loads(args.draw.read_text()), args.draw.parent)
        return
    teacher = open_vit("scenes")
    surrogate = open_vit("scenes-k3")
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
    usual = batches[:half]
    judged = batches[half:]
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


def draw(found: dict[str, Any], folder: Path) -> None:
    """One figure for each of the four uses."""
    for name, panel in (("depth", draw_depth), ("watch", draw_watch), ("edit", draw_edit), ("correct", draw_correct)):
        figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
        panel(axes, found[name])
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(folder / f"recurrence-{name}.png", dpi=150)
        plt.close(figure)


def draw_depth(axes: Axes, found: dict[str, Any]) -> None:
    families = ("turn", "entropy", "kl", "random", "one step fewer")
    for model, marker in zip(found, ("o", "s")):
        for color, family in enumerate(families):
            points = [point for point in found[model] if point["rule"].startswith(family)]
            blocks = [100 * point["blocks"] for point in points]
            agreement = [100 * point["agreement"] for point in points]
            side = "surrogate"
            if model == "scenes":
                side = "teacher"
            axes.plot(blocks, agreement, marker=marker, color=f"C{color}", label=f"{family}, {side}", lw=1, ms=5)
    axes.set(xlabel="blocks that an image passes, %", ylabel="agreement with the teacher, %")
    axes.legend(fontsize=7, ncols=2)


def draw_watch(axes: Axes, found: dict[str, Any]) -> None:
    changes = [name for name in found if name != "false alarms"]
    scores = list(found[changes[0]])
    for place, score in enumerate(scores):
        for row, change in enumerate(changes):
            detected = found[change][score]
            low, high = detected["auroc_interval"]
            where = row + (place - len(scores) / 2) * 0.12
            color = "black" if score == "surrogate" else f"C{place}"
            label = None
            if row == 0:
                label = score
            axes.errorbar(
                where,
                detected["auroc"],
                [[detected["auroc"] - low], [high - detected["auroc"]]],
                fmt="o",
                color=color,
                label=label,
                ms=4,
            )
    axes.axhline(0.5, color="grey", lw=0.8, ls=":")
    axes.set(xticks=range(len(changes)), xticklabels=changes, ylabel="AUROC, 95 % interval", ylim=(0, 1.28))
    axes.legend(fontsize=7, ncols=3, loc="upper left")


def draw_edit(axes: Axes, rows: list[dict[str, Any]]) -> None:
    columns = {
        "flipped": "flipped by the edit",
        "random": "by a random direction",
        "at_the_end": "same step at the last layer",
        "gradient": "along the head's gradient",
        "stays": "stays for four steps",
    }
    names = []
    for row in rows:
        side = "surrogate"
        if row["model"] == "scenes":
            side = "teacher"
        names.append(f"{side}\nphase {row['phase']}")
    for place, (column, label) in enumerate(columns.items()):
        where = [x + (place - 2) * 0.15 for x in range(len(rows))]
        axes.bar(where, [100 * (row[column] or 0) for row in rows], width=0.14, label=label)
    axes.set(xticks=range(len(rows)), ylabel="share of images, %", ylim=(0, 135))
    axes.set_xticklabels(names, fontsize=8)
    axes.legend(fontsize=7, ncols=2, loc="upper left")


def draw_correct(axes: Axes, rows: list[dict[str, Any]]) -> None:
    some = [row for row in rows if (row["disturbance"], row["size"]) == ("dropped patches", 0.3)]
    for row in some:
        side = "surrogate"
        if row["model"] == "scenes":
            side = "teacher"
        style = "-"
        if side == "surrogate":
            style = "--"
        agreement = [100 * share for share in row["agreement"]]
        label = f"{side}, phase {row['phase']}"
        axes.plot(agreement, style, color=f"C{row['phase'] - 1}", marker="o", ms=4, label=label)
    axes.set(xlabel="further steps of the phase", ylabel="agreement with the clean image, %", ylim=(0, 102))
    axes.set_xticks(range(5))
    axes.legend(fontsize=7, ncols=2)


if __name__ == "__main__":
    main()
