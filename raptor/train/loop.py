"""The one training loop. Surrogates and teachers train in it: a list of stages, one plain loop over steps for each.

A `Stage` says what is trained and how one step goes. The loop owns the rest: the optimizer, the budget, the learning
rate, checkpoints and exact resume, the stop signal, checks for finite values, metrics, progress bar and tracker.
Everything random is a function of (seed, stage, step), so a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from raptor.data import ImageData
from raptor.data.images import is_dead_worker
from raptor.devices import COLLECTIVE_TIMEOUT, ONE_PROCESS, Ranks, is_lost_rank, is_out_of_memory, ranks_of
from raptor.fidelity.verdict import MIN_STEPS
from raptor.progress import Progress
from raptor.run import Interrupted, Record, ResultFile, Run, RunError, StopSignal
from raptor.train.optimizer import make_optimizer, moments_of
from raptor.train.plan import PlannedPart, time_steps
from raptor.train.schedule import Budget, Rates

_LOG_EVERY = 20
_STEPS_AHEAD = 4
_TRACKERS = ("wandb", "tensorboard")
_TIMED_RUN = 64
# Steps of each kind when timing: first the untimed ones (compilation, capture, caches, start of the loader), then the
# timed ones.
_NUM_TIMED = {"cuda": (4, 16), "cpu": (1, 2)}

Checkpoint = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors and state, as `Run.load_checkpoint` returns them."""
File = TypeVar("File", bound=ResultFile)


class ParameterGroup(NamedTuple):
    """Parameters by name, their weight decay, and the name of their optimizer, of `raptor.train.optimizer`."""

    named: list[tuple[str, nn.Parameter]]
    weight_decay: float
    optimizer: str = "adamw"


