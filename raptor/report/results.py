"""What a run folder holds, as the page reads it. Every file is optional; a damaged one is an error that names it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from raptor.certificate.certificate import Certificate
from raptor.certificate.complexity import Complexity
from raptor.certificate.error_curves import Curves
from raptor.certificate.verdict import Verdict
from raptor.data.by_name import spec_text
from raptor.dynamics.interventions import InterventionsFile
from raptor.dynamics.measure import DynamicsFile
from raptor.phases.study import PhasesFile
from raptor.probes.result import ProbeReport
from raptor.provenance import Provenance, module_option
from raptor.report.strips import ImagesFile
from raptor.run import ResultFile, RunError, read_metrics, read_summary, read_yaml
from raptor.subject import Subject, other_models
from raptor.train.distilled import DistillSummary
from raptor.train.teacher import TeacherSummary
from raptor.vit.pair import OTHER_TEACHER
from raptor.vit.saved import is_of_own_module, saved_folder
from raptor.vit.view import ModelFacts, ViT

_File = TypeVar("_File", bound=ResultFile)
TASKS = ("classify", "segment", "depth")
_BESIDE = ("complexity", "interventions", "images")  # written with another file, and replaced with it


@dataclass
class TrainingLoss:
    """A line of metrics.jsonl that has a loss."""

    stage: str
    step: int
    loss: float


@dataclass
class Results:
    """The results of a run folder; None where there is no such file.

    Attributes:
        probes: task -> its probes.
        config: `config.yaml`, empty when there is none.
        training: the losses in `metrics.jsonl`.
        notes: why a part could not be made, by the name of its file.
    """

    folder: Path
    summary: DistillSummary | TeacherSummary | None = None
    phases: PhasesFile | None = None
    certificate: Certificate | None = None
    complexity: Complexity | None = None
    probes: dict[str, ProbeReport] = field(default_factory=dict)
    dynamics: DynamicsFile | None = None
    interventions: InterventionsFile | None = None
    images: ImagesFile | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    training: list[TrainingLoss] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    def files(self) -> dict[str, Any]:
        """The files that are there, by their names without `.json`."""
        files: dict[str, Any] = {
            "summary": self.summary,
            "phases": self.phases,
            "certificate": self.certificate,
            "complexity": self.complexity,
            **{f"probe-{task}": report for task, report in self.probes.items()},
            "dynamics": self.dynamics,
            "interventions": self.interventions,
            "images": self.images,
        }
        return {name: file for name, file in files.items() if file is not None}

    def provenance(self) -> dict[str, Provenance]:
        """Where each file that is there came from, by its name without `.json`."""
        return {name: _provenance(file) for name, file in self.files().items()}

    def leave_out(self, name: str) -> None:
        """Forget a file, by its name without `.json`, and what the same command wrote beside it."""
        task = name.removeprefix("probe-")
        if task != name:
            del self.probes[task]
            return
        setattr(self, name, None)
        beside = {"dynamics": "interventions", "certificate": "complexity"}.get(name)
        if beside is not None:
            setattr(self, beside, None)

    @property
    def has_model(self) -> bool:
        """Whether the commands can open the folder as a model."""
        files = (self.folder / "config.json", self.folder / "surrogate", self.folder / "teacher")
        return any(path.exists() for path in files)

    @property
    def module(self) -> str:
        """The option that opens a run of a module of one's own; empty for other runs."""
        try:
            if not is_of_own_module(self.folder):
                return ""
        except ValueError:  # a damaged model: its results can be shown all the same
            return ""
        return module_option(*(about.module for about in self.provenance().values()))

    def adds(self, command: str, options: str = "") -> str:
        """The command that adds a result: of the model in the folder, else of MODEL, with the folder as its --out."""
        if self.has_model:
            return self.on_run(command, options)
        return _joined("raptor", command, "MODEL --data DATA", options, f"--out {self.folder}")

    def on_run(self, command: str, options: str = "") -> str:
        """A command on the folder, with what it needs to open the models there."""
        return _joined("raptor", command, str(self.folder), options, self.module)

    @property
    def distilled(self) -> DistillSummary | None:
        """The summary, when it is that of a distillation."""
        return self.summary if isinstance(self.summary, DistillSummary) else None

    @property
    def phase_lengths(self) -> list[int] | None:
        """Phases the page draws: those of the surrogate, else of the dynamics, else the ones chosen from similarity."""
        for file in (self.certificate, self.distilled, self.dynamics):
            if file is not None and file.phases:
                return list(file.phases)
        if self.phases is None or not self.phases.models:
            return None
        chosen = self.phases.models[0].chosen
        return None if chosen is None else list(chosen)

    @property
    def other_images(self) -> str | None:
        """The data of the certificate where they are not those of the run; None where they are, or are not known."""
        own = self.config.get("val") or self.config.get("data")
        found = None if self.certificate is None else self.certificate.data
        return None if not own or found in (None, Certificate.data, spec_text(own)) else found

    @property
    def unlike_run(self) -> list[str]:
        """In what the certificate is unlike the run, in words: its images, their size, the teacher."""
        found, facts = self.certificate, self.facts
        if found is None:
            return []
        words = []
        if self.other_images:
            words.append(f"on {self.other_images}")
        if facts is not None and found.image_size != facts.image_size:
            words.append(f"at {found.image_size} px")
        if found.other_teacher:
            words.append(f"against {found.other_teacher}")
        return words

    @property
    def curves(self) -> Curves | None:
        """Error curves of the surrogate: those of the certificate, else of the run's own validation."""
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
            plain = [entry for entry in entries if not entry.model.phases]
            return (plain or entries)[0].model
        if self.dynamics is not None:
            return self.dynamics.teacher.model
        return None


