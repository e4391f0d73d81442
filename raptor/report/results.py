"""A run folder as the page reads it. Every file is optional; a damaged one is an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raptor.certificate.certificate import Certificate
from raptor.certificate.error_curves import Curves
from raptor.certificate.rate import Complexity
from raptor.certificate.verdict import Verdict
from raptor.dynamics.interventions import InterventionsFile
from raptor.dynamics.measure import DynamicsFile
from raptor.dynamics.tangents import TangentsFile
from raptor.files import RunError, read_json, read_yaml
from raptor.phases.study import PhasesFile
from raptor.probes.result import ProbeReport
from raptor.provenance import Provenance
from raptor.recurrence.correct import CorrectFile
from raptor.recurrence.depth import DepthFile
from raptor.recurrence.edit import EditFile
from raptor.recurrence.watch import WatchFile
from raptor.report.strips import ImagesFile
from raptor.run import ResultFile, read_metrics, read_summary
from raptor.subject import Subject, other_models
from raptor.train.distilled import DistillSummary
from raptor.train.teacher import TeacherSummary
from raptor.vit.pair import OTHER_TEACHER
from raptor.vit.saved import saved_folder
from raptor.vit.view import ModelFacts

TASKS = ("classify", "segment", "depth")
# In the order of the page, because its table of commands follows it.
_KINDS: tuple[type[ResultFile], ...] = (
    PhasesFile,
    Certificate,
    Complexity,
    DynamicsFile,
    InterventionsFile,
    TangentsFile,
    DepthFile,
    WatchFile,
    EditFile,
    CorrectFile,
    ImagesFile,
)
# Lists that may lack a number: before the first state that depends on the image, past the rank of a fit, on a diagonal,
# of phases of one block (they have no pairs of equal distance), of a head that diverged.
_MAY_LACK = {
    "scatter_ratio",
    "path",
    "eigenvalues",
    "amplitudes",
    "cost",
    "within",
    "matched_std",
    "split_scores",
}


@dataclass
class Results:
    """The results of a run folder; None where there is no such file.

    Attributes:
        probes: task -> its probes.
        config: `config.yaml`, empty when there is none.
        losses: stage -> (step, loss) of each line of `metrics.jsonl` that has a loss.
        notes: why a part could not be made, by the name of its file without `.json`.
    """

    folder: Path
    summary: DistillSummary | TeacherSummary | None = None
    phases: PhasesFile | None = None
    certificate: Certificate | None = None
    complexity: Complexity | None = None
    probes: dict[str, ProbeReport] = field(default_factory=dict)
    dynamics: DynamicsFile | None = None
    interventions: InterventionsFile | None = None
    tangents: TangentsFile | None = None
    depth: DepthFile | None = None
    watch: WatchFile | None = None
    edit: EditFile | None = None
    correct: CorrectFile | None = None
    images: ImagesFile | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    losses: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def files(self) -> dict[str, Any]:
        """The files that are there, by their names without `.json`."""
        found: dict[str, Any] = {"summary": self.summary}
        for kind in _KINDS:
            if kind is DynamicsFile:  # probes stand before it, as on the page
                found |= {f"probe-{task}": report for task, report in self.probes.items()}
            name = Path(kind.FILE).stem
            found[name] = getattr(self, name)
        return {name: file for name, file in found.items() if file is not None}

    def provenance(self) -> dict[str, Provenance]:
        """Where each file came from, by its name without `.json`."""
        return {name: file.provenance for name, file in self.files().items()}

    @property
    def subject(self) -> tuple[str, Subject] | None:
        """The file that says what the page is about, and its subject: of a surrogate, if there is one."""
        first = None
        for name, file in self.files().items():
            if file.subject is None or self._is_of_another_teacher(file.subject):
                continue
            if file.subject.teacher is not None:
                return name, file.subject
            # A file about a surrogate and its teacher says more, so the search goes on.
            first = first or (name, file.subject)
        return first

    @property
    def measured(self) -> tuple[Subject, str] | None:
        """Of a folder that is no run: the subject of its phases or dynamics, and which part of the data they are of.

        None where they do not name a single model and its images.
        """
        if self.config or saved_folder(str(self.folder)) is not None:
            return None
        subject = None
        split = "val"
        if self.phases is not None and self.phases.models:
            subject, split = self.phases.subject, self.phases.models[0].split
        elif self.dynamics is not None:
            subject, split = self.dynamics.subject, self.dynamics.split
        if subject is None or subject.teacher is not None or subject.images is None:
            return None
        return subject, split

    def check_models(self) -> None:
        """Raise RunError where two files are about different models: a page has one title."""
        if self.subject is None:
            return
        own_name, own = self.subject
        for name, file in self.files().items():
            subjects = [file.subject]
            if isinstance(file, PhasesFile):
                # A comparison of several models has no subject of its own, and its first model would take the title.
                subjects = [entry.subject for entry in file.models]
            for subject in subjects:
                if subject is None or self._is_of_another_teacher(subject):
                    continue
                others = other_models(own, subject)
                if others:
                    where = self.folder if name == "images" else self.folder / f"{name}.json"
                    raise RunError(
                        f"{where} is about {' and '.join(others)}, and {own_name}.json about {own.model}: "
                        "a page shows one model, so give each a folder of its own"
                    )

    def _is_of_another_teacher(self, subject: Subject) -> bool:
        """Whether the command was told to take another teacher; its name says so wherever the page names it."""
        is_run = self.summary is not None or saved_folder(str(self.folder)) is not None
        return is_run and (subject.teacher or subject.model).endswith(OTHER_TEACHER)

    @property
    def distilled(self) -> DistillSummary | None:
        """The summary of a distillation."""
        return self.summary if isinstance(self.summary, DistillSummary) else None

    @property
    def phase_lengths(self) -> list[int] | None:
        """The phases that the page draws: of the surrogate, else of the dynamics, else chosen from the similarity."""
        # What was measured comes before what was suggested: charts mark the phases that a model has.
        for file in (self.certificate, self.distilled, self.dynamics):
            if file is not None and file.phases:
                return list(file.phases)
        if self.phases is not None and self.phases.models and self.phases.models[0].chosen is not None:
            return list(self.phases.models[0].chosen)
        return None

    @property
    def curves(self) -> Curves | None:
        """The surrogate's error curves from the certificate, else from the run's own validation."""
        if self.certificate is not None:
            return self.certificate.curves
        if self.distilled is not None:
            return Curves.from_dict(self.distilled.validation.curves)
        return None

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of the certificate, else of the run's own validation."""
        if self.certificate is not None:
            return self.certificate.judged
        if self.distilled is not None:
            return self.distilled.verdict
        return None

    @property
    def facts(self) -> ModelFacts | None:
        """Facts about the teacher; None when no file has them."""
        # A distillation knows its teacher best: other files may be about the surrogate only.
        if self.summary is not None:
            return self.summary.teacher
        if self.phases is not None and self.phases.models:
            # The teacher comes first: a surrogate has phases.
            models = sorted((entry.model for entry in self.phases.models), key=lambda model: bool(model.phases))
            return models[0]
        if self.dynamics is not None:
            return self.dynamics.teacher.model
        return None


