"""Editing a state at the end of a phase, so that the image is taken for another class.

The edit adds a multiple of the difference between the mean states of two classes. Three others stand beside it: a step
of equal norm in a random direction, the same edit at the last layer, and a step of equal norm along the gradient of the
head, which knows the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from raptor.data.stream import Batch
from raptor.dynamics.effects import run_blocks
from raptor.dynamics.repetition import repetition_plan
from raptor.recurrence.tool import ToolFile, phases_with
from raptor.streaming import Record
from raptor.vit.on_demand import ReadOut
from raptor.vit.trajectory import autocast
from raptor.vit.view import Context, ViT

LARGEST_STEP = 4.0
_NUM_STEPS = 16
_NUM_BISECTIONS = 6
FURTHER_STEPS = 4
_COLUMNS = ("step", "relative_norm", "stays", "random", "at_the_end", "gradient", "other_classes", "patches")


@dataclass(frozen=True)
class EditResult(Record):
    """What an edit towards one class does to images of other classes, averaged over images.

    Attributes:
        flipped: share of images that some step of at most `LARGEST_STEP` differences turns into the class.
        step: mean size of the smallest such step, in differences of class means, over the images that flip.
        relative_norm: the norm of that step relative to the norm of the state.
        stays: share of the flipped images that keep the class for four further steps of the last phase.
        random: share that a step of equal norm in a random direction turns into the class.
        at_the_end: share that the same step flips when it is made at the last layer.
        gradient: share that a step of equal norm along the gradient of the head flips.
        other_classes: KL of the probabilities of all other classes, before and after, in nats.
        patches: relative change of the patches of the last state.
    """

    to: int
    phase: int
    flipped: float
    step: float | None
    relative_norm: float | None
    stays: float | None
    random: float | None
    at_the_end: float | None
    gradient: float | None
    other_classes: float | None
    patches: float | None
    num_images: int


@dataclass
class EditFile(ToolFile):
    """edit.json: edits towards one class at the end of each phase, of a surrogate and of its teacher.

    Attributes:
        to, class_name: the class, by number and by name.
        num_means: training images that the means of the classes are of.
    """

    FILE: ClassVar[str] = "edit.json"

    to: int
    class_name: str
    num_means: int
    surrogate: list[EditResult]
    teacher: list[EditResult]

    def sides(self) -> dict[str, list[EditResult]]:
        return {"surrogate": self.surrogate, "teacher": self.teacher}


def edit_findings(sides: dict[str, list[EditResult]]) -> list[str]:
    """A sentence for each model and phase."""
    found = []
    for side, results in sides.items():
        for one in results:
            text = f"{side}, end of phase {one.phase}: {one.flipped:.0%} of {one.num_images} images flip"
            if one.step is not None:
                text += (
                    f", by {one.step:.2f} differences of class means ({one.random:.0%} by a random direction, "
                    f"{one.at_the_end:.0%} by the same step at the last layer, {one.gradient:.0%} along the head's "
                    f"gradient); {one.stays:.0%} of them stay for {FURTHER_STEPS} further steps"
                )
            found.append(text)
    return found


@torch.no_grad()
def class_means(
    vit: ViT,
    batches: Iterable[Batch],
    layers: Sequence[int],
    logits: ReadOut | None = None,
    precision: str = "fp32",
) -> dict[int, Tensor]:
    """Mean state of each class at some layers, (C, G, D): one mean for each token group that the model has.

    An image counts for the class that the model gives it, because the edit moves what the model sees.
    """
    logits = logits or vit.finish
    sums: dict[int, Tensor] = {}
    num_c: Tensor | None = None
    for batch in batches:
        with autocast(precision, vit.device):
            states, _ = vit.record(batch.images.to(vit.device))
            logits_bc = logits(states[-1])
        class_b = logits_bc.argmax(-1)
        # Sums by class as a product of matrices: a loop over classes would wait for the device a thousand times.
        one_hot_bc = F.one_hot(class_b, logits_bc.shape[-1]).double()
        num_c = one_hot_bc.sum(0) if num_c is None else num_c + one_hot_bc.sum(0)
        for layer in layers:
            # In float64: a mean over thousands of states of one class.
            state_btd = states[layer].double()
            means_bgd = torch.stack([state_btd[:, where].mean(1) for _, where in vit.groups.present()], dim=1)
            found = torch.einsum("bc,bgd->cgd", one_hot_bc, means_bgd)
            sums[layer] = sums[layer] + found if layer in sums else found
    if num_c is None:
        raise ValueError("there are no images to take class means from: check --data")
    # A class that no image is given has no mean: NaN, which `edit` refuses by name.
    return {layer: total / num_c[:, None, None] for layer, total in sums.items()}


def measure_edit(
    vit: ViT,
    batches: Iterable[Batch],
    means: dict[int, Tensor],
    to: int,
    phase: int,
    phases: Sequence[int] | None = None,
    logits: ReadOut | None = None,
    seed: int = 0,
    precision: str = "fp32",
) -> EditResult:
    """Edit the state that leaves a phase (1..k) of every image that is not of the class `to` already.

    means: `class_means` at the last layer of that phase and at the last layer of the model.
    """
    found = phases_with(vit, phases, phase)
    layer = found.spans[phase - 1][1]
    for where in (layer, vit.num_layers):
        if where not in means:
            raise ValueError(f"the class means of layer {where} are missing: measure them with class_means")
    if not 0 <= to < len(means[layer]) or not bool(means[layer][to].isfinite().all()):
        raise ValueError(f"no image is taken for class {to}: give images of that class, or another --to")
    editor = _Editor(vit, means, to, layer, found.spans[-1], logits or vit.finish, seed)
    for batch in batches:
        with autocast(precision, vit.device):
            editor.add(batch.images.to(vit.device))
    return editor.result(phase)


class _Editor:
    """Sums over images, one batch at a time."""

    def __init__(
        self,
        vit: ViT,
        means: dict[int, Tensor],
        to: int,
        layer: int,
        last_span: tuple[int, int],
        logits: ReadOut,
        seed: int,
    ):
        self.vit = vit
        self.means = means
        self.to = to
        self.layer = layer
        self.logits = logits
        # Past the last layer the last phase runs on: a class that is a place of rest would be kept.
        first, last = last_span
        plan = repetition_plan(vit, last_span, last - first + 1 + FURTHER_STEPS)
        self._further = plan[last - first + 1 :]
        self._generator = torch.Generator().manual_seed(seed)
        self._rows: list[Tensor] = []
        self._num_images = 0

    def add(self, images: Tensor) -> None:
        """Edit one batch; one row of numbers for each image that flips."""
        with torch.no_grad():
            a_0_btd, context = self.vit.embed(images)
            state_btd = self.vit.unroll(a_0_btd, context, stop=self.layer)[-1]
            last_btd = self._rest(state_btd, context)
            class_b = self.logits(last_btd).argmax(-1)
            direction_btd = self._direction(class_b, self.layer, state_btd)
            # A class without a mean was not among the images that the means were taken from.
            is_edited_b = (class_b != self.to) & direction_btd.isfinite().flatten(1).all(1)
            step_b = self._smallest_step(state_btd, direction_btd, context)
        self._num_images += int(is_edited_b.sum())
        # Images that no step flips count in the share and have no other number.
        flips_b = is_edited_b & step_b.isfinite()
        step_b = torch.where(flips_b, step_b, 0.0)
        change_btd = step_b[:, None, None] * direction_btd.nan_to_num()
        rows = self._effects(state_btd, last_btd, change_btd, step_b, class_b, context)
        self._rows.append(rows[flips_b].double().cpu())

    def _effects(
        self,
        state_btd: Tensor,
        last_btd: Tensor,
        change_btd: Tensor,
        step_b: Tensor,
        class_b: Tensor,
        context: Context,
    ) -> Tensor:
        """For each image a row in the order of `_COLUMNS`."""
        gradient_btd = self._gradient(state_btd, class_b, context)
        patches = self.vit.groups.slice("patches")
        with torch.no_grad():
            edited_btd = self._rest(state_btd + change_btd, context)
            further_btd = run_blocks(self.vit, edited_btd, context, self._further)
            # Of equal norm, so that only the direction can explain the difference.
            noise_btd = torch.randn(change_btd.shape, generator=self._generator).to(change_btd)
            random_btd = self._rest(state_btd + _with_norm_of(noise_btd, change_btd), context)
            along_btd = self._rest(state_btd + _with_norm_of(gradient_btd, change_btd), context)
            # In units of class differences, as norms grow with depth.
            at_end_btd = last_btd + step_b[:, None, None] * self._direction(class_b, self.vit.num_layers, last_btd)
            columns = [
                step_b,
                change_btd.flatten(1).norm(dim=1) / state_btd.flatten(1).norm(dim=1),
                self._is_flipped(further_btd),
                self._is_flipped(random_btd),
                self._is_flipped(at_end_btd.nan_to_num()),
                self._is_flipped(along_btd),
                self._other_classes(last_btd, edited_btd, class_b),
                (edited_btd - last_btd)[:, patches].flatten(1).norm(dim=1)
                / last_btd[:, patches].flatten(1).norm(dim=1),
            ]
        return torch.stack([column.to(step_b) for column in columns], dim=1)

    def _rest(self, state_btd: Tensor, context: Context) -> Tensor:
        return self.vit.unroll(state_btd, context, start=self.layer)[-1]

    def _is_flipped(self, last_btd: Tensor) -> Tensor:
        return self.logits(last_btd).argmax(-1) == self.to

    def _direction(self, class_b: Tensor, layer: int, like_btd: Tensor) -> Tensor:
        """From the mean of each image's class to the mean of the wanted one, at every token of its group."""
        means_cgd = self.means[layer].to(like_btd.device)
        difference_bgd = means_cgd[self.to] - means_cgd[class_b]
        direction_btd = torch.zeros_like(like_btd)
        for g, (_, where) in enumerate(self.vit.groups.present()):
            direction_btd[:, where] = difference_bgd[:, g, None].to(like_btd.dtype)
        return direction_btd

    # The smallest step is searched without gradients; only the head's own direction needs them.
    def _smallest_step(self, state_btd: Tensor, direction_btd: Tensor, context: Context) -> Tensor:
        """The smallest step that flips each image: the first of a grid, refined by bisection; infinite if none does."""
        direction_btd = direction_btd.nan_to_num()
        num_images = len(state_btd)
        low_b = torch.zeros(num_images, device=state_btd.device)
        high_b = torch.full_like(low_b, torch.inf)
        # A grid first: an image may flip, flip back and flip again along the line, and the first flip is wanted.
        for step in torch.linspace(0, LARGEST_STEP, _NUM_STEPS + 1)[1:].tolist():
            flips_b = self._is_flipped(self._rest(state_btd + step * direction_btd, context))
            is_first_b = flips_b & high_b.isinf()
            high_b = torch.where(is_first_b, step, high_b)
            low_b = torch.where(high_b.isinf(), step, low_b)
        for _ in range(_NUM_BISECTIONS):
            # Images that never flip are kept at 0, because inf times 0 would be NaN.
            middle_b = torch.where(high_b.isinf(), 0.0, (low_b + high_b) / 2)
            flips_b = self._is_flipped(self._rest(state_btd + middle_b[:, None, None] * direction_btd, context))
            high_b = torch.where(flips_b & high_b.isfinite(), middle_b, high_b)
            low_b = torch.where(~flips_b & high_b.isfinite(), middle_b, low_b)
        return high_b

    def _gradient(self, state_btd: Tensor, class_b: Tensor, context: Context) -> Tensor:
        """Of the wanted class' score minus that of the image's own class."""
        with torch.enable_grad():
            state_btd = state_btd.detach().requires_grad_()
            logits_bc = self.logits(self._rest(state_btd, context))
            own_b = logits_bc.gather(1, class_b[:, None])[:, 0]
            # The margin and not the wanted score, which could rise with that of all classes.
            margin = (logits_bc[:, self.to] - own_b).sum()
            return torch.autograd.grad(margin, state_btd)[0]

    def _other_classes(self, before_btd: Tensor, after_btd: Tensor, class_b: Tensor) -> Tensor:
        """KL of the probabilities of the classes that are neither the image's own nor the wanted one."""
        hidden = torch.zeros(len(class_b), self.logits(before_btd).shape[-1], dtype=torch.bool, device=class_b.device)
        hidden[:, self.to] = True
        hidden.scatter_(1, class_b[:, None], True)
        # With two classes there are no others.
        if bool(hidden.all()):
            return torch.zeros(len(class_b), device=class_b.device)
        # Far below every score, but finite: 0 * inf would be NaN.
        log_p_bc = self.logits(before_btd).float().masked_fill(hidden, -1e4).log_softmax(-1)
        log_q_bc = self.logits(after_btd).float().masked_fill(hidden, -1e4).log_softmax(-1)
        return (log_p_bc.exp() * (log_p_bc - log_q_bc)).sum(-1)

    def result(self, phase: int) -> EditResult:
        if self._num_images == 0:
            raise ValueError(f"every image is of class {self.to} already, or of a class without a mean: give others")
        rows = torch.cat(self._rows)
        means: dict[str, float | None] = dict.fromkeys(_COLUMNS)
        if len(rows):
            means = dict(zip(_COLUMNS, rows.mean(0).tolist()))
        flipped = len(rows) / self._num_images
        return EditResult(to=self.to, phase=phase, flipped=flipped, num_images=self._num_images, **means)


def _with_norm_of(direction_btd: Tensor, change_btd: Tensor) -> Tensor:
    """The direction scaled, for each image, to the norm of the change."""
    norm_b = change_btd.flatten(1).norm(dim=1) / direction_btd.flatten(1).norm(dim=1).clamp_min(1e-30)
    return norm_b[:, None, None] * direction_btd