def read_results(folder: Path) -> Results:
    """Read every known file of `folder`; RunError when there is none, or when one is damaged.

    What is of another model than the page is left out, with a note.
    """
    results = _read_all(folder)
    _leave_out_others(results)
    return results


def _read_all(folder: Path) -> Results:
    if not folder.is_dir():
        raise RunError(f"{folder} is no folder: give the run folder that a command wrote with --out")
    results = Results(
        folder,
        summary=_read_summary(folder),
        phases=_read(PhasesFile, folder),
        certificate=_read(Certificate, folder),
        complexity=_read(Complexity, folder),
        probes={task: ProbeReport.read(folder, task) for task in TASKS if (folder / f"probe-{task}.json").exists()},
        dynamics=_read(DynamicsFile, folder),
        interventions=_read(InterventionsFile, folder),
        images=_read(ImagesFile, folder),
    )
    if not results.provenance():
        raise RunError(f"{folder} holds no results yet: start with raptor phases MODEL --out {folder}")
    results.config = _read_config(folder / "config.yaml")
    results.training = _read_training(folder / "metrics.jsonl")
    return results


def _subjects(results: Results) -> dict[str, Subject]:
    """What each file is about, by its name without `.json`; files about several models are left out."""
    subjects = {}
    for name, file in results.files().items():
        if file.subject is not None:
            subjects[name] = file.subject
    return subjects


def check_results_of(folder: Path, surrogate: ViT | None, model: ViT, replaced: Collection[str]) -> None:
    """Raise where `folder` holds results of another model: its page could show only those of one.

    A run folder is checked by `check_folder_of`. surrogate, model: as there. replaced: names, without `.json`, of the
    results that are written anew.
    """
    try:
        held = {} if saved_folder(str(folder.absolute())) else _subjects(_read_all(folder))
    except RunError:  # no results yet, or a damaged file
        return
    kept = [name for name in held if name not in replaced and name not in _BESIDE]
    if not kept:
        return
    own = Subject.of(model, surrogate=surrogate)
    for name in kept:
        others = other_models(own, held[name])
        if others:
            raise RunError(f"{folder} holds results of {' and '.join(others)} ({name}.json): choose another --out")


def _leave_out_others(results: Results) -> None:
    """Leave out what is about another model than the page, with a note: its numbers would stand under the wrong title.

    In a run folder a teacher that was allowed although it is another one stays: the page says so.
    """
    held = _subjects(results)
    own = next(iter(held.values()), None)
    if results.summary is not None and results.summary.subject is not None:
        own = results.summary.subject
    if own is None:
        return
    whose = "this run's" if results.summary is not None or results.has_model else "the page's"
    for name, subject in held.items():
        others = other_models(own, subject)
        is_allowed = whose == "this run's" and str(subject.teacher or subject.model).endswith(OTHER_TEACHER)
        if others and not is_allowed:
            results.leave_out(name)
            told = others[0].removeprefix("another model, ")
            results.notes[name] = f"{name}.json is of {told}, not of {whose} {_plain_name(own)}, and is left out."


def _plain_name(subject: Subject) -> str:
    return subject.teacher or subject.model


def _joined(*words: str) -> str:
    return " ".join(word for word in words if word)


def _read(kind: type[_File], folder: Path) -> _File | None:
    return kind.read(folder) if (folder / kind.FILE).exists() else None


def _read_summary(folder: Path) -> DistillSummary | TeacherSummary | None:
    saved = read_summary(folder)
    if isinstance(saved, dict) and "validation" in saved:
        return _read(DistillSummary, folder)
    return _read(TeacherSummary, folder)


def _provenance(file: Any) -> Provenance:
    found: Provenance = file.provenance
    if isinstance(file, TeacherSummary):  # its own seconds are those of training
        return replace(found, device=found.device or file.device, seconds=found.seconds or file.seconds)
    return found


def _read_config(path: Path) -> dict[str, Any]:
    return read_yaml(path, "run the command that made it again") if path.exists() else {}


def _read_training(path: Path) -> list[TrainingLoss]:
    """The losses of metrics.jsonl. A last line that an interruption cut off is skipped."""
    rows: list[TrainingLoss] = []
    for row in read_metrics(path.parent):
        if _is_number(row.get("loss")) and _is_number(row.get("step")):
            rows.append(TrainingLoss(str(row.get("stage", "training")), row["step"], row["loss"]))
    return rows


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