class Stage(Protocol):
    """What the loop needs to know about one stage of training.

    Attributes:
        name: the stage in metrics.jsonl and in the checkpoint.
        title: description of the progress bar.
        module: one training step as a module. Fabric wraps it; nothing trainable may be called around it.
        groups: what it trains, in its order.
        betas, clip, rates: of the optimizer: decay rates of the moments, gradient norm, learning rate.
        batch_size: images per step over all ranks.
        budget, share, before, steps_per_epoch: length of the run, the share of it that this stage gets, the share that
            the stages before it get, steps in an epoch.
        num_validations: how many, spread over the stage.
        refines: whether it starts from trained weights, so that few steps are enough.
    """

    name: str
    title: str
    groups: list[ParameterGroup]
    betas: tuple[float, float]
    clip: float
    rates: Rates
    batch_size: int
    budget: Budget
    share: float
    before: float
    steps_per_epoch: float
    num_validations: int
    refines: bool

    @property
    def module(self) -> nn.Module: ...

    def losses(self, wrapped: Any, step: int, num_steps: int, propagate: Callable[[Tensor], None]) -> Tensor:
        """Run one step and leave its gradients in the parameters; the losses (N,) to log, on the device.

        Args:
            wrapped: `module` as Fabric wraps it.
            propagate: clears the gradients and runs the backward pass from a loss.
        """

    def kind(self, step: int, num_steps: int) -> Hashable:
        """Steps of one kind take the same time."""

    def clip_groups(self) -> list[list[nn.Parameter]]:
        """The parameters whose gradients are clipped by one norm."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds beside the optimizer's state."""

    def metrics(self, loss_nl: Tensor) -> dict[str, Any]:
        """The log line's entries for the losses (steps, N) since the last one."""

    def where(self, column: int | None = None) -> str:
        """The end of an error message: which stage, and which part of it the loss in `column` belongs to."""

    def validate(self) -> tuple[dict[str, Any], str]:
        """Scores on held-out images, and a note for the progress bar. Every rank calls it, with its share of them."""


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
        self.run, self.fabric, self.data = run, fabric, data
        self.tensors = saved[0] if saved else {}
        self.state = _read_state(run, saved[1]) if saved else LoopState()
        self.stop, self.asked, self.pace = StopSignal(), _Asked(fabric.world_size), _Pace(fabric.device)
        self.save_seconds, self.saved_at = 60 * checkpoint_minutes, _now()
        self.tracker = _open_tracker(track, run.folder) if fabric.is_global_zero else None

    def check(self, stages: Sequence[Stage]) -> None:
        """Raise for a checkpoint that these stages cannot be continued from."""
        reached = self.state.stage
        found = [stage for stage in stages if stage.name == reached]
        if reached is not None and not found:
            names = ", ".join(stage.name for stage in stages)
            raise RunError(f"{self.run.latest()} is of the stage {reached!r}, not {names}: choose another --out")
        for group in found[0].groups if found else ():
            for name, parameter, key in _kept(group):
                value = self.tensors.get(f"optimizer.{key}.{name}")
                shape = torch.Size() if key == "step" else parameter.shape
                if value is None or value.shape != shape or not value.isfinite().all():
                    held = "no" if value is None else "a damaged"
                    raise RunError(f"{self.run.latest()} has {held} {key} of {name}: choose another --out")

    def fit(self, stages: Sequence[Stage]) -> None:
        """Train every stage that is not done yet."""
        self.check(stages)
        self.run.cut_metrics(self.state.num_logged)
        names, reached = [stage.name for stage in stages], self.state.stage
        with self.stop as self.stop:
            for stage in stages[0 if reached is None else names.index(reached) :]:
                self._fit_stage(stage, self.tensors if stage.name == reached else {})
                self.tensors = {}

    def _fit_stage(self, stage: Stage, tensors: Mapping[str, Tensor]) -> None:
        training = self._set_up(stage, tensors)
        start, num_steps = self.state.step + 1 if tensors else 0, self.state.num_steps[stage.name]
        num_validations = stage.num_validations
        validate_at = {round(num_steps * (i + 1) / num_validations) - 1 for i in range(num_validations)}
        bar = Progress(stage.title, num_steps, "steps", stage.batch_size, "images")
        bar.start_at(start)
        if tensors and self.state.unvalidated:
            self._validate(stage, start - 1, bar)
        losses: list[Tensor] = []
        since = time.monotonic()
        for step in range(start, num_steps):
            losses.append(training.step(step, num_steps))
            self.pace.wait()
            stop, is_due = self._stop_or_save(step)
            save = stop or is_due or step == num_steps - 1 or step in validate_at
            if save or (step + 1) % _LOG_EVERY == 0:
                loss_nl = self.fabric.all_reduce(torch.stack(losses), reduce_op="mean").cpu()  # the loop's only sync
                self._check_finite(stage, loss_nl, step)
                self._log(stage, step, loss_nl, time.monotonic() - since)
                bar.note = f"loss {loss_nl[-1].mean():.4f}"
                losses = []
                if save:
                    self._save(training, step, unvalidated=step in validate_at)
                if stop:
                    raise Interrupted(f"stopped after step {step}{stage.where()}; the same command goes on from there")
                if step in validate_at:
                    self._validate(stage, step, bar)
                since = time.monotonic()
            bar.advance()
        bar.finish()

    def _set_up(self, stage: Stage, tensors: Mapping[str, Tensor]) -> _Training:
        """A stage ready to train, and its length."""
        training = _prepare(stage, tensors, self.fabric)
        if stage.name not in self.state.num_steps:
            num_steps = _length(stage, lambda: _step_seconds(training, self.fabric)[0])
            self.state.num_steps[stage.name] = num_steps
            if num_steps < MIN_STEPS and not stage.refines and self.fabric.is_global_zero:
                print(_short_budget(stage, num_steps), file=sys.stderr, flush=True)
        self.state.stage = stage.name
        return training

    def _stop_or_save(self, step: int) -> tuple[bool, bool]:
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
            self._fail(f"the loss is not finite at step {step - len(loss_nl) + 1 + row}{stage.where(column)}")

    def _fail(self, what: str) -> None:
        raise RunError(f"{what}: {self.run.kept()}; try a smaller --lr")

    def _log(self, stage: Stage, step: int, loss_nl: Tensor, seconds: float) -> None:
        num_steps = self.state.num_steps[stage.name]
        self.state.seconds += seconds
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
            self.tracker({k: v for k, v in values.items() if isinstance(v, float)}, self._total(step))

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
        self.state.unvalidated = False
        if self.fabric.is_global_zero:
            self.state.num_logged = self.run.num_logged()
            self.run.amend_checkpoint(self.state.to_dict())

    def _save(self, training: _Training, step: int, unvalidated: bool) -> None:
        stage, named = training.stage, _named(training.stage)
        if not torch.stack([p.detach().isfinite().all() for _, p in named]).all():
            self._fail(f"the weights are not finite after step {step}{stage.where()}")
        self.state.step, self.state.unvalidated, self.saved_at = step, unvalidated, _now()
        if not self.fabric.is_global_zero:
            return
        moments = training.moments()
        tensors = stage.tensors()
        for name, p, key in (kept for group in stage.groups for kept in _kept(group)):
            value = moments[p].get(key)
            if value is None:  # of a parameter that never had a gradient, which is the same as zeros
                value = torch.zeros(()) if key == "step" else torch.zeros_like(p)
            tensors[f"optimizer.{key}.{name}"] = value
        self.state.bad_images = self._own_bad_images()
        self.state.num_logged = self.run.num_logged()
        self.run.save_checkpoint(self._total(step), tensors, self.state.to_dict())

    def bad_images(self) -> list[str]:
        """Names of the unreadable images that were skipped since the run began, on any rank."""
        each = ranks_of(self.fabric).gather(self._own_bad_images())  # each rank reads its own images
        return sorted({name for names in each for name in names})

    def _own_bad_images(self) -> list[str]:
        return sorted({*self.state.bad_images, *(name for data in self.data for name in data.bad)})


