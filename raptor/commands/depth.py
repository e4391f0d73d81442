"""raptor depth: what depth on demand saves and costs, of a surrogate and of its teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from raptor.commands.tool import ToolResult, open_tool
from raptor.config import DepthConfig
from raptor.progress import Progress
from raptor.provenance import command
from raptor.recurrence.depth import DepthFile, Side, depth_findings, fitting_rules, measure_depth
from raptor.report.charts import Chart
from raptor.report.tool import depth_charts
from raptor.surrogate.at_speed import at_speed
from raptor.vit.on_demand import parse_rule

# Training images, so that no threshold knows the images that are judged.
_FITTING_IMAGES = 64
_ROUNDS = 3  # of timing each batch: the shortest time counts, because other programs only add to it


@dataclass
class Depth(ToolResult):
    """The result in depth.json; its figure has agreement against milliseconds."""

    measured: DepthFile

    def charts(self) -> list[Chart]:
        return depth_charts(self.measured)

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per model and rule."""
        sides = self.measured.sides()
        return [{"side": side, **vars(point)} for side, points in sides.items() for point in points]

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
        return self.told(lines + self.measured.findings)


@command(DepthConfig)
def depth(config: DepthConfig) -> Depth:
    """Measure what it saves to end phases early, image by image, and what it costs."""
    job = open_tool(config, DepthFile)
    assert job.head is not None
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
            side.rules = {word: parse_rule(word, side.vit.groups, side.read_out, config.seed) for word in config.exit}
    # In one call, because all rules of both models take turns on each batch: a machine that slows down does so for all.
    with Progress("depth on demand", len(job.judged), "images") as bar:
        points = measure_depth(sides, teacher, job.stream(progress=bar.update), job.precision, _ROUNDS)
    measured = DepthFile(
        **job.about(depth_findings(points)),
        batch_size=job.batch_size,
        # Milliseconds on a CPU mean little without the number of threads.
        num_threads=torch.get_num_threads(),
        surrogate=points["surrogate"],
        teacher=points["teacher"],
    )
    job.write(measured, depth_charts, measured.images)
    return Depth(measured, job.folder)
