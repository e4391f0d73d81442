"""Surrogates of one teacher side by side: what their run folders hold, as one JSON and one figure.

    python benchmarks/curves.py runs/vitb16-varied-k2 runs/vitb16-varied-k3 runs/vitb16-varied-k4 \
        --beside docs/results/vitb16.json --out docs/results/vitb16/varied.json

The runs shared one GPU from their first to their last step. The GPU seconds of one are computed: its images over the
images/s of all runs together, with and without teacher forcing. Top-1, agreement, R2 and relative error are those of
the run's last validation, on all its held-out images; shares have Wilson's 95 % interval over images. The comparison
with null models is the certificate's, which may be of fewer images. The figure, `.png` beside the JSON, has top-1 by
the teacher's own head, R2 of the last layer on the held-out images, and the last layer's loss in training and on the
held-out images; with mixes of two images the training loss is that of the mixes. `--beside` is the result of earlier
runs: of one, drawn in grey, or of this script, of which the runs with the same k are drawn in a lighter colour.
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

from raptor.report.style import BLACK, BLUE, GREY, ORANGE, VERMILION, use_style

COLOURS = {2: ORANGE, 3: VERMILION, 4: BLUE}
GROUPS = ("all", "cls", "patches")
SMOOTH = 25  # logged losses in one point


class Run:
    """A run folder."""

    def __init__(self, folder: Path):
        self.summary = json.loads((folder / "summary.json").read_text())
        self.certificate = json.loads((folder / "certificate.json").read_text())
        self.complexity = json.loads((folder / "complexity.json").read_text())
        self.config = yaml.safe_load((folder / "config.yaml").read_text())
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.logged = [row for row in rows if "loss" in row]
        self.validations = [row for row in rows if "validation" in row]
        recipe = self.config["recipe"]
        self.batch_size = recipe["batch_size"]
        self.stage1_steps = self.summary["num_steps"]["stage1"]
        self.forced_steps = round(recipe["lam_until"] * self.stage1_steps)

    def rate(self, forced: bool) -> float:
        """images/s in the steps with teacher forcing, or in all others."""
        rates = [row["images_per_s"] for row in self.logged if (self.done(row) <= self.forced_steps) == forced]
        return statistics.median(rates)

    def done(self, row: dict[str, Any]) -> int:
        """Steps done at a logged row, of both stages."""
        return row["step"] + 1 + (self.stage1_steps if row["stage"] == "stage2" else 0)

    def gpu_seconds(self, steps: int, forced_rate: float, rate: float) -> float:
        forced = min(steps, self.forced_steps)
        return self.batch_size * (forced / forced_rate + (steps - forced) / rate)


def of_counts(num_right: float, num: int) -> tuple[float, float, float]:
    """A share of `num` images with its 95 % interval by Wilson's formula."""
    ends = stats.binomtest(round(num_right), num).proportion_ci(0.95, method="wilson")
    return num_right / num, float(ends.low), float(ends.high)


def collect(runs: list[Run]) -> dict[str, Any]:
    forced_rate, rate = (sum(run.rate(forced) for run in runs) for forced in (True, False))
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
        "rows": [one(run, forced_rate, rate) for run in sorted(runs, key=lambda run: len(run.summary["phases"]))],
    }


def one(run: Run, forced_rate: float, rate: float) -> dict[str, Any]:
    """The row of one surrogate."""
    certificate, validation = run.certificate, run.summary["validation"]
    curves, shares = validation["curves"], ("accuracy", "teacher_accuracy", "agreement")
    top1, teacher_top1, agreement = (share(validation[name], validation["num_images"]) for name in shares)

    def point(row: dict[str, Any]) -> dict[str, Any]:
        steps, found = run.done(row), row["validation"]
        return {
            "stage": row["stage"],
            "step": row["step"] + 1,
            "images": steps * run.batch_size,
            "gpu_seconds": run.gpu_seconds(steps, forced_rate, rate),
            "top1": found["accuracy"],
            "agreement": found["agreement"],
            "r2_last": {group: found["curves"][group]["r2"][-1] for group in GROUPS},
            "r2_uniform_last": {group: found["curves"][group]["r2_uniform"][-1] for group in GROUPS},
        }

    losses = [
        {"images": run.done(rows[-1]) * run.batch_size, "loss_last": mean_of(rows)}
        for rows in by_number([row for row in run.logged if row["stage"] == "stage2"], SMOOTH)
    ]
    costs, steps = certificate["costs"], sum(run.summary["num_steps"].values())
    return {
        "k": len(run.summary["phases"]),
        "phases": run.summary["phases"],
        "block_parameters": costs["surrogate"]["block_parameters"],
        "teacher_block_parameters": costs["teacher"]["block_parameters"],
        "num_steps": run.summary["num_steps"],
        "images_seen": steps * run.batch_size,
        "gpu_seconds": run.gpu_seconds(steps, forced_rate, rate),
        "seconds": run.summary["seconds"],
        "top1": top1,
        "teacher_top1": teacher_top1,
        "kept": top1["value"] / teacher_top1["value"],
        "agreement": agreement,
        "r2_last": {group: found["r2"][-1] for group, found in curves.items()},
        "r2_uniform_last": {group: found["r2_uniform"][-1] for group, found in curves.items()},
        "relative_error": {group: max(found["relative"]) for group, found in curves.items()},
        "null_models_r2_last": {name: found["all"]["r2"][-1] for name, found in certificate["nulls"].items()},
        "layers_ahead_of_null_models": certificate["verdict"]["groups"]["all"]["layers_ahead"],
        "levin_megabits": {
            precision: {who: run.complexity[precision][who]["total_bits"] / 1e6 for who in ("surrogate", "teacher")}
            for precision in ("fp32", "int8")
        },
        "levin_ratio": {precision: run.complexity[precision]["ratio"] for precision in ("fp32", "int8")},
        "curve": [point(row) for row in run.validations],
        "train_loss": losses,
    }


