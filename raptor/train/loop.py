"""The one training loop. Surrogates and teachers train in it: a list of stages, one plain loop over steps for each.

A `Stage` says what is trained and how one step goes. The loop owns the rest: the optimizer, the budget, the learning
rate, checkpoints and exact resume, the stop signal, checks for finite values, metrics, progress bar and tracker.
Everything random is a function of (seed, stage, step), so a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from raptor.certificate.verdict import MIN_STEPS
from raptor.data import ImageData
from raptor.devices import is_out_of_memory, ranks_of
from raptor.files import RunError
from raptor.progress import Progress
from raptor.run import Interrupted, Record, Run, StopSignal
from raptor.train.average import WeightAverage
from raptor.train.host import Asked, Pace, open_tracker
from raptor.train.optimizer import damaged_moment, make_optimizers, moments_to_save, restore_moments
from raptor.train.plan import PlannedPart, few_steps, step_seconds
from raptor.train.stage import Stage

LOG_EVERY = 20  # steps; reading losses waits for the device, so it is rare
_UNLOGGED = "unlogged_losses"  # in a checkpoint: the losses of the steps since the last line of metrics.jsonl

Checkpoint = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors and state, as `Run.load_checkpoint` returns them."""


@dataclass
class LoopState(Record):
    """Everything of a run that is not a tensor: `state.json` of a checkpoint."""

    stage: str | None = None
    step: int = -1
    num_steps: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    validations: list[dict[str, Any]] = field(default_factory=list)
    bad_images: list[str] = field(default_factory=list)
    num_logged: int = 0
    unvalidated: bool = False  # whether the validation after `step` is still to be done
    logged_seconds: float = 0.0  # `seconds` at the last line of metrics.jsonl


