"""The host's part beside the steps: signals that all ranks know, the lead over a GPU, trackers, explained deaths."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raptor.data.images import is_dead_worker
from raptor.devices import COLLECTIVE_TIMEOUT, is_lost_rank
from raptor.files import RunError
from raptor.run import Run

STEPS_AHEAD = 4
_TRACKERS = ("wandb", "tensorboard")


class Asked:
    """Requests of single ranks, made known to all of them.

    Ranks tell each other between their hosts (gloo) while a step runs, so that none waits for its GPU or for another
    rank's step: with several ranks the answer is that of the step before.
    """

    def __init__(self, world_size: int):
        self._group = None
        if world_size > 1:
            self._group = _host_group()
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


class Pace:
    """Keeps the host at most `STEPS_AHEAD` steps ahead of a GPU, so that a stop signal has few steps to wait for."""

    def __init__(self, device: torch.device):
        self._is_needed = device.type == "cuda"
        self._events: deque[torch.cuda.Event] = deque()

    def wait(self) -> None:
        """Wait for the step before the last few; called after each step."""
        if not self._is_needed:
            return
        event = torch.cuda.Event(blocking=True)  # the host sleeps instead of spinning on a core that decodes images
        event.record()
        self._events.append(event)
        if len(self._events) > STEPS_AHEAD:
            self._events.popleft().synchronize()


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


def check_tracker(track: str | None) -> None:
    """Raise unless the tracker is known and installed, before any work is done."""
    if track is not None and track not in _TRACKERS:
        raise ValueError(f"unknown tracker {track!r}: choose from {', '.join(_TRACKERS)}")
    if track is not None and find_spec(track) is None:
        raise ValueError(f"{track} is not installed: pip install 'raptor-vit[track]'")


def open_tracker(track: str | None, folder: Path) -> Callable[[Mapping[str, float], int], object] | None:
    """A function of (numbers, step) that logs to `wandb` or `tensorboard`, or None."""
    check_tracker(track)
    # Imported here, because both take seconds and neither has to be installed.
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
