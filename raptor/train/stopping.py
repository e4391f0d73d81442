"""How a run ends before its last step: a stop signal that reaches any of its processes, or a process that dies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from raptor.data.images import is_dead_worker
from raptor.devices import COLLECTIVE_TIMEOUT, is_lost_rank
from raptor.files import RunError
from raptor.run import Run

STEPS_AHEAD = 4


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
    rank's step: with several ranks the answer is about the step before.
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
