"""Progress on standard error: a bar in a terminal or a notebook, a line now and then in a log."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Sized
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

T = TypeVar("T")

_BAR_INTERVAL = 0.2
_LOG_INTERVAL = 15.0
"""Seconds between two updates of the bar, or between two lines of a log."""


class Progress:
    """Counts towards `total` and shows it with rate and time left. Only rank 0 shows anything.

    A standard error that is closed or broken never raises here: the progress is then no longer shown.

    Args:
        description: what is being done.
        total: the number of units; None when unknown. It may be set later.
        unit: the name of a unit.
        per_unit: how many of `rate_unit` one unit stands for (e.g. images per step).
        rate_unit: the unit of the rate; by default `unit`.
        quiet: in a log, say nothing when it was done before the first line was due.

    Attributes:
        done: the number of units done. note: a text shown after the time left.
        shown: whether anything is written. interval: seconds between two updates.
    """

    def __init__(
        self,
        description: str,
        total: int | None,
        unit: str = "batches",
        per_unit: float = 1,
        rate_unit: str | None = None,
        quiet: bool = False,
    ):
        self.description = description
        self.total = total
        self.unit = unit
        self.per_unit = per_unit
        self.rate_unit = rate_unit or unit
        self.quiet = quiet
        self.done = 0
        self.note = ""
        self.shown = started_processes()[0] == 0
        self._began = self._started = self._last_shown = time.monotonic()
        self._first_done: int | None = None
        self._outer = _open_bars[-1] if _open_bars else None  # a terminal shows one bar: this one is part of its text
        self._bar = _open_bar(description) if self.shown and self._outer is None else None
        self.interval = _LOG_INTERVAL
        if self._bar is not None or self._outer is not None:
            self.interval = _BAR_INTERVAL
        if self._bar is not None:
            _open_bars.append(self)
            weakref.finalize(self, _close_bar, self._bar)  # gives the cursor back where `finish` is never reached

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, error: type[BaseException] | None, *_rest: object) -> None:
        self.finish() if error is None else self.close()

    def update(self, done: int, total: int) -> None:
        """Set what is done and the total: the callback of functions that report (done, total)."""
        self.total = total
        self.advance(done - self.done)

    def advance(self, num: int = 1) -> None:
        """Count `num` more units, and show them if the interval is over."""
        self.done += num
        now = time.monotonic()
        if self._first_done is None:  # the first unit includes loading and compiling: the rate leaves it out
            self._first_done = self.done
            self._started = now
        if now - self._last_shown >= self.interval:
            self._last_shown = now
            self._show()

    def finish(self) -> None:
        """Show the final state: the full bar, or a closing line with the time taken."""
        if self._bar is not None:
            self._show()
        elif self.done and self._outer is None and not (self.quiet and time.monotonic() - self._began < self.interval):
            # With the first unit, which the rate leaves out: this is how long it took.
            seconds = time.monotonic() - self._began
            self._write(f"{self.description}: {self.done} {self.unit} in {clock(seconds)} {self.note}".rstrip())
        self.close()

    def close(self) -> None:
        """Stop showing progress, as when the work was interrupted."""
        self.shown = False
        if self in _open_bars:
            _open_bars.remove(self)
        if self._bar is not None:
            _close_bar(self._bar)
            self._bar = None

    def _show(self) -> None:
        if not self.shown:
            return
        elapsed = time.monotonic() - self._started
        rate = 0.0
        if elapsed > 0:
            rate = (self.done - (self._first_done or 0)) * self.per_unit / elapsed
        status = f"{self.done}"
        if self.total:
            status += f"/{self.total} {self.unit}"
        if self.total and rate > 0:
            left = (self.total - self.done) * self.per_unit / rate
            # A slow rate is not rounded to 0.
            shown = f"{rate:.0f}" if rate > 0.5 else f"{rate:.1g}"
            status += f", {shown} {self.rate_unit}/s, {clock(left)} left"
        if self.note:
            status += f"  {self.note}"
        if self._outer is not None:
            self._outer._draw(f"{self.description}: {status}")
        elif self._bar is not None:
            self._draw(status, completed=self.done, total=self.total)
        else:
            self._write(f"{self.description}: {status}")

    def _draw(self, status: str, **counts: int | None) -> None:
        """Show `status` beside the bar, and the counts that are given in it."""
        try:
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], status=status, **counts)  # type: ignore[arg-type]
                self._bar.refresh()
        except (OSError, ValueError):
            self.close()

    def _write(self, line: str) -> None:
        try:
            if self.shown:
                sys.stderr.write(line + "\n")
                sys.stderr.flush()
        except (AttributeError, OSError, ValueError):  # closed, broken or None
            self.shown = False


_open_bars: list[Progress] = []


def started_processes() -> tuple[int, int]:
    """The number of this process and how many there are, as torchrun or srun say it; (0, 1) without them."""
    # First, because torchrun inside a job of Slurm has the variables of both.
    if "RANK" in os.environ:
        return int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", 1))
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:  # only srun sets it: a batch script is one process
        return int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_STEP_NUM_TASKS"])
    return 0, 1


def _open_bar(description: str) -> RichProgress | None:
    """A bar on standard error; None when that is neither a terminal nor a notebook."""
    notebook = "IPython" in sys.modules and find_spec("ipywidgets") is not None
    try:
        if not (notebook or sys.stderr.isatty()):
            return None
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        class ErrorConsole(Console):
            def on_broken_pipe(self) -> None:  # rich ends the process here
                self.quiet = True

        console = ErrorConsole(stderr=True)
        # A terminal that is called dumb cannot move its cursor.
        if not console.is_jupyter and (not console.is_terminal or console.is_dumb_terminal):
            return None
        # Refreshed by `advance` and not by a thread, since data loaders fork this process.
        bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[status]}", markup=False),
            console=console,
            auto_refresh=False,
            # rich would put streams of its own in the place of ours, which never break.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        bar.add_task(description, total=None, status="")
        bar.start()
        return bar
    except (AttributeError, OSError, ValueError):
        return None


def _close_bar(bar: RichProgress) -> None:
    try:
        bar.stop()
    except (OSError, ValueError):
        bar.console.quiet = True


def track(items: Iterable[T], description: str, quiet: bool = False) -> Iterator[T]:
    """Iterate over `items`, which are batches, and show how many are done."""
    total = len(items) if isinstance(items, Sized) else None
    with Progress(description, total, "batches", quiet=quiet) as progress:
        for item in items:
            yield item
            progress.advance()


def say(line: str) -> None:
    """A line on standard error, from rank 0 only."""
    if started_processes()[0] == 0:
        print(line, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Seconds as a person writes them: 42 s, 3 min 05 s, 2 h 10 min."""
    # NaN is the one number that differs from itself.
    if seconds != seconds or seconds == float("inf"):
        return "?"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