class _Asked:
    """What any rank asks for, known to all of them.

    Ranks tell each other between their hosts (gloo) while a step runs, so that none waits for its GPU or for another
    rank's step: with several ranks the answer is that of the step before.
    """

    def __init__(self, world_size: int):
        self._group = _host_group() if world_size > 1 else None
        self._running: tuple[Tensor, Any] | None = None

    def by_any(self, *asked: bool) -> tuple[bool, ...]:
        """For each entry, whether some rank asked for it. Every rank calls this once per step."""
        if self._group is None:
            return asked
        answer = self._answer() if self._running else (False,) * len(asked)
        flags = torch.tensor(asked, dtype=torch.uint8)
        work = torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, self._group, async_op=True)
        self._running = flags, work
        return answer

    def _answer(self) -> tuple[bool, ...]:
        assert self._running is not None
        flags, work = self._running
        work.wait()
        return tuple(bool(flag) for flag in flags)


@cache
def _host_group() -> Any:
    """A group of all ranks whose messages go between hosts."""
    return torch.distributed.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)


class _Pace:
    """Keeps the host at most `_STEPS_AHEAD` steps ahead of a GPU, so that a stop signal has few steps to wait for."""

    def __init__(self, device: torch.device):
        self._events: deque[torch.cuda.Event] | None = deque() if device.type == "cuda" else None

    def wait(self) -> None:
        """Wait for the step before the last few; called after each step."""
        if self._events is None:
            return
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._events.append(event)
        if len(self._events) > _STEPS_AHEAD:
            self._events.popleft().synchronize()


