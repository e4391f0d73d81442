"""The one training loop. Surrogates and teachers train in it: a list of stages, one plain loop over steps for each.

A `Stage` says what is trained and how one step goes. The loop owns the rest: the budget, checkpoints and exact resume,
the stop signal, checks for finite values, metrics, progress bar and tracker. Everything random is a function of (seed,
stage, step), so a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raptor.certificate.verdict import MIN_STEPS
from raptor.data import ImageData
from raptor.data.images import is_dead_worker
from raptor.devices import COLLECTIVE_TIMEOUT, is_lost_rank, is_out_of_memory, ranks_of
from raptor.files import RunError
from raptor.progress import Progress, say
from raptor.run import Interrupted, Run, StopSignal
from raptor.streaming import Record
from raptor.train.optimizer import damaged_moment
from raptor.train.plan import few_steps, step_seconds
from raptor.train.stage import Stage, Training

STEPS_AHEAD = 4
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
            num_steps = stage.num_steps(lambda: step_seconds(training, self.fabric)[0])
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
            "lr": stage.rate(step, num_steps),
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


class Pace:
    """Keeps the host at most `STEPS_AHEAD` steps ahead of a GPU, so that a stop signal has few steps to wait for."""

    def __init__(self) -> None:
        self._events: deque[torch.cuda.Event] = deque()

    def wait(self) -> None:
        """Wait for the step before the last few; called after each step."""
        event = torch.cuda.Event(blocking=True)  # the host sleeps instead of spinning on a core that decodes images
        event.record()
        self._events.append(event)
        if len(self._events) > STEPS_AHEAD:
            self._events.popleft().synchronize()


class Asked:
    """Requests of single ranks, made known to all of them.

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
        # The answer of the step before: to wait for this one's would hold up the launch of kernels.
        answer = (False,) * len(asked)
        if self._running is not None:
            flags, work = self._running
            work.wait()
            answer = tuple(flags.bool().tolist())
        # The largest flag says whether any rank asked.
        flags = torch.tensor(asked, dtype=torch.uint8)
        work = torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, self._group, async_op=True)
        self._running = (flags, work)
        return answer


@cache
def _host_group() -> Any:
    """A group of all ranks whose messages go between hosts."""
    return torch.distributed.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)


@contextmanager
def deaths_explained(run: Run, fabric: Any) -> Iterator[None]:
    """Inside, the death of a process that the run needs is one line that names the last good checkpoint."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())[:160]  # torch's own may go on over pages
        if is_dead_worker(error):
            what = f"a process that decodes images died ({text}); if memory is short, lower --num_workers"
        elif fabric.world_size > 1 and is_lost_rank(error):
            what = f"another process of this run died ({text})"
        else:
            raise
        raise RunError(f"{what}: {run.kept()}; the same command goes on from there") from None


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
