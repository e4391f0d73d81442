"""raptor correct: further steps of a phase after a disturbance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raptor.certificate.shift import CorruptedImages, Corruption
from raptor.commands.pair_job import SurrogateJob, chosen_phases
from raptor.commands.tool import ToolResult, open_tool
from raptor.config import CorrectConfig
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
from raptor.report.charts import Chart
from raptor.report.tool import correct_charts
from raptor.vit.view import ViT

DROPPED = 0.3  # share of the patches that are replaced by their mean
SEVERITY = 3  # of a blur and of a JPEG compression


@dataclass
class Correcting(ToolResult):
    """The result in correct.json; its figure has agreement after a disturbance by the number of further steps."""

    measured: CorrectFile

    def charts(self) -> list[Chart]:
        return correct_charts(self.measured)

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per model, phase, disturbance and number of further steps."""
        rows = []
        for side, corrections in self.measured.sides.items():
            for one in corrections:
                about = {"side": side, "phase": one.phase, "disturbance": one.disturbance, "size": one.size}
                for extra, agreement in enumerate(one.agreement):
                    rows.append({**about, "extra": extra, "agreement": agreement, "clean": one.agreement_clean[extra]})
        return rows

    def text(self) -> str:
        lines = self.measured.findings + self.measured.notes
        return self.told([f"corrections, {self.measured.images}:", *(f"  {line}" for line in lines)])


@command(CorrectConfig)
def correct(config: CorrectConfig) -> Correcting:
    """Disturb a state and run further steps of its phase: how much of the lost agreement comes back?"""
    job = open_tool(config, CorrectFile)
    phases = chosen_phases(job.phases, config.at)
    disturbances = [Disturbance(DROP, DROPPED)]
    if config.noise:
        disturbances.insert(0, Disturbance(NOISE, config.noise))
    for kind in ("blur", "jpeg"):
        # These change the picture, so they need a second stream of the same images. Noise and drops change a state of
        # the first.
        corrupted = CorruptedImages(job.judged, Corruption(kind, SEVERITY))
        disturbances.append(Disturbance(kind, SEVERITY, job.stream(corrupted)))
    models, notes = _models(job, config)
    beside = None
    if config.beside is not None:
        models["beside"], beside = job.open_beside("beside")
        # Corrections are compared by the number of their phase, so both must be cut alike.
        if list(models["beside"].phases or ()) != list(job.phases):
            raise ValueError(f"--beside {beside} is not a surrogate with the phases {job.phases}")
        notes.append(f"beside is {beside}")
    sides: dict[str, list[Correction]] = {}
    for side, vit in models.items():
        sides[side] = []
        with Progress(f"corrections of the {side}", None, "image passes") as bar:
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
    measured = CorrectFile(**job.about(correct_findings(sides)), sides=sides, notes=notes, beside=beside)
    job.write(measured, correct_charts, measured.images)
    return Correcting(measured, job.folder)


def _models(job: SurrogateJob, config: CorrectConfig) -> tuple[dict[str, ViT], list[str]]:
    """The models that are compared, and why there is no untrained twin."""
    models = {"surrogate": job.surrogate, "teacher": job.teacher}
    try:
        # What an untrained model of the same shape brings back as well is due to residual connections and norms.
        models["twin"] = untrained_like(job.teacher, job.surrogate, config.seed)
    except ValueError as error:
        # A module of one's own cannot be built anew with random weights. The other models are measured all the same.
        return models, [f"no untrained twin: {error}"]
    return models, []
