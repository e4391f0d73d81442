"""raptor edit: a state is moved towards another class at the end of a phase."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raptor.config import EditConfig
from raptor.progress import Progress
from raptor.provenance import command
from raptor.recurrence.edit import EditFile, EditResult, class_means, edit_findings, measure_edit
from raptor.recurrence.job import ToolJob, chosen_phases, open_job
from raptor.streaming import Result

_MEAN_IMAGES = 1000  # training images whose states give the means of the classes


@dataclass
class Editing(Result):
    """The result in edit.json, and where it was written."""

    measured: EditFile
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        return {"edit": self.measured.to_dict(), "folder": str(self.folder)}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per model and phase."""
        sides = self.measured.sides()
        return [{"side": side, **vars(one)} for side, results in sides.items() for one in results]

    def plot(self) -> Any:
        """Shares of images that edits and their controls flip."""
        from raptor.report.figures import drawn
        from raptor.report.tool import edit_charts

        return drawn("edit", edit_charts(self.measured), self.measured.images)

    def text(self) -> str:
        found = self.measured
        lines = [f"edits towards {found.class_name}, {found.images}, class means of {found.num_means} training images:"]
        lines += [f"  {line}" for line in found.findings]
        return "\n".join([*lines, f"written to {self.folder}: edit.json and figures/edit"])


@command(EditConfig)
def edit(config: EditConfig) -> Editing:
    """Edit the state at the end of a phase, so that an image is taken for another class."""
    job = open_job(config, EditFile.FILE)
    to = _class_number(job, config.to)
    phases = chosen_phases(job.phases, config.at)
    # The last end is the model's last layer, where a control makes the same step.
    ends = [last for _, last in job.phases.spans]
    # The means are fitted, so they come from training images and not from those that are edited.
    fitted = job.training_images(config.train_images or _MEAN_IMAGES)
    sides: dict[str, list[EditResult]] = {}
    for side, vit in (("surrogate", job.surrogate), ("teacher", job.teacher)):
        read_out = job.read_out(vit)
        bar = Progress(f"class means of the {side}", len(fitted), "images")
        means = class_means(vit, job.stream(fitted, bar.update), ends, read_out, job.precision)
        bar.finish()
        bar = Progress(f"edits of the {side}", None, "image passes")
        sides[side] = []
        for phase in phases:
            batches = job.stream(progress=bar.update)
            sides[side].append(
                measure_edit(vit, batches, means, to, phase, job.phases, read_out, config.seed, job.precision)
            )
        bar.finish()
    measured = EditFile(
        **job.about(edit_findings(sides)),
        to=to,
        class_name=_class_names(job)[to],
        num_means=len(fitted),
        surrogate=sides["surrogate"],
        teacher=sides["teacher"],
    )
    _write(measured, job.folder)
    return Editing(measured, job.folder)


def _class_names(job: ToolJob) -> list[str]:
    """The classes of the head, by their numbers where nothing names them."""
    names = job.head.classes or job.teacher.classes
    return list(names) if names else [str(number) for number in range(job.head.num_classes)]


def _class_number(job: ToolJob, wanted: str | None) -> int:
    names = _class_names(job)
    some = ", ".join(names[:3])
    if wanted is None:
        raise ValueError(f"name the class to edit towards: --to CLASS, one of {len(names)} such as {some}")
    if wanted in names:
        return names.index(wanted)
    # After the names, because a class may be called `7`.
    if wanted.isdigit() and int(wanted) < len(names):
        return int(wanted)
    close = difflib.get_close_matches(wanted, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"give one of {len(names)} such as {some}, or its number"
    raise ValueError(f"--to {wanted} is not a class of {job.teacher.name}: {hint}")


def _write(measured: EditFile, folder: Path) -> None:
    from raptor.report.figures import save_figures
    from raptor.report.tool import edit_charts

    measured.write(folder)
    save_figures(edit_charts(measured), folder / "figures", measured.images)
