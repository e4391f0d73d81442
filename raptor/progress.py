"""Progress on the terminal: a bar with rate and time left, or a line now and then where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Progress:
    """Counts towards `total` and shows it on standard error.

    Args:
        description: what is being done.
        total: how many units there are; None when unknown.
        unit: the name of a unit, for the rate.
        per_unit: what one unit stands for in `rate_unit` (e.g. images in a step).
    """

    def __init__(
        self,
        description: str,
        total: int | None,
        unit: str = "batches",
        per_unit: float = 1,
        rate_unit: str | None = None,
    ):
        self.description, self.total, self.unit = description, total, unit
        self.per_unit, self.rate_unit = per_unit, rate_unit or unit
        self.done, self.note = 0, ""
        self.started = self.last_shown = time.monotonic()
        self.first_done: int | None = None
        self.live = sys.stderr.isatty()
        self.interval = 0.2 if self.live else 15.0

    def start_at(self, done: int) -> None:
        self.done = done

    def advance(self, num: int = 1, note: str | None = None) -> None:
        self.done += num
        if self.first_done is None:  # the first took what loading and compiling take: it is not counted
            self.first_done, self.started = self.done, time.monotonic()
        if note is not None:
            self.note = note
        now = time.monotonic()
        if now - self.last_shown >= self.interval:
            self.last_shown = now
            self._show()

    def finish(self) -> None:
        if self.live:
            self._show()
            sys.stderr.write("\n")
        elif self.done:
            seconds = time.monotonic() - self.started
            sys.stderr.write(f"{self.description}: {self.done} {self.unit} in {clock(seconds)} {self.note}\n")
        sys.stderr.flush()

    def rate(self) -> float:
        """`rate_unit` per second since the first advance; 0 before the second."""
        elapsed = time.monotonic() - self.started
        return (self.done - (self.first_done or 0)) * self.per_unit / elapsed if elapsed > 0 else 0.0

    def _show(self) -> None:
        rate = self.rate()
        text = f"{self.description}: {self.done}"
        if self.total:
            text += f"/{self.total} {self.unit}"
        if self.total and rate > 0:
            left = (self.total - self.done) * self.per_unit / rate
            text += f", {rate:.0f} {self.rate_unit}/s, {clock(left)} left"
        if self.note:
            text += f"  {self.note}"
        if self.live:
            width = 20
            filled = int(width * self.done / self.total) if self.total else 0
            sys.stderr.write("\r\x1b[2K" + "━" * filled + "─" * (width - filled) + " " + text)
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()


def track(items: Iterable[T], description: str, total: int | None = None, unit: str = "batches") -> Iterator[T]:
    """Iterate over `items` and show how far it is."""
    if total is None and hasattr(items, "__len__"):
        total = len(items)  # type: ignore[arg-type]
    progress = Progress(description, total, unit)
    for item in items:
        yield item
        progress.advance()
    progress.finish()


def clock(seconds: float) -> str:
    """Seconds as a person writes them: 42 s, 3 min 05 s, 2 h 10 min."""
    if seconds != seconds or seconds == float("inf"):
        return "?"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