def share(value: float, num_images: int) -> dict[str, float]:
    """A share of images with its interval, under the names that a certificate has."""
    return dict(zip(("value", "lower", "upper"), of_counts(value * num_images, num_images)))


def by_number(rows: list[Any], num: int) -> list[list[Any]]:
    return [rows[first : first + num] for first in range(0, len(rows), num)]


def mean_of(rows: list[dict[str, Any]]) -> float:
    return statistics.mean(row["layer_loss"][-1] for row in rows)


def earlier(beside: dict[str, Any] | None, found: dict[str, Any], name: str) -> list[tuple[str, Any, str, Any]]:
    """Label, colour, clock and row of the runs in `beside` that are drawn."""
    if beside is None:
        return []
    if "rows" not in beside:
        return [("k=3, the earlier run", GREY, "gpu_seconds_alone", beside)]
    same = [row for row in beside["rows"] if row["k"] in {row["k"] for row in found["rows"]}]
    return [(f"k={row['k']}, {name}", (COLOURS[row["k"]], 0.35), "gpu_seconds", row) for row in same]


def draw(found: dict[str, Any], beside: dict[str, Any] | None, name: str, own_name: str) -> Any:
    plt = use_style()
    measure = "r2_uniform_last" if found["recipe"]["normalise"] == "coordinate" else "r2_last"
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.3))
    teacher = 100 * found["rows"][0]["teacher_top1"]["value"]
    axes[0].axhline(teacher, color=BLACK, linestyle="--", linewidth=1.5)
    axes[0].text(0.1, teacher + 1, "the teacher", va="bottom")
    which = f", {own_name}" if beside is not None and "rows" in beside else ""
    curves: list[tuple[str, Any, str, Any]] = [
        (f"k={row['k']}{which}", COLOURS[row["k"]], "gpu_seconds", row) for row in found["rows"]
    ]
    for label, colour, clock, row in curves + earlier(beside, found, name):
        minutes = [point[clock] / 60 for point in row["curve"]]
        axes[0].plot(minutes, [100 * point["top1"] for point in row["curve"]], "o-", color=colour, label=label)
        for group, line in (("patches", "-"), ("cls", "--")):
            values = [point["r2_last"][group] for point in row["curve"]]
            axes[1].plot(minutes, values, line, marker="o", color=colour, label=f"{label}, {group}")
        held_out = [(m, point) for m, point in zip(minutes, row["curve"]) if point["stage"] == "stage2"]
        if not all(measure in point for _, point in held_out):  # of another loss
            continue
        losses = [1 - (point[measure]["cls"] + point[measure]["patches"]) / 2 for _, point in held_out]
        axes[2].plot([m for m, _ in held_out], losses, "o-", color=colour)
        images, seconds = ([point[name] for point in row["curve"]] for name in ("images", clock))
        training = [np.interp(point["images"], images, seconds) / 60 for point in row["train_loss"]]
        axes[2].plot(training, [point["loss_last"] for point in row["train_loss"]], ":", color=colour)
    axes[0].set(title="Top-1 by the teacher's own head", ylabel="%", ylim=(0, 1.15 * teacher))
    axes[1].set(title="R² of the last layer, held out: patches (solid), cls", ylabel="R²")
    what = "mean R² of single coordinates" if measure == "r2_uniform_last" else "R²"
    axes[2].set(title="Loss of the last layer: held out, training (dotted)", ylabel=f"1 - {what}, cls and patches")
    axes[1].set_ylim(bottom=max(axes[1].get_ylim()[0], -0.3))  # the first steps may be far below
    axes[2].set_ylim(bottom=0)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    for axis in axes:
        axis.set_xlabel("GPU minutes")
        axis.set_xlim(left=0)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    found = collect([Run(folder) for folder in args.runs])
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    beside = json.loads(args.beside.read_text()) if args.beside else None
    beside_name, own_name = (path.stem.replace("-", " ") if path else "" for path in (args.beside, args.out))
    draw(found, beside, beside_name, own_name).savefig(args.out.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main()
