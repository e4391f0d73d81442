"""Stability beyond random perturbations: Jacobians, Lyapunov exponents, fixed points and transplants of one model.

Teacher, surrogate and an untrained twin are measured on the same few images. The twin has the same architecture and
random weights: what it does as well is due to residual connections and norms, not to training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from raptor.data.stream import Batch
from raptor.dynamics.fixed_points import KINDS, FixedPointsResult, measure_fixed_points
from raptor.dynamics.jacobian import JacobianResult, measure_jacobians
from raptor.dynamics.lyapunov import LyapunovResult, measure_lyapunov
from raptor.dynamics.measure import SidesFile
from raptor.dynamics.transplants import TransplantResult, measure_transplants
from raptor.phases.twin import untrained_twin
from raptor.progress import Progress
from raptor.streaming import Record
from raptor.surrogate.surrogate import make_surrogate, surrogate_spec
from raptor.vit.view import ModelFacts, ViT

TANGENT_BATCH = 8  # forward-mode derivatives hold several states per block
NUM_MEASURES = 4
_NUM_LAYERS_TRIED = 5  # layers of a transplant: each costs two passes for every group and share


@dataclass
class Tangents(Record):
    """Stability of one model.

    fixed_points: None for a model without tied blocks. transplants: None without a head, or where all images have the
    same predicted class. notes: what was left out, and why.
    """

    model: ModelFacts
    jacobians: JacobianResult
    lyapunov: LyapunovResult
    fixed_points: FixedPointsResult | None = None
    transplants: TransplantResult | None = None
    notes: list[str] = field(default_factory=list)

    def findings(self) -> list[str]:
        """One line for each measure, over all tokens."""
        growth = []
        for worst, typical in zip(self.jacobians.phase["all"].mean, self.jacobians.phase_random["all"].mean):
            growth.append(f"{worst:.3g} ({typical:.2f})")
        exponents = self.lyapunov.exponents["all"].mean
        largest = []
        num_positive = []
        for of_phase in exponents:
            largest.append(f"{of_phase[0]:+.3f}")
            num_positive.append(str(int((of_phase > 0).sum())))
        lines = [
            f"Jacobian: a small turn grows over a phase by {', '.join(growth)} in the worst (a random) direction",
            f"Lyapunov: largest exponent of each phase {', '.join(largest)} nats per step; "
            f"positive ones among {exponents.shape[1]}: {', '.join(num_positive)}",
        ]
        if self.fixed_points is not None:
            lines.append(_fixed_points_finding(self.fixed_points))
        if self.transplants is not None:
            lines.append(_transplant_finding(self.transplants))
        return lines


@dataclass
class TangentsFile(SidesFile):
    """tangents.json: what `raptor dynamics --tangents` measured; twin: the model with random weights."""

    FILE: ClassVar[str] = "tangents.json"

    teacher: Tangents
    surrogate: Tangents | None
    twin: Tangents | None
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare_tangents(
    teacher: ViT, surrogate: ViT | None, batches: Sequence[Batch], phases: Sequence[int], seed: int = 0
) -> tuple[dict[str, Tangents], list[str]]:
    """The sides `teacher`, `surrogate` and `twin` as far as they exist, and why there is no twin.

    Args:
        batches: the images, read again by each measure.
        phases: their lengths, of all sides.
        seed: of the twin's weights, of random directions and of transplanted tokens.
    """
    vits = {"teacher": teacher}
    if surrogate is not None:
        vits["surrogate"] = surrogate
    notes = []
    try:
        # A module of one's own has weights but no recipe to build it anew from.
        vits["twin"] = untrained_like(teacher, surrogate, seed)
    except ValueError as error:
        notes.append(f"no untrained twin: {error}")
    bar = Progress("stability of " + ", ".join(vits), NUM_MEASURES * len(vits), "measures")
    # Whether a tied block settles is judged against the twin, so the twin comes first.
    twin = None
    if "twin" in vits:
        twin = measure_tangents(vits["twin"], batches, phases, seed=seed, advance=bar.advance)
    sides = {}
    for side, vit in vits.items():
        if side != "twin":
            sides[side] = measure_tangents(vit, batches, phases, twin=twin, seed=seed, advance=bar.advance)
    if twin is not None:
        # Last again, because results and charts show it after both models.
        sides["twin"] = twin
    bar.finish()
    return sides, notes


def untrained_like(teacher: ViT, surrogate: ViT | None, seed: int) -> ViT:
    """The teacher with random weights, or the same kind of surrogate of that."""
    twin = untrained_twin(teacher, seed)
    if surrogate is None:
        return twin
    spec = surrogate_spec(surrogate)
    return make_surrogate(
        twin,
        spec.phases,
        block=spec.block,
        conditioning=spec.conditioning,
        copy=spec.copy,
        adapters=spec.adapters,
        adapted=spec.adapted,
        seed=seed,
    ).to(surrogate.device)


def measure_tangents(
    vit: ViT,
    batches: Sequence[Batch],
    phases: Sequence[int],
    *,
    twin: Tangents | None = None,
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> Tangents:
    """All four measures of one model.

    Args:
        batches: the images, read again by each measure.
        phases: their lengths.
        twin: the same measures of the untrained twin, against which settling is judged.
        seed: of random directions and tokens.
        advance: called after each of `NUM_MEASURES` measures.
    """
    jacobians = measure_jacobians(vit, batches, phases, seed=seed)
    advance()
    lyapunov = measure_lyapunov(vit, batches, phases, seed=seed)
    advance()
    found = Tangents(vit.facts(), jacobians, lyapunov)
    if vit.phases is not None:
        # Without tied blocks there is nothing to iterate past the end of a phase.
        of_twin = None
        if twin is not None:
            of_twin = twin.fixed_points
        found.fixed_points = measure_fixed_points(vit, batches, twin=of_twin)
    advance()
    # A shallow model has fewer layers than are tried.
    layers = np.unique(np.linspace(0, vit.num_layers, _NUM_LAYERS_TRIED).round().astype(int)).tolist()
    try:
        found.transplants = measure_transplants(vit, batches, layers=layers, seed=seed)
    except ValueError as error:
        # Without a head, or where all images have one class. The other measures are as good as ever.
        found.notes.append(f"no transplants: {error}")
    advance()
    return found


def _fixed_points_finding(found: FixedPointsResult) -> str:
    parts = []
    for continuation in found.continuations:
        which = f"phase {continuation.phase}"
        if continuation.depth == "continuing":
            which += " (depth continuing)"
        shares = [f"{continuation.share[kind]:.0%} {kind}" for kind in KINDS if continuation.share[kind]]
        parts.append(f"{which} {' and '.join(shares)}")
    text = f"fixed points, {found.num_extra} steps past each phase"
    if not found.has_twin:
        text += ", without a twin to judge by"
    return f"{text}: {'; '.join(parts)}"


def _transplant_finding(found: TransplantResult) -> str:
    """All tokens and half of them, at the first and the last layer tried."""
    parts = []
    for share in (0.5, 1.0):
        row = found.parts.index(("all", share))
        donor = found.donor.mean[row]
        random = found.random_donor.mean[row]
        parts.append(
            f"{share:.0%} of the tokens {donor[0]:.0%} at layer {found.layers[0]} and {donor[-1]:.0%} at layer "
            f"{found.layers[-1]} (random {random[0]:.0%} and {random[-1]:.0%})"
        )
    return f"transplants, donor's class comes out: {'; '.join(parts)}"
