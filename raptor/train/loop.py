"""The one training loop. Surrogates and teachers train in it: a list of stages, one plain loop over steps for each.

A `Stage` says what is trained and how one step goes. The loop owns the rest: the budget, checkpoints and exact resume,
the stop signal, checks for finite values, metrics, progress bar and tracker. Everything random is a function of (seed,
stage, step), so a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raptor.certificate.verdict import MIN_STEPS
from raptor.data import ImageData
from raptor.devices import is_out_of_memory, ranks_of
from raptor.files import RunError
from raptor.progress import Progress, say
from raptor.run import Interrupted, Run, StopSignal
from raptor.streaming import Record
from raptor.train.optimizer import damaged_moment, make_optimizers, moments, named_parameters
from raptor.train.stage import Stage, few_steps, mean_seconds
from raptor.train.stopping import Asked, Pace

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


def learning_rate(step: int, num_steps: int, peak: float, low: float, warmup: float) -> float:
    """Linear warm-up over the first `warmup` of the run to `peak`, then a cosine down to `low` at its last step."""
    num_warm = max(1, round(warmup * num_steps))
    if step < num_warm:
        # Above 0, or the first step would change nothing.
        return peak * (step + 1) / num_warm
    # One step ahead, so that the last step has `low` itself.
    progress = (step - num_warm + 1) / max(1, num_steps - num_warm)
    return low + 0.5 * (peak - low) * (1 + math.cos(math.pi * progress))


class Training:
    """A stage with its module as Fabric wraps it, its optimizers, and the mean of its last weights.

    Args:
        tensors: of the checkpoint that the stage goes on from; empty at its beginning.
    """

    def __init__(self, stage: Stage, fabric: Any, tensors: Mapping[str, Tensor]):
        self.stage = stage
        self.fabric = fabric
        made = make_optimizers(stage.groups, stage.lr, stage.betas, fused=fabric.device.type == "cuda")
        # The optimizers' own state, by parameter: torch's state_dict numbers parameters, and another order of them
        # would mix their moments.
        self.states = {}
        for optimizer in made:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self.states[parameter] = optimizer.state
        self.weights: list[Tensor] = []
        self.means: list[Tensor] = []
        names = []
        for name, parameter in named_parameters(stage.groups):
            names.append(name)
            self.weights.append(parameter)
        self.mean_names = [f"average.{name}" for name in names]
        if tensors:
            for entry, parameter, key, _ in moments(stage.groups):
                value = tensors[entry]
                # AdamW counts steps on the host unless it is fused; a count on the GPU would be waited for.
                if key != "step" or fabric.device.type == "cuda":
                    value = value.to(parameter.device)
                self.states[parameter][parameter][key] = value
            # A checkpoint from before the averaged steps has no mean.
            if self.mean_names[0] in tensors:
                self.means = [tensors[name].to(weight) for name, weight in zip(self.mean_names, self.weights)]
        self.wrapped, *self.optimizers = fabric.setup(stage.module, *made)

    def step(self, step: int, num_steps: int) -> Tensor:
        """One step of the optimizers; the losses (N,) to log, on the device."""
        # By the step's number: one of torch's schedulers would have to be replayed where a run is resumed.
        lr = self.rate(step, num_steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        losses = self.stage.losses(self.wrapped, step, num_steps, self._propagate)
        for parameters in self.stage.clip_groups():
            nn.utils.clip_grad_norm_(parameters, self.stage.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self._average(step, num_steps)
        return losses.detach()

    def rate(self, step: int, num_steps: int) -> float:
        """The learning rate of a step."""
        stage = self.stage
        return learning_rate(step, num_steps, stage.lr, stage.min_lr, stage.warmup)

    def _propagate(self, loss: Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)  # no pass over the gradients to write zeros
        self.fabric.backward(loss)

    @torch.no_grad()
    def _average(self, step: int, num_steps: int) -> None:
        """Take the weights into the mean over the last steps of the stage, which the stage ends with."""
        first = num_steps - round(self.stage.average_last * num_steps)
        if step < first:
            return
        # By the step's number, so that a checkpoint needs no count. The lists are one kernel on a GPU, not hundreds.
        if step == first or not self.means:
            self.means = [weight.detach().clone() for weight in self.weights]
        else:
            torch._foreach_lerp_(self.means, self.weights, 1 / (step - first + 1))
        if step == num_steps - 1:
            torch._foreach_copy_(self.weights, self.means)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds: the stage's own tensors, the optimizers' state, and the mean if it has begun."""
        saved = dict(self.stage.tensors())
        for entry, parameter, key, shape in moments(self.stage.groups):
            value = self.states[parameter].get(parameter, {}).get(key)
            if value is None:  # a parameter that never had a gradient, which is the same as zeros
                value = torch.zeros(shape, device=parameter.device)
            saved[entry] = value
        return {**saved, **dict(zip(self.mean_names, self.means))}

    def seconds(self) -> tuple[float, int]:
        """Mean seconds per step over all ranks, from a few steps that are then undone, and how many were timed."""
        saved = [weight.detach().clone() for weight in self.weights]
        mean, num_timed = mean_seconds(self.step, self.stage.kind, self.fabric.device, ranks_of(self.fabric))
        with torch.no_grad():
            for weight, value in zip(self.weights, saved):
                # In place, because the optimizers hold these very tensors.
                weight.copy_(value)
        # The optimizers and the mean are as before the first step.
        self.means = []
        for state in self.states.values():
            state.clear()
        # All ranks turn the same mean into steps; with times of their own they would train different numbers of them.
        seconds = torch.tensor(mean, device=self.fabric.device)
        return float(self.fabric.all_reduce(seconds, reduce_op="mean")), num_timed


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
        stages: Sequence[Stage],
        saved: Checkpoint | None,
        data: Sequence[ImageData],
        track: str | None = None,
        checkpoint_minutes: float = 10.0,
    ):
        self.run = run
        self.fabric = fabric
        self.stages = list(stages)
        self.data = data
        self.tensors: dict[str, Tensor] = {}
        self.state = LoopState()
        if saved is not None:
            self.tensors = saved[0]
            self._go_on_from(saved[1])
        self.stop = StopSignal()
        self.asked = Asked(fabric.world_size)
        self.pace = Pace() if fabric.device.type == "cuda" else None
        self.save_seconds = 60 * checkpoint_minutes
        self.saved_at = _now()
        self.tracker = None
        if track is not None and fabric.is_global_zero:
            self.tracker = open_tracker(track, run.folder)

    def _go_on_from(self, saved: dict[str, Any]) -> None:
        """Take the state of a checkpoint; RunError that names it where it is damaged or of other stages."""
        where = self.run.latest()
        try:
            self.state = LoopState.from_dict(saved)
            if self.state.step < -1 or self.state.num_logged < 0 or any(n < 1 for n in self.state.num_steps.values()):
                raise ValueError("a count is negative")
        except ValueError as error:
            raise RunError(f"{where} cannot be continued (state.json: {error}): choose another --out") from None
        reached = self.state.stage
        names = [stage.name for stage in self.stages]
        if reached is None:
            return
        if reached not in names:
            raise RunError(f"{where} is of the stage {reached!r}, not {', '.join(names)}: choose another --out")
        del self.stages[: names.index(reached)]  # done before the checkpoint
        damage = damaged_moment(self.stages[0].groups, self.tensors)
        if damage is not None:
            raise RunError(f"{where} has {damage}: choose another --out")

    def fit(self) -> None:
        """Train every stage that is not done yet."""
        # Lines after the checkpoint are of steps that are done again.
        self.run.cut_metrics(self.state.num_logged)
        with self.stop as self.stop:
            for stage in self.stages:
                self._fit_stage(stage, self.tensors)
                self.tensors = {}  # only the stage that the checkpoint is of is continued from it

    def _fit_stage(self, stage: Stage, tensors: Mapping[str, Tensor]) -> None:
        training = Training(stage, self.fabric, tensors)
        if stage.name not in self.state.num_steps:
            num_steps = stage.num_steps(lambda: training.seconds()[0])
            self.state.num_steps[stage.name] = num_steps
            if num_steps < MIN_STEPS and not stage.refines:
                say(few_steps(stage, num_steps))
        self.state.stage = stage.name
        num_steps = self.state.num_steps[stage.name]
        # A set, because in a short stage several validations fall on one step.
        validate_at = {round(num_steps * (i + 1) / stage.num_validations) - 1 for i in range(stage.num_validations)}
        start = 0
        losses: list[Tensor] = []
        bar = Progress(stage.title, num_steps, "steps", stage.batch_size, "images")
        if tensors:
            start = self.state.step + 1
            losses = list(tensors.get(_UNLOGGED, torch.empty(0)).to(self.fabric.device))
            bar.done = start
            # The run ended between a checkpoint and its validation.
            if self.state.unvalidated:
                self._validate(stage, start - 1, bar)
        since = time.monotonic()
        for step in range(start, num_steps):
            losses.append(training.step(step, num_steps))
            if self.pace is not None:
                self.pace.wait()  # or a stop signal would find hundreds of steps in the GPU's queue
            stop, is_due = self._stop_or_save()
            validate = step in validate_at
            is_last = step == num_steps - 1
            # Lines of metrics.jsonl come by the step alone: neither the clock nor a signal may change a number in it.
            log = validate or is_last or (step + 1) % LOG_EVERY == 0
            # Before a validation as well, which may find no memory or be interrupted.
            save = validate or is_last or stop or is_due
            if log or save:
                loss_nl = self.fabric.all_reduce(torch.stack(losses), reduce_op="mean").cpu()  # the loop's only sync
                self._check_finite(stage, loss_nl, step)
                bar.note = f"loss {stage.metrics(loss_nl[-1:])['loss']:.4f}"
                self.state.seconds += time.monotonic() - since
                unlogged = {_UNLOGGED: loss_nl}
                if log:
                    self._log(training, step, loss_nl)
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
        stage.end()

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

    def _log(self, training: Training, step: int, loss_nl: Tensor) -> None:
        stage = training.stage
        num_steps = self.state.num_steps[stage.name]
        seconds = self.state.seconds - self.state.logged_seconds
        self.state.logged_seconds = self.state.seconds
        values = {
            "stage": stage.name,
            "step": step,
            "num_steps": num_steps,
            **stage.metrics(loss_nl),
            "images_per_s": round(len(loss_nl) * stage.batch_size / max(seconds, 1e-9), 1),
            "lr": training.rate(step, num_steps),
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
            say(f"validation after step {step}{stage.where()} is left out: {error}")
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

    def _save(self, training: Training, step: int, unlogged: Mapping[str, Tensor], unvalidated: bool) -> None:
        """Write a checkpoint, with the losses of steps that no line of metrics.jsonl has yet."""
        finite = [weight.detach().isfinite().all() for weight in training.weights]
        if not torch.stack(finite).all():  # one wait for the device, not one for each parameter
            what = f"the weights are not finite after step {step}{training.stage.where()}"
            raise RunError(f"{what}: {self.run.kept()}; try a smaller --lr")
        self.state.step = step
        self.state.unvalidated = unvalidated
        self.saved_at = _now()
        if self.fabric.is_global_zero:
            self.state.bad_images = self._own_bad_images()
            self.state.num_logged = self.run.num_logged()
            self.run.save_checkpoint(self._total(step), {**training.tensors(), **unlogged}, self.state.to_dict())

    def bad_images(self) -> list[str]:
        """Names of the unreadable images that were skipped since the run began, on any rank."""
        each = ranks_of(self.fabric).gather(self._own_bad_images())  # each rank reads its own images
        return sorted({name for names in each for name in names})

    def _own_bad_images(self) -> list[str]:
        found = set(self.state.bad_images)
        for data in self.data:
            found.update(data.bad)
        return sorted(found)


def _now() -> float:
    return time.monotonic()


def open_tracker(track: str, folder: Path) -> Callable[[Mapping[str, float], int], object]:
    """A function of (numbers, step) that logs to `wandb` or `tensorboard`."""
    # Imported here, because both take seconds and neither has to be installed.
    if track == "wandb":
        import wandb

        run = wandb.init(project="raptor", dir=str(folder), name=folder.name)
        return lambda values, step: run.log(dict(values), step=step)
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))

    def add_scalars(values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return add_scalars
