"""raptor correct: further steps of a phase after a disturbance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raptor.certificate.shift import CorruptedImages, Corruption
from raptor.config import CorrectConfig
from raptor.data.apart import check_apart
from raptor.dynamics.tangents import untrained_like
from raptor.progress import Progress
from raptor.provenance import command
from raptor.recurrence.correct import (
    DROP,
    NOISE,
    CorrectFile,
    Correction,
    Disturbance,
    correct_findings,
    measure_corrections,
)
from raptor.recurrence.job import ToolJob, chosen_phases, open_job
from raptor.streaming import Result, folder_of
from raptor.vit.pair import open_pair
from raptor.vit.view import ViT

DROPPED = 0.3  # share of the patches that are replaced by their mean
SEVERITY = 3  # of a blur and of a JPEG compression


@dataclass
class Correcting(Result):
    """The result in correct.json, and where it was written."""

    measured: CorrectFile
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        return {"correct": self.measured.to_dict(), "folder": str(self.folder)}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per model, phase, disturbance and number of further steps."""
        rows = []
        for side, corrections in self.measured.sides.items():
            for one in corrections:
                about = {"side": side, "phase": one.phase, "disturbance": one.disturbance, "size": one.size}
                for extra, agreement in enumerate(one.agreement):
                    rows.append({**about, "extra": extra, "agreement": agreement, "clean": one.agreement_clean[extra]})
        return rows

    def plot(self) -> Any:
        """Agreement after a disturbance, by the number of further steps."""
        from raptor.report.figures import drawn
        from raptor.report.tool import correct_charts

        return drawn("correct", correct_charts(self.measured), self.measured.images)

    def text(self) -> str:
        lines = [f"corrections, {self.measured.images}:"]
        lines += [f"  {line}" for line in self.measured.findings + self.measured.notes]
        return "\n".join([*lines, f"written to {self.folder}: correct.json and figures/correct"])


@command(CorrectConfig)
def correct(config: CorrectConfig) -> Correcting:
    """Disturb a state and run further steps of its phase: how much of the lost agreement comes back?"""
    job = open_job(config, CorrectFile.FILE)
    phases = chosen_phases(job.phases, config.at)
    disturbances = _disturbances(job, config)
    models, notes = _models(job, config)
    sides: dict[str, list[Correction]] = {}
    for side, vit in models.items():
        bar = Progress(f"corrections of the {side}", None, "image passes")
        sides[side] = []
        for phase in phases:
            sides[side] += measure_corrections(
                vit,
                job.stream(progress=bar.update),
                phase,
                disturbances,
                max_extra=config.extra,
                phases=job.phases,
                logits=job.read_out(vit),
                precision=job.precision,
                seed=config.seed,
            )
        bar.finish()
    measured = CorrectFile(**job.about(correct_findings(sides)), sides=sides, notes=notes)
    _write(measured, job.folder)
    return Correcting(measured, job.folder)


def _disturbances(job: ToolJob, config: CorrectConfig) -> list[Disturbance]:
    """Noise and dropped patches in a state, and two corruptions of the image."""
    found = [Disturbance(DROP, DROPPED)]
    if config.noise:
        found.insert(0, Disturbance(NOISE, config.noise))
    for kind in ("blur", "jpeg"):
        # These change the picture, so they need a second stream of the same images. Noise and drops change a state of
        # the first.
        corrupted = CorruptedImages(job.images, Corruption(kind, SEVERITY))
        found.append(Disturbance(kind, SEVERITY, job.stream(corrupted)))
    return found


def _models(job: ToolJob, config: CorrectConfig) -> tuple[dict[str, ViT], list[str]]:
    """The models that are compared, and why there is no untrained twin."""
    models = {"surrogate": job.surrogate, "teacher": job.teacher}
    notes = []
    try:
        # What an untrained model of the same shape brings back as well is due to residual connections and norms.
        models["twin"] = untrained_like(job.teacher, job.surrogate, config.seed)
    except ValueError as error:
        # A module of one's own cannot be built anew with random weights. The other models are measured all the same.
        notes.append(f"no untrained twin: {error}")
    if config.beside is not None:
        # With the teacher that is open already, so that both surrogates are held against the same model.
        other, _ = open_pair(config.beside, teacher=job.teacher, allow_other_teacher=config.allow_other_teacher)
        # Corrections are compared by the number of their phase, so both must be cut alike.
        if other is None or list(other.phases or ()) != list(job.phases):
            raise ValueError(f"--beside {config.beside} is not a surrogate with the phases {job.phases}")
        _check_unseen(job, config.beside)
        models["beside"] = other.to(job.device)
    return models, notes


def _check_unseen(job: ToolJob, beside: Any) -> None:
    """Raise if `--beside` was trained on the images that are judged, on which it would look better than it is."""
    # The images of the job are of another run, or of none.
    seen = replace(job.data, run=None).trained_on(folder_of(beside), job.teacher.preprocess.size)
    if seen is not None and job.data.split not in ("train", "all"):
        check_apart(seen, job.images, "training images", "name others with --data")


def _write(measured: CorrectFile, folder: Path) -> None:
    from raptor.report.figures import save_figures
    from raptor.report.tool import correct_charts

    measured.write(folder)
    save_figures(correct_charts(measured), folder / "figures", measured.images)