def read_results(folder: Path) -> Results:
    """Read every known file of `folder`.

    RunError when there is none, when one is damaged, or when two are about different models: the numbers of one would
    stand under the title of the other.
    """
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder: give the run folder that a command wrote with --out")
    results = Results(folder)
    saved = read_summary(folder)
    # Both trainings write summary.json, and only that of a surrogate has a validation.
    if isinstance(saved, dict) and "validation" in saved:
        results.summary = DistillSummary.read(folder)
    elif saved is not None:
        results.summary = TeacherSummary.read(folder)
    for kind in _KINDS:
        if (folder / kind.FILE).exists():
            setattr(results, Path(kind.FILE).stem, kind.read(folder))
    for task in TASKS:
        if (folder / f"probe-{task}.json").exists():
            results.probes[task] = ProbeReport.read(folder, task)
    # A gap in a curve would look like a result.
    for name in results.files():
        path = folder / f"{name}.json"
        check_numbers(read_json(path), path)
    if not results.files():
        raise RunError(f"{folder} holds no results yet: start with raptor phases MODEL --out {folder}")
    config = folder / "config.yaml"
    if config.exists():
        results.config = read_yaml(config, "run the command that made it again")
    for row in read_metrics(folder):
        # Not every line is of a step of training: a validation has no loss.
        if {"stage", "step"} <= row.keys() and row.get("loss") is not None:
            results.losses.setdefault(row["stage"], []).append((row["step"], row["loss"]))
    if results.subject is not None and results.images is not None and results.images.subject is not None:
        _, own = results.subject
        # images.json of another model is no fault of the user: `raptor report` wrote it, and measures it again.
        if other_models(own, results.images.subject):
            results.images = None
    results.check_models()
    return results


def check_numbers(value: Any, file: Path | str, name: str = "") -> None:
    """Raise RunError where a number is missing among others in parsed JSON: the file was damaged or edited."""
    parts: dict[Any, Any] = {}
    place = ""
    if isinstance(value, dict):
        parts = {key: part for key, part in value.items() if key not in _MAY_LACK}
        if value.get("mean", 0) is None and value.get("std") is not None:  # a spread of a single number
            place = "mean"
    elif isinstance(value, list):
        parts = dict(enumerate(value))
        # Where no number is known at all nothing was measured, which is no damage.
        if None in value and any(isinstance(part, float) for part in value):
            place = f"position {value.index(None)}"
    if place:
        raise RunError(f"{file} lacks a number ({name.removeprefix('.')}, {place}): run the command that made it again")
    for key, part in parts.items():
        if isinstance(part, dict | list):
            check_numbers(part, file, f"{name}.{key}")
