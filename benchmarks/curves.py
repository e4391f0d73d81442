"""Surrogates of one teacher side by side: what their run folders hold, as one JSON and one figure.

    python benchmarks/curves.py runs/vitb16-varied-k2 runs/vitb16-varied-k3 runs/vitb16-varied-k4 \
        --beside docs/results/vitb16/varied.json --out docs/results/vitb16/eight-minutes.json

The runs shared one GPU from their first to their last step. The GPU seconds of one are computed: its images over the
images/s of all runs together, with and without teacher forcing. Top-1, agreement, R2 and relative error are those of
the run's last validation, on all its held-out images; shares have Wilson's 95 % interval over images. The comparison
with null models is the certificate's, which may be of fewer images. The figure, `.png` beside the JSON, has top-1 by
the teacher's own head, R2 of the last layer on the held-out images, and the last layer's loss in training and on the
held-out images; with mixes of two images the training loss is that of the mixes. `--beside` is an earlier result of
this script, of which the runs with the same k are drawn in a lighter colour.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy import stats

from raptor.report.style import BLACK, BLUE, ORANGE, VERMILION, use_style

COLOURS = {2: ORANGE, 3: VERMILION, 4: BLUE}
GROUPS = ("all", "cls", "patches")
SMOOTH = 25  # logged losses in one point
Json = dict[str, Any]


class Run:
    """A run folder."""

    def __init__(self, folder: Path):
        self.summary = json.loads((folder / "summary.json").read_text())
        self.certificate = json.loads((folder / "certificate.json").read_text())
        self.complexity = json.loads((folder / "complexity.json").read_text())
        self.config = yaml.safe_load((folder / "config.yaml").read_text())
        self.logged: list[Json] = []
        self.validations: list[Json] = []
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            if "loss" in row:
                self.logged.append(row)
            if "validation" in row:
                self.validations.append(row)
        recipe = self.config["recipe"]
        self.k = len(self.summary["phases"])
        self.batch_size = recipe["batch_size"]
        self.stage1_steps = self.summary["num_steps"]["stage1"]
        self.forced_steps = round(recipe["lam_until"] * self.stage1_steps)

    def rate(self, forced: bool) -> float:
        """images/s in the steps with teacher forcing, or in all others."""
        rates = [row["images_per_s"] for row in self.logged if (self.done(row) <= self.forced_steps) == forced]
        return statistics.median(rates)

    def done(self, row: Json) -> int:
        """Steps done at a logged row, of both stages."""
        done = row["step"] + 1
        if row["stage"] == "stage2":
            done += self.stage1_steps
        return done

    def gpu_seconds(self, steps: int, forced_rate: float, rate: float) -> float:
        forced = min(steps, self.forced_steps)
        return self.batch_size * (forced / forced_rate + (steps - forced) / rate)


def share(value: float, num_images: int) -> dict[str, float]:
    """A share of the images with its 95 % interval by Wilson's formula, under the names that a certificate has."""
    ends = stats.binomtest(round(value * num_images), num_images).proportion_ci(0.95, method="wilson")
    return {"value": value, "lower": float(ends.low), "upper": float(ends.high)}


def last_of(curves: Json, metric: str, groups: Any = None) -> dict[str, float]:
    """A metric at the last layer, by token group."""
    return {group: curves[group][metric][-1] for group in groups or curves}


def collect(runs: list[Run]) -> Json:
    forced_rate = sum(run.rate(True) for run in runs)
    rate = sum(run.rate(False) for run in runs)
    first = runs[0]
    return {
        "what": "surrogates of one teacher, trained at the same time on one GPU",
        "device": first.summary["device"],
        "versions": first.summary["provenance"]["versions"],
        "recipe": first.config["recipe"],
        "train_images": first.summary["train_images"],
        "validation_images": first.summary["validation"]["num_images"],
        "certificate_images": first.certificate["num_images"],
        "images_per_s": {"all runs": rate, "all runs, teacher forcing": forced_rate},
        "rows": [one(run, forced_rate, rate) for run in sorted(runs, key=lambda run: run.k)],
    }


def one(run: Run, forced_rate: float, rate: float) -> Json:
    """The row of one surrogate."""
    certificate = run.certificate
    validation = run.summary["validation"]
    curves = validation["curves"]
    num_images = validation["num_images"]
    top1 = share(validation["accuracy"], num_images)
    teacher_top1 = share(validation["teacher_accuracy"], num_images)
    steps = sum(run.summary["num_steps"].values())
    levin = {}
    for precision in ("fp32", "int8"):
        bits = run.complexity[precision]
        levin[precision] = {who: bits[who]["total_bits"] / 1e6 for who in ("surrogate", "teacher")}
    return {
        "k": run.k,
        "phases": run.summary["phases"],
        "block_parameters": certificate["costs"]["surrogate"]["block_parameters"],
        "teacher_block_parameters": certificate["costs"]["teacher"]["block_parameters"],
        "num_steps": run.summary["num_steps"],
        "images_seen": steps * run.batch_size,
        "gpu_seconds": run.gpu_seconds(steps, forced_rate, rate),
        "seconds": run.summary["seconds"],
        "top1": top1,
        "teacher_top1": teacher_top1,
        "kept": top1["value"] / teacher_top1["value"],
        "agreement": share(validation["agreement"], num_images),
        "r2_last": last_of(curves, "r2"),
        "r2_uniform_last": last_of(curves, "r2_uniform"),
        "relative_error": {group: max(curve["relative"]) for group, curve in curves.items()},
        "null_models_r2_last": {name: null["all"]["r2"][-1] for name, null in certificate["nulls"].items()},
        "layers_ahead_of_null_models": certificate["verdict"]["groups"]["all"]["layers_ahead"],
        "levin_megabits": levin,
        "levin_ratio": {precision: run.complexity[precision]["ratio"] for precision in levin},
        "curve": [validated(run, row, forced_rate, rate) for row in run.validations],
        "train_loss": training_losses(run),
    }