class Loop:
    """Trains the stages of one run.

    Args:
        run: where checkpoints and metrics go.
        fabric: where it trains; see `raptor.devices.open_fabric`.
        saved: the checkpoint to continue from; its model tensors are already loaded.
        data: the data sets whose unreadable images are reported.
        track: `wandb`, `tensorboard` or None.
        checkpoint_minutes: between two checkpoints; one is also written before each validation.
    """

    def __init__(
        self,
        run: Run,
        fabric: Any,
        saved: Checkpoint | None,
        data: Sequence[ImageData],
        track: str | None = None,
        checkpoint_minutes: float = 10.0,
    ):
        self.run = run
        self.fabric = fabric
        self.data = data
        self.tensors: dict[str, Tensor] = {}
        self.state = LoopState()
        if saved is not None:
            self.tensors = saved[0]
            self.state = _read_state(run, saved[1])
        self.stop = StopSignal()
        self.asked = Asked(fabric.world_size)
        self.pace = Pace(fabric.device)
        self.save_seconds = 60 * checkpoint_minutes
        self.saved_at = _now()
        self.tracker = None
        if fabric.is_global_zero:
            self.tracker = open_tracker(track, run.folder)

    def check(self, stages: Sequence[Stage]) -> None:
        """Raise for a checkpoint that these stages cannot be continued from."""
        reached = self.state.stage
        found = [stage for stage in stages if stage.name == reached]
        if reached is not None and not found:
            names = ", ".join([stage.name for stage in stages])
            raise RunError(f"{self.run.latest()} is of the stage {reached!r}, not {names}: choose another --out")
        for stage in found:
            damage = damaged_moment(stage.groups, self.tensors)
            if damage is not None:
                raise RunError(f"{self.run.latest()} has {damage}: choose another --out")

    def fit(self, stages: Sequence[Stage]) -> None:
        """Train every stage that is not done yet."""
        self.check(stages)
        # Lines after the checkpoint are of steps that are done again.
        self.run.cut_metrics(self.state.num_logged)
        to_do = list(stages)
        while self.state.stage not in (None, to_do[0].name):
            to_do.pop(0)  # done before the checkpoint
        with self.stop as self.stop:
            for stage in to_do:
                self._fit_stage(stage, self.tensors)
                self.tensors = {}  # only the stage that the checkpoint is of is continued from it

    def _fit_stage(self, stage: Stage, tensors: Mapping[str, Tensor]) -> None:
        training = self._set_up(stage, tensors)
        start = 0
        losses: list[Tensor] = []
        if tensors:
            start = self.state.step + 1
            losses = list(tensors.get(_UNLOGGED, torch.empty(0)).to(self.fabric.device))
        num_steps = self.state.num_steps[stage.name]
        # A set, because in a short stage several validations fall on one step.
        validate_at = {round(num_steps * (i + 1) / stage.num_validations) - 1 for i in range(stage.num_validations)}
        bar = Progress(stage.title, num_steps, "steps", stage.batch_size, "images")
        bar.start_at(start)
        # The run ended between a checkpoint and its validation.
        if tensors and self.state.unvalidated:
            self._validate(stage, start - 1, bar)
        since = time.monotonic()
        for step in range(start, num_steps):
            losses.append(training.step(step, num_steps))
            self.pace.wait()  # or a stop signal would find hundreds of steps in the GPU's queue
            stop, is_due = self._stop_or_save()
            validate = step in validate_at
            # Lines of metrics.jsonl come by the step alone: neither the clock nor a signal may change a number in it.
            log = validate or step == num_steps - 1 or (step + 1) % LOG_EVERY == 0
            # Before a validation as well, which may find no memory or be interrupted.
            save = validate or step == num_steps - 1 or stop or is_due
            if log or save:
                loss_nl = self.fabric.all_reduce(torch.stack(losses), reduce_op="mean").cpu()  # the loop's only sync
                self._check_finite(stage, loss_nl, step)
                bar.note = f"loss {stage.metrics(loss_nl[-1:])['loss']:.4f}"
                self.state.seconds += time.monotonic() - since
                unlogged = {_UNLOGGED: loss_nl}
                if log:
                    self._log(stage, step, loss_nl)
                    losses = []
                    unlogged = {}
                if save:
                    self._save(training, step, unlogged, unvalidated=validate)
                if stop:
                    raise Interrupted(f"stopped after step {step}{stage.where()}; the same command goes on from there")
                if validate:
                    self._validate(stage, step, bar)
                since = time.monotonic()  # validations and checkpoints are no training
            bar.advance()
        bar.finish()

    def _set_up(self, stage: Stage, tensors: Mapping[str, Tensor]) -> _Training:
        """A stage ready to train, and its length."""
        training = _prepare(stage, tensors, self.fabric)
        if stage.name not in self.state.num_steps:
            num_steps = stage.budget.num_steps(
                stage.steps_per_epoch,
                stage.share,
                lambda: step_seconds(stage, training.step, training.forget, self.fabric)[0],
                stage.before,
            )
            self.state.num_steps[stage.name] = num_steps
            if num_steps < MIN_STEPS and not stage.refines and self.fabric.is_global_zero:
                print(few_steps(stage, num_steps), file=sys.stderr, flush=True)
        self.state.stage = stage.name
        return training

    def _stop_or_save(self) -> tuple[bool, bool]:
        """Whether a stop signal came on any rank, and whether a checkpoint is due by the clock of rank 0."""
        is_due = self.fabric.is_global_zero and _now() - self.saved_at >= self.save_seconds
        if is_due:
            self.saved_at = _now()
        stop, save = self.asked.by_any(self.stop.given, is_due)
        return stop, save

    def _check_finite(self, stage: Stage, loss_nl: Tensor, step: int) -> None:
        bad = (~torch.isfinite(loss_nl)).nonzero()
        if len(bad):
            row, column = bad[0].tolist()
            first = step - len(loss_nl) + 1 + row
            where = stage.where(column)
            raise RunError(f"the loss is not finite at step {first}{where}: {self.run.kept()}; try a smaller --lr")

    def _log(self, stage: Stage, step: int, loss_nl: Tensor) -> None:
        num_steps = self.state.num_steps[stage.name]
        seconds = self.state.seconds - self.state.logged_seconds
        self.state.logged_seconds = self.state.seconds
        values = {
            "stage": stage.name,
            "step": step,
            "num_steps": num_steps,
            **stage.metrics(loss_nl),
            "images_per_s": round(len(loss_nl) * stage.batch_size / max(seconds, 1e-9), 1),
            "lr": stage.rates.at(step, num_steps),
            "seconds": round(self.state.seconds, 2),
        }
        self.run.log(**values)
        self._track(values, step)

    def _track(self, values: Mapping[str, Any], step: int) -> None:
        if self.tracker is not None:
            numbers = {name: value for name, value in values.items() if isinstance(value, float)}
            self.tracker(numbers, self._total(step))

    def _total(self, step: int) -> int:
        """The step counted over all stages."""
        return step + sum(num for name, num in self.state.num_steps.items() if name != self.state.stage)

    def _validate(self, stage: Stage, step: int, bar: Progress) -> None:
        """Validate the weights of the newest checkpoint. For want of memory it is left out, and training goes on."""
        where = {"stage": stage.name, "step": step}
        try:
            scores, bar.note = stage.validate()
        except Interrupted:
            what = f"stopped in the validation after step {step}{stage.where()}"
            raise Interrupted(f"{what}; the same command goes on from there") from None
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if self.fabric.is_global_zero:
                print(f"validation after step {step}{stage.where()} is left out: {error}", file=sys.stderr, flush=True)
            self.run.log(**where, validation_skipped=str(error))
            self.state.validations.append({**where, "skipped": str(error)})
        else:
            self.run.log(**where, validation=scores)
            self.state.validations.append({**where, **scores})
            self._track(scores, step)
        self.state.unvalidated = False  # so that a resumed run does not validate these weights again
        if self.fabric.is_global_zero:
            self.state.num_logged = self.run.num_logged()
            self.run.amend_checkpoint(self.state.to_dict())

    def _save(self, training: _Training, step: int, unlogged: Mapping[str, Tensor], unvalidated: bool) -> None:
        """Write a checkpoint, with the losses of steps that no line of metrics.jsonl has yet."""
        stage = training.stage
        state = self.state
        finite = [p.detach().isfinite().all() for group in stage.groups for _, p in group.named]
        if not torch.stack(finite).all():  # one wait for the device, not one for each parameter
            what = f"the weights are not finite after step {step}{stage.where()}"
            raise RunError(f"{what}: {self.run.kept()}; try a smaller --lr")
        state.step = step
        state.unvalidated = unvalidated
        self.saved_at = _now()
        if not self.fabric.is_global_zero:
            return
        state.bad_images = self._own_bad_images()
        state.num_logged = self.run.num_logged()
        moments = moments_to_save(stage.groups, training.moments())
        tensors = {**stage.tensors(), **moments, **training.average.tensors(), **unlogged}
        self.run.save_checkpoint(self._total(step), tensors, state.to_dict())

    def bad_images(self) -> list[str]:
        """Names of the unreadable images that were skipped since the run began, on any rank."""
        each = ranks_of(self.fabric).gather(self._own_bad_images())  # each rank reads its own images
        return sorted({name for names in each for name in names})

    def _own_bad_images(self) -> list[str]:
        found = set(self.state.bad_images)
        for data in self.data:
            found.update(data.bad)
        return sorted(found)


