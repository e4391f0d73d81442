"""Correcting a damaged state by running further steps of a phase.

If a tied block pulls states towards those of usual images, a few more of its steps should undo some of a disturbance.
The measure is the share of the lost agreement that comes back. A teacher, which repeats the last blocks of the phase,
and an untrained twin are measured in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raptor.data.stream import Batch
from raptor.dynamics.effects import run_blocks
from raptor.dynamics.repetition import repetition_plan
from raptor.phases.cut import check_phases
from raptor.recurrence.rules import Logits
from raptor.vit.trajectory import autocast
from raptor.vit.view import Context, ViT

MAX_EXTRA = 8
DISTURBANCES = ("noise", "dropped patches")


@dataclass(frozen=True)
class Correction:
    """How much of the agreement lost to a disturbance comes back after further steps.

    Attributes:
        agreement: with the classes of the clean image at the usual depth, by the number of extra steps (0..E).
        agreement_clean: the same without the disturbance: what the extra steps themselves cost.
        recovered: share of the lost agreement that came back, by the number of extra steps; None if nothing was lost.
    """

    disturbance: str
    size: float
    phase: int
    agreement: list[float]
    agreement_clean: list[float]
    num_images: int

    @property
    def recovered(self) -> list[float] | None:
        lost = 1 - self.agreement[0]
        if lost <= 0:
            return None
        return [(kept - self.agreement[0]) / lost for kept in self.agreement]


@torch.no_grad()
def measure_correction(
    vit: ViT,
    batches: Iterable[Batch],
    phase: int,
    disturbance: str = "noise",
    size: float = 0.3,
    max_extra: int = MAX_EXTRA,
    phases: Sequence[int] | None = None,
    logits: Logits | None = None,
    precision: str = "fp32",
    seed: int = 0,
) -> Correction:
    """Disturb the state that enters a phase (1..k), run 0 to `max_extra` further steps of the phase, then the rest.

    Args:
        disturbance: `noise` adds a random direction of `size` times each token's norm; `dropped patches` sets a share
            `size` of the patches to the mean patch of the image.
        phases: lengths of the phases, needed for a teacher; by default those of the surrogate.
    """
    lengths = vit.phases if phases is None else phases
    if lengths is None:
        raise ValueError(f"{vit.name} is not a surrogate: say where its phases are with phases=")
    found = check_phases(vit, lengths)
    if not 1 <= phase <= found.k:
        raise ValueError(f"there is no phase {phase}: phases are numbered 1 to {found.k}")
    if max_extra < 0:
        raise ValueError(f"the number of further steps must be at least 0, got {max_extra}")
    logits = logits or vit.finish
    generator = torch.Generator().manual_seed(seed)
    num_kept = torch.zeros(2, max_extra + 1, dtype=torch.long)
    num_images = 0
    first, last = found.spans[phase - 1]
    plans = [repetition_plan(vit, (first, last), last - first + 1 + extra) for extra in range(max_extra + 1)]
    for batch in batches:
        with autocast(precision, vit.device):
            a_0_btd, context = vit.embed(batch.images.to(vit.device))
            entry_btd = vit.unroll(a_0_btd, context, stop=first - 1)[-1]
            clean_b = logits(vit.unroll(entry_btd, context, start=first - 1)[-1]).argmax(-1)
            disturbed_btd = disturb(vit, entry_btd, disturbance, size, generator)
            for row, state_btd in enumerate((disturbed_btd, entry_btd)):
                for extra, plan in enumerate(plans):
                    class_b = _class_after(vit, state_btd, context, plan, last, logits)
                    num_kept[row, extra] += (class_b == clean_b).sum().cpu()
        num_images += len(clean_b)
    if num_images == 0:
        raise ValueError("there are no images to correct: check --data")
    agreement, agreement_clean = (num_kept.double() / num_images).tolist()
    return Correction(disturbance, size, phase, agreement, agreement_clean, num_images)


def _class_after(
    vit: ViT, state_btd: Tensor, context: Context, plan: list[tuple[int, int]], last: int, logits: Logits
) -> Tensor:
    out_btd = run_blocks(vit, state_btd, context, plan)
    return logits(vit.unroll(out_btd, context, start=last)[-1]).argmax(-1)


def disturb(vit: ViT, x_btd: Tensor, disturbance: str, size: float, generator: torch.Generator) -> Tensor:
    """A disturbed copy of a state."""
    if disturbance not in DISTURBANCES:
        raise ValueError(f"unknown disturbance {disturbance!r}: choose from {', '.join(DISTURBANCES)}")
    if not 0 <= size <= (1 if disturbance == "dropped patches" else float("inf")):
        raise ValueError(f"a disturbance of size {size:g} is not possible: give a share of at least 0")
    if disturbance == "noise":
        direction_btd = torch.randn(x_btd.shape, generator=generator).to(x_btd)
        direction_btd = direction_btd / direction_btd.norm(dim=-1, keepdim=True)
        return x_btd + size * x_btd.norm(dim=-1, keepdim=True) * direction_btd
    where = vit.groups.slice("patches")
    patches_bpd = x_btd[:, where]
    num_dropped = round(size * patches_bpd.shape[1])
    order_bp = torch.rand(patches_bpd.shape[:2], generator=generator).argsort(dim=1).to(x_btd.device)
    is_dropped_bp = order_bp < num_dropped
    mean_b1d = patches_bpd.mean(1, keepdim=True)
    disturbed_btd = x_btd.clone()
    disturbed_btd[:, where] = torch.where(is_dropped_bp[..., None], mean_b1d, patches_bpd)
    return disturbed_btd
