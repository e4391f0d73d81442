"""A run folder as the page reads it. Every file is optional; a damaged one is an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from raptor.certificate.certificate import Certificate
from raptor.certificate.complexity import Complexity
from raptor.certificate.error_curves import Curves
from raptor.certificate.verdict import Verdict
from raptor.dynamics.interventions import InterventionsFile
from raptor.dynamics.measure import DynamicsFile
from raptor.dynamics.tangents import TangentsFile
from raptor.files import RunError, read_yaml
from raptor.phases.study import PhasesFile
from raptor.probes.result import ProbeReport
from raptor.provenance import Provenance
from raptor.report.strips import ImagesFile
from raptor.run import ResultFile, read_metrics, read_summary
from raptor.subject import Subject, other_models
from raptor.train.distilled import DistillSummary
from raptor.train.teacher import TeacherSummary
from raptor.vit.pair import OTHER_TEACHER
from raptor.vit.saved import saved_folder
from raptor.vit.view import ModelFacts

_File = TypeVar("_File", bound=ResultFile)
TASKS = ("classify", "segment", "depth")
# The same command writes these files, so that one of them is never about another model than the other.
_BESIDE = {"dynamics": ("interventions", "tangents"), "certificate": ("complexity",)}


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
    images: ImagesFile | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    losses: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def files(self) -> dict[str, Any]:
        """The files that are there, by their names without `.json`."""
        probes = {f"probe-{task}": report for task, report in self.probes.items()}
        files: dict[str, Any] = {
            "summary": self.summary,
            "phases": self.phases,
            "certificate": self.certificate,
            "complexity": self.complexity,
            **probes,
            "dynamics": self.dynamics,
            "interventions": self.interventions,
            "tangents": self.tangents,
            "images": self.images,
        }
        return {name: file for name, file in files.items() if file is not None}

    def provenance(self) -> dict[str, Provenance]:
        """Where each file came from, by its name without `.json`."""
        return {name: file.provenance for name, file in self.files().items()}

    @property
    def distilled(self) -> DistillSummary | None:
        """The summary of a distillation."""
        return self.summary if isinstance(self.summary, DistillSummary) else None

    @property
    def phase_lengths(self) -> list[int] | None:
        """The phases that the page draws: of the surrogate, else of the dynamics, else chosen from the similarity."""
        for file in (self.certificate, self.distilled, self.dynamics):
            if file is not None and file.phases:
                return list(file.phases)
        if self.phases is None or not self.phases.models:
            return None
        chosen = self.phases.models[0].chosen
        return None if chosen is None else list(chosen)

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
        if self.summary is not None:
            return self.summary.teacher
        if self.phases is not None and self.phases.models:
            entries = self.phases.models
            teachers = [entry for entry in entries if not entry.model.phases]  # a surrogate has phases
            return (teachers or entries)[0].model
        if self.dynamics is not None:
            return self.dynamics.teacher.model
        return None


def read_results(folder: Path) -> Results:
    """Read every known file of `folder`; RunError when there is none, or when one is damaged.

    A file about another model than the page is left out, with a note: its numbers would stand under the wrong title.
    """
    results = _read_all(folder)
    subjects = _subjects(results)
    own = subjects.get("summary") or next(iter(subjects.values()), None)
    if own is None:
        return results
    is_run = results.summary is not None or saved_folder(str(folder)) is not None
    for name, subject in subjects.items():
        others = other_models(own, subject)
        # The command was told to take another teacher, and its name says so wherever the page names it.
        is_allowed = is_run and (subject.teacher or subject.model).endswith(OTHER_TEACHER)
        if others and not is_allowed:
            _leave_out(results, name)
            told = others[0].removeprefix("another model, ")
            results.notes[name] = f"{name}.json is of {told}, not of {own.teacher or own.model}, and is left out."
    return results


def _subjects(results: Results) -> dict[str, Subject]:
    """The model and images of each file. A file about several models has no subject."""
    return {name: file.subject for name, file in results.files().items() if file.subject is not None}


def _leave_out(results: Results, name: str) -> None:
    """Forget a file, and the file that the same command wrote beside it."""
    if name.startswith("probe-"):
        del results.probes[name.removeprefix("probe-")]
        return
    setattr(results, name, None)
    for other in _BESIDE.get(name, ()):
        setattr(results, other, None)


def _read_all(folder: Path) -> Results:
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder: give the run folder that a command wrote with --out")
    probes = {task: ProbeReport.read(folder, task) for task in TASKS if (folder / f"probe-{task}.json").exists()}
    results = Results(
        folder,
        summary=_read_summary(folder),
        phases=_read(PhasesFile, folder),
        certificate=_read(Certificate, folder),
        complexity=_read(Complexity, folder),
        probes=probes,
        dynamics=_read(DynamicsFile, folder),
        interventions=_read(InterventionsFile, folder),
        tangents=_read(TangentsFile, folder),
        images=_read(ImagesFile, folder),
    )
    if not results.files():
        raise RunError(f"{folder} holds no results yet: start with raptor phases MODEL --out {folder}")
    config = folder / "config.yaml"
    if config.exists():
        results.config = read_yaml(config, "run the command that made it again")
    for row in read_metrics(folder):
        if {"stage", "step"} <= row.keys() and row.get("loss") is not None:
            results.losses.setdefault(row["stage"], []).append((row["step"], row["loss"]))
    return results


def _read(kind: type[_File], folder: Path) -> _File | None:
    return kind.read(folder) if (folder / kind.FILE).exists() else None


def _read_summary(folder: Path) -> DistillSummary | TeacherSummary | None:
    saved = read_summary(folder)
    if isinstance(saved, dict) and "validation" in saved:
        return _read(DistillSummary, folder)
    return _read(TeacherSummary, folder)