@dataclass
class _Training:
    """A stage with its module as Fabric wraps it, and its optimizer."""

    stage: Stage
    wrapped: Any
    optimizer: Any
    backward: Callable[[Tensor], None]

    def step(self, step: int, num_steps: int) -> Tensor:
        """One optimizer step; the losses (N,) to log, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.stage.rates.at(step, num_steps)
        losses = self.stage.losses(self.wrapped, step, num_steps, self._propagate)
        for parameters in self.stage.clip_groups():
            nn.utils.clip_grad_norm_(parameters, self.stage.clip)
        self.optimizer.step()
        return losses.detach()

    def moments(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """The optimizer's state of each parameter."""
        return getattr(self.optimizer, "optimizer", self.optimizer).state

    def _propagate(self, loss: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.backward(loss)


def _short_budget(stage: Stage, num_steps: int) -> str:
    """What to say of a budget that is too short to train with, and what would be needed."""
    budget = stage.budget
    needed = math.ceil(budget.amount * MIN_STEPS / num_steps)
    return (
        f"{stage.title}: --budget {budget.amount:g}{budget.unit} gives only {num_steps} steps here, of "
        f"{stage.batch_size} images, so the result will be undertrained; {MIN_STEPS} steps need about "
        f"--budget {needed}{budget.unit}"
    )


def _named(stage: Stage) -> list[tuple[str, nn.Parameter]]:
    return [entry for group in stage.groups for entry in group.named]


def _kept(group: ParameterGroup) -> Iterator[tuple[str, nn.Parameter, str]]:
    """Name and parameter of a group, with each thing that its optimizer keeps of it."""
    return ((name, parameter, key) for name, parameter in group.named for key in moments_of(group.optimizer))


def _prepare(stage: Stage, tensors: Mapping[str, Tensor], fabric: Any) -> _Training:
    """A stage with its optimizer, which is continued from `tensors` if there are any."""
    groups = [
        {"params": [p for _, p in g.named], "weight_decay": g.weight_decay, "optimizer": g.optimizer}
        for g in stage.groups
    ]
    fused = fabric.device.type == "cuda"
    optimizer = make_optimizer(groups, stage.rates.peak, stage.betas, fused)
    if tensors:
        _restore_optimizer(optimizer, stage, tensors)
    wrapped, optimizer = fabric.setup(stage.module, optimizer)
    return _Training(stage, wrapped, optimizer, fabric.backward)


def _length(stage: Stage, step_seconds: Callable[[], float]) -> int:
    """The number of steps of a stage; `step_seconds` is asked only for a budget in seconds."""
    return stage.budget.num_steps(stage.steps_per_epoch, stage.share, step_seconds, stage.before)


def _step_seconds(training: _Training, fabric: Any) -> tuple[float, int]:
    """Mean seconds per step over all ranks, from a few steps that are then undone, and how many of them were timed."""
    saved = [(p, p.detach().clone()) for _, p in _named(training.stage)]
    mean, num_timed = mean_seconds(training.step, training.stage.kind, fabric.device, ranks_of(fabric))
    seconds = torch.tensor(mean, device=fabric.device)
    with torch.no_grad():
        for parameter, value in saved:
            parameter.copy_(value)
    training.moments().clear()
    return float(fabric.all_reduce(seconds, reduce_op="mean")), num_timed


def plan_stages(stages: Sequence[Stage], fabric: Any) -> list[PlannedPart]:
    """The length of each stage and the time of its steps, from a few that are done and undone."""
    parts = []
    for stage in stages:
        seconds, num_timed = _step_seconds(_prepare(stage, {}, fabric), fabric)
        length, is_timed = _length(stage, lambda seconds=seconds: seconds), stage.budget.unit == "s"  # type: ignore[misc]
        parts.append(PlannedPart(stage.name, length, stage.batch_size, seconds, is_timed, num_timed))
    return parts


def _read_state(run: Run, saved: dict[str, Any]) -> LoopState:
    """The state of a checkpoint; RunError that names it when it is damaged."""
    try:
        state = LoopState.from_dict(saved)
        if state.step < -1 or state.num_logged < 0 or any(num < 1 for num in state.num_steps.values()):
            raise ValueError("a count is negative")
        return state
    except ValueError as error:
        raise RunError(f"{run.latest()} cannot be continued (state.json: {error}): choose another --out") from None


def _restore_optimizer(optimizer: Any, stage: Stage, tensors: Mapping[str, Tensor]) -> None:
    """Put the optimizer's state of a checkpoint back."""
    for group in stage.groups:
        for n, p, key in _kept(group):
            value = tensors[f"optimizer.{key}.{n}"]
            optimizer.state[p][key] = value if key == "step" and not optimizer.defaults["fused"] else value.to(p.device)


def mean_seconds(
    train_step: Callable[[int, int], object],
    kind_of: Callable[[int, int], Hashable],
    device: torch.device,
    ranks: Ranks = ONE_PROCESS,
) -> tuple[float, int]:
    """Mean seconds per step of a whole run: each kind of step is timed and weighted by its share of the run.

    Also returns how many steps were timed.

    Args:
        train_step: trains one step, given its number and the number of all steps.
        kind_of: which kind of step (with teacher forcing or without) that is.
    """
    kinds = [kind_of(i, _TIMED_RUN) for i in range(_TIMED_RUN)]
    by_kind = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in dict.fromkeys(kinds)}
    by_kind = {kind: steps for kind, steps in by_kind.items() if len(steps) > 1}  # a single one does not count
    num_untimed, num_timed = _NUM_TIMED[device.type]
    total, num_all = 0.0, 0
    for steps in by_kind.values():
        start = min(num_untimed, len(steps) // 2)
        seconds, num = time_steps(
            lambda i, steps=steps: train_step(steps[i], _TIMED_RUN),  # type: ignore[misc]
            start,
            min(num_timed, len(steps) - start),
            lambda: _clock(device),
            ranks,
        )
        total, num_all = total + len(steps) * seconds, num_all + num
    return total / sum(map(len, by_kind.values())), num_all


def _now() -> float:
    return time.monotonic()


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


@contextmanager
def deaths_explained(run: Run, fabric: Any) -> Iterator[None]:
    """Inside, the death of a process that the run needs is one line that names the last good checkpoint."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())[:160]
        if is_dead_worker(error):
            what = f"a process that decodes images died ({text}); if memory is short, lower --num_workers"
        elif fabric.world_size > 1 and is_lost_rank(error):
            what = f"another process of this run died ({text})"
        else:
            raise
        raise RunError(f"{what}: {run.kept()}; the same command goes on from there") from None


def check_cadence(checkpoint_minutes: float) -> None:
    """Raise unless checkpoints can be that far apart."""
    if not 0 <= checkpoint_minutes < math.inf:
        raise ValueError(f"--checkpoint_minutes must be 0 or more, got {checkpoint_minutes:g}")


def check_tracker(track: str | None) -> None:
    """Raise unless the tracker is known and installed, before any work is done."""
    if track is not None and track not in _TRACKERS:
        raise ValueError(f"unknown tracker {track!r}: choose from {', '.join(_TRACKERS)}")
    if track is not None and find_spec(track) is None:
        raise ValueError(f"{track} is not installed: pip install 'raptor-vit[track]'")


def _open_tracker(track: str | None, folder: Path) -> Callable[[Mapping[str, float], int], object] | None:
    """A function of (numbers, step) that logs to `wandb` or `tensorboard`, or None."""
    check_tracker(track)
    if track == "wandb":
        import wandb

        run = wandb.init(project="raptor", dir=str(folder), name=folder.name)
        return lambda values, step: run.log(dict(values), step=step)
    if track == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard"))

        def add_scalars(values: Mapping[str, float], step: int) -> None:
            for key, value in values.items():
                writer.add_scalar(key, value, step)

        return add_scalars
    return None


def read_finished(kind: type[File], folder: Path) -> File | None:
    """The summary of a finished run; None when the run is not finished."""
    return kind.read(folder) if (folder / kind.FILE).exists() else None
