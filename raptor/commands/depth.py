"""raptor depth: what depth on demand saves and costs, of a surrogate and of its teacher."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raptor.config import DepthConfig
from raptor.progress import Progress
from raptor.provenance import command
from raptor.recurrence.depth import DepthFile, Side, depth_findings, fitting_rules, measure_depth
from raptor.recurrence.job import open_job
from raptor.streaming import Result
from raptor.surrogate.at_speed import at_speed
from raptor.vit.on_demand import Rule, parse_rule

# Training images, so that no threshold knows the images that are judged.
_FITTING_IMAGES = 64
ROUNDS = 3  # of timing each batch: the shortest time counts, because other programs only add to it


@dataclass
class Depth(Result):
    """The result in depth.json, and where it was written."""

    measured: DepthFile
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        return {"depth": self.measured.to_dict(), "folder": str(self.folder)}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per model and rule."""
        sides = self.measured.sides()
        return [{"side": side, **vars(point)} for side, points in sides.items() for point in points]

    def plot(self) -> Any:
        """Agreement against milliseconds."""
        from raptor.report.figures import drawn
        from raptor.report.tool import depth_charts

        return drawn("depth", depth_charts(self.measured), self.measured.images)

    def text(self) -> str:
        lines = [f"depth on demand, {self.measured.images}, batches of {self.measured.batch_size}:"]
        for side, points in self.measured.sides().items():
            lines.append(f"{side:<22} ms/image  times faster  GFLOPs  blocks  agreement  accuracy")
            for point in points:
                accuracy = "" if point.accuracy is None else f"{point.accuracy:9.1%}"
                lines.append(
                    f"  {point.rule:<20} {point.milliseconds:8.3f}  {point.speedup:12.2f}  {point.gflops:6.3f}  "
                    f"{point.blocks:6.1%}  {point.agreement:9.1%}  {accuracy}".rstrip()
                )
        lines += self.measured.findings
        return "\n".join([*lines, f"written to {self.folder}: depth.json and figures/depth"])


@command(DepthConfig)
def depth(config: DepthConfig) -> Depth:
    """Measure what it saves to end phases early, image by image, and what it costs."""
    job = open_job(config, DepthFile.FILE)
    # As it would be used: otherwise each call makes the factors of each layer again.
    surrogate = Side(at_speed(job.surrogate), job.head, job.phases)
    # A teacher has no phases of its own, so it runs under the cut of its surrogate.
    teacher = Side(job.teacher, job.head, job.phases)
    sides = {"surrogate": surrogate, "teacher": teacher}
    fitting = job.stream(job.training_images(_FITTING_IMAGES))
    for side in sides.values():
        if config.exit is None:
            side.rules = fitting_rules(side, fitting, config.seed, job.precision)
        else:
            side.rules = _named_rules(side, config.exit, config.seed)
    bar = Progress("depth on demand", len(job.images), "images")
    # In one call, because all rules of both models take turns on each batch: a machine that slows down does so for all.
    points = measure_depth(sides, teacher, job.stream(progress=bar.update), job.precision, ROUNDS)
    bar.finish()
    measured = DepthFile(
        **job.about(depth_findings(points)),
        batch_size=job.batch_size,
        # Milliseconds on a CPU mean little without the number of threads.
        num_threads=torch.get_num_threads(),
        surrogate=points["surrogate"],
        teacher=points["teacher"],
    )
    _write(measured, job.folder)
    return Depth(measured, job.folder)


def _named_rules(side: Side, words: list[str], seed: int) -> dict[str, Rule]:
    return {word: parse_rule(word, side.vit.groups, side.read_out, seed) for word in words}


def _write(measured: DepthFile, folder: Path) -> None:
    from raptor.report.figures import save_figures
    from raptor.report.tool import depth_charts

    measured.write(folder)
    save_figures(depth_charts(measured), folder / "figures", measured.images)