def validated(run: Run, row: Json, forced_rate: float, rate: float) -> Json:
    """A point of the curves: one validation."""
    found = row["validation"]
    steps = run.done(row)
    return {
        "stage": row["stage"],
        "step": row["step"] + 1,
        "images": steps * run.batch_size,
        "gpu_seconds": run.gpu_seconds(steps, forced_rate, rate),
        "top1": found["accuracy"],
        "agreement": found["agreement"],
        "r2_last": last_of(found["curves"], "r2", GROUPS),
        "r2_uniform_last": last_of(found["curves"], "r2_uniform", GROUPS),
    }


def training_losses(run: Run) -> list[Json]:
    """The last layer's loss in stage 2, a mean over some logged ones for each point."""
    rows = [row for row in run.logged if row["stage"] == "stage2"]
    losses = []
    for first in range(0, len(rows), SMOOTH):
        part = rows[first : first + SMOOTH]
        mean = statistics.mean(row["layer_loss"][-1] for row in part)
        losses.append({"images": run.done(part[-1]) * run.batch_size, "loss_last": mean})
    return losses


def draw(found: Json, beside: Json | None, name: str, own_name: str) -> Any:
    plt = use_style()
    measure = "r2_last"
    if found["recipe"]["normalise"] == "coordinate":
        measure = "r2_uniform_last"
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.3))
    teacher = 100 * found["rows"][0]["teacher_top1"]["value"]
    axes[0].axhline(teacher, color=BLACK, linestyle="--", linewidth=1.5)
    axes[0].text(0.1, teacher + 1, "the teacher", va="bottom")
    drawn: set[int] = set()
    for row in found["rows"]:
        label = f"k={row['k']}"
        if beside is not None:
            label += f", {own_name}"
        draw_row(axes, row, label, COLOURS[row["k"]], measure)
        drawn.add(row["k"])
    for row in beside["rows"] if beside is not None else []:
        if row["k"] in drawn:
            draw_row(axes, row, f"k={row['k']}, {name}", (COLOURS[row["k"]], 0.35), measure)
    axes[0].set(title="Top-1 by the teacher's own head", ylabel="%", ylim=(0, 1.15 * teacher))
    axes[1].set(title="R² of the last layer, held out: patches (solid), cls", ylabel="R²")
    what = {"r2_last": "R²", "r2_uniform_last": "mean R² of single coordinates"}[measure]
    axes[2].set(title="Loss of the last layer: held out, training (dotted)", ylabel=f"1 - {what}, cls and patches")
    axes[1].set_ylim(bottom=max(axes[1].get_ylim()[0], -0.3))  # the first steps may be far below
    axes[2].set_ylim(bottom=0)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    for axis in axes:
        axis.set_xlabel("GPU minutes")
        axis.set_xlim(left=0)
    return figure


def draw_row(axes: Any, row: Json, label: str, colour: Any, measure: str) -> None:
    """The curves of one surrogate."""
    points = row["curve"]
    minutes = [point["gpu_seconds"] / 60 for point in points]
    axes[0].plot(minutes, [100 * point["top1"] for point in points], "o-", color=colour, label=label)
    for group, line in (("patches", "-"), ("cls", "--")):
        values = [point["r2_last"][group] for point in points]
        axes[1].plot(minutes, values, line, marker="o", color=colour, label=f"{label}, {group}")
    own_minutes = []
    losses = []
    for minute, point in zip(minutes, points):
        if point["stage"] != "stage2":
            continue
        if measure not in point:  # an earlier run with another loss
            return
        own_minutes.append(minute)
        losses.append(1 - (point[measure]["cls"] + point[measure]["patches"]) / 2)
    axes[2].plot(own_minutes, losses, "o-", color=colour)
    images = [point["images"] for point in points]
    training = np.interp([point["images"] for point in row["train_loss"]], images, minutes)
    axes[2].plot(training, [point["loss_last"] for point in row["train_loss"]], ":", color=colour)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    found = collect([Run(folder) for folder in args.runs])
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    beside = None
    name = ""
    if args.beside is not None:
        beside = json.loads(args.beside.read_text())
        name = args.beside.stem.replace("-", " ")
    figure = draw(found, beside, name, args.out.stem.replace("-", " "))
    figure.savefig(args.out.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main()
