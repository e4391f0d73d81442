"""raptor edit: a state is moved towards another class at the end of a phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raptor.checks import near_miss
from raptor.commands.pair_job import SurrogateJob, chosen_phases
from raptor.commands.tool import ToolResult, open_tool
from raptor.config import EditConfig
from raptor.progress import Progress
from raptor.provenance import command
from raptor.recurrence.edit import EditFile, EditResult, class_means, edit_findings, measure_edit
from raptor.report.charts import Chart
from raptor.report.tool import edit_charts

_MEAN_IMAGES = 1000  # training images whose states give the means of the classes


@dataclass
class Editing(ToolResult):
    """The result in edit.json; its figure has the shares of images that edits and their controls flip."""

    measured: EditFile

    def charts(self) -> list[Chart]:
        return edit_charts(self.measured)

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per model and phase."""
        sides = self.measured.sides()
        return [{"side": side, **vars(one)} for side, results in sides.items() for one in results]

    def text(self) -> str:
        found = self.measured
        about = f"{found.images}, class means of {found.num_means} training images:"
        return self.told([f"edits towards {found.class_name}, {about}", *(f"  {line}" for line in found.findings)])


@command(EditConfig)
def edit(config: EditConfig) -> Editing:
    """Edit the state at the end of a phase, so that an image is taken for another class."""
    job = open_tool(config, EditFile)
    to = _class_number(job, config.to)
    phases = chosen_phases(job.phases, config.at)
    # The last end is the model's last layer, where a control makes the same step.
    ends = [last for _, last in job.phases.spans]
    # The means are fitted, so they come from training images and not from those that are edited.
    fitted = job.training_images(config.train_images or _MEAN_IMAGES)
    sides: dict[str, list[EditResult]] = {}
    for side, vit in (("surrogate", job.surrogate), ("teacher", job.teacher)):
        read_out = job.read_out(vit)
        with Progress(f"class means of the {side}", len(fitted), "images") as bar:
            means = class_means(vit, job.stream(fitted, bar.update), ends, read_out, job.precision)
        sides[side] = []
        with Progress(f"edits of the {side}", None, "image passes") as bar:
            for phase in phases:
                batches = job.stream(progress=bar.update)
                sides[side].append(
                    measure_edit(vit, batches, means, to, phase, job.phases, read_out, config.seed, job.precision)
                )
    measured = EditFile(
        **job.about(edit_findings(sides)),
        to=to,
        class_name=_class_names(job)[to],
        num_means=len(fitted),
        surrogate=sides["surrogate"],
        teacher=sides["teacher"],
    )
    job.write(measured, edit_charts, measured.images)
    return Editing(measured, job.folder)


def _class_names(job: SurrogateJob) -> list[str]:
    """The classes of the head, by their numbers where nothing names them."""
    assert job.head is not None
    names = job.head.classes or job.teacher.classes
    return list(names or map(str, range(job.head.num_classes)))


def _class_number(job: SurrogateJob, wanted: str | None) -> int:
    names = _class_names(job)
    some = ", ".join(names[:3])
    if wanted is None:
        raise ValueError(f"name the class to edit towards: --to CLASS, one of {len(names)} such as {some}")
    if wanted in names:
        return names.index(wanted)
    # After the names, because a class may be called `7`.
    if wanted.isdigit() and int(wanted) < len(names):
        return int(wanted)
    hint = near_miss(wanted, names, f"{len(names)} such as {some}, or give its number")
    raise ValueError(f"--to {wanted} is not a class of {job.teacher.name}{hint}")