@dataclass
class _Training:
    """A stage with its module as Fabric wraps it, its optimizers, and the mean of its last weights."""

    stage: Stage
    wrapped: Any
    optimizers: list[Any]
    average: WeightAverage
    backward: Callable[[Tensor], None]

    def step(self, step: int, num_steps: int) -> Tensor:
        """One step of the optimizers; the losses (N,) to log, on the device."""
        # By the step's number: one of torch's schedulers would have to be replayed where a run is resumed.
        lr = self.stage.rates.at(step, num_steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        losses = self.stage.losses(self.wrapped, step, num_steps, self._propagate)
        for parameters in self.stage.clip_groups():
            nn.utils.clip_grad_norm_(parameters, self.stage.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self.average.add(step, num_steps)
        return losses.detach()

    def moments(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """The optimizers' state of each parameter."""
        states: dict[nn.Parameter, dict[str, Tensor]] = {}
        for optimizer in self.optimizers:
            states.update(getattr(optimizer, "optimizer", optimizer).state)  # of the one that Fabric has wrapped
        return states

    def forget(self) -> None:
        """Drop the state of the optimizers and the mean, as before the first step."""
        self.average.forget()
        for optimizer in self.optimizers:
            getattr(optimizer, "optimizer", optimizer).state.clear()

    def _propagate(self, loss: Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)  # no pass over the gradients to write zeros
        self.backward(loss)


def _prepare(stage: Stage, tensors: Mapping[str, Tensor], fabric: Any) -> _Training:
    """A stage with its optimizers and its mean, which are continued from `tensors` if there are any."""
    made = make_optimizers(stage.groups, stage.rates.peak, stage.betas, fused=fabric.device.type == "cuda")
    named = [pair for group in stage.groups for pair in group.named]
    average = WeightAverage(named, stage.average_last)
    if tensors:
        restore_moments(made, stage.groups, tensors)
        average.restore(tensors)
    wrapped, *optimizers = fabric.setup(stage.module, *made)
    return _Training(stage, wrapped, optimizers, average, fabric.backward)


def _now() -> float:
    return time.monotonic()


def plan_stage(stage: Stage, fabric: Any) -> PlannedPart:
    """The length of a stage and the time of its steps, from a few that are done and undone."""
    training = _prepare(stage, {}, fabric)
    seconds, num_timed = step_seconds(stage, training.step, training.forget, fabric)
    num_steps = stage.budget.num_steps(stage.steps_per_epoch, stage.share, lambda: seconds, stage.before)
    is_timed = stage.budget.unit == "s"
    return PlannedPart(stage.name, num_steps, stage.batch_size, seconds, is_timed, num_timed)


def _read_state(run: Run, saved: dict[str, Any]) -> LoopState:
    """The state of a checkpoint; RunError that names it when it is damaged."""
    try:
        state = LoopState.from_dict(saved)
        if state.step < -1 or state.num_logged < 0 or any(num < 1 for num in state.num_steps.values()):
            raise ValueError("a count is negative")
        return state
    except ValueError as error:
        raise RunError(f"{run.latest()} cannot be continued (state.json: {error}): choose another --out") from None
