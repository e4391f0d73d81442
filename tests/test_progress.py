"""Progress in a log, in a terminal, on a closed or broken standard error, and on other ranks."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest

from raptor import progress as module
from raptor.progress import Progress, clock, track

WORK = """
import sys, time
from raptor.progress import Progress
bar = Progress("similarity", 3, "batches", 64, "images")
bar.interval, bar.note = 0, "loss [1.5]"
for i in range(3):
    time.sleep(0.01)
    bar.advance()
    {between}
bar.finish()
print("done")
"""


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock that Progress reads: set `seconds[0]`."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_no_rate_before_the_second_unit(capsys: pytest.CaptureFixture[str], seconds: list[float]) -> None:
    bar = Progress("distil", 5, "steps", 64, "images")
    bar.interval = 0
    seconds[0] = 10.0
    bar.advance()
    seconds[0] = 12.0
    bar.advance()
    first, second = capsys.readouterr().err.strip().splitlines()
    assert first == "distil: 1/5 steps"
    assert second == "distil: 2/5 steps, 32 images/s, 6 s left"


def test_a_log_gets_a_line_every_15_seconds_and_a_closing_one(
    capsys: pytest.CaptureFixture[str], seconds: list[float]
) -> None:
    bar = Progress("probe", None, "steps")
    for second in range(1, 41):
        seconds[0] = float(second)
        bar.update(second, 40)
    bar.note = "loss 0.1"
    bar.finish()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "probe: 15/40 steps, 1 steps/s, 25 s left",
        "probe: 30/40 steps, 1 steps/s, 10 s left",
        "probe: 40 steps in 40 s loss 0.1",
    ]


def test_a_slow_rate_is_not_zero(capsys: pytest.CaptureFixture[str], seconds: list[float]) -> None:
    bar = Progress("swaps", 66, "pairs")
    for second in (0.0, 20.0):
        seconds[0] = second
        bar.advance(6)
    assert capsys.readouterr().err == "swaps: 12/66 pairs, 0.3 pairs/s, 3 min 00 s left\n"


def test_a_resumed_bar_counts_only_its_own_steps(capsys: pytest.CaptureFixture[str], seconds: list[float]) -> None:
    bar = Progress("distil", 200, "steps")
    bar.done = 100  # of an earlier run
    bar.advance()
    seconds[0] = 20.0
    bar.advance(19)
    assert capsys.readouterr().err == "distil: 120/200 steps, 1 steps/s, 1 min 24 s left\n"


def test_track_says_how_long_it_took_unless_it_was_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track([1, 2, 3], "count")) == [1, 2, 3]
    assert capsys.readouterr().err == "count: 3 batches in 0 s\n"
    items = track(iter([1, 2, 3]), "count")
    next(items)
    items.close()
    with pytest.raises(KeyError), Progress("count", 3) as bar:
        bar.advance()
        raise KeyError
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("stream", ["closed", "broken", "none"])
def test_a_standard_error_that_cannot_be_written_is_left_alone(monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    class Broken(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", {"closed": closed, "broken": Broken(), "none": None}[stream])
    bar = Progress("distil", 2)
    bar.interval = 0
    bar.advance()
    assert not bar.shown
    bar.advance()
    bar.finish()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_rank_0_shows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    monkeypatch.setenv("RANK", rank)
    bar = Progress("distil", 2)
    bar.interval = 0
    bar.advance()
    bar.finish()
    assert bool(capsys.readouterr().err) == (rank == "0")


def in_terminal(code: str, hang_up: bool = False) -> tuple[str, str]:
    """Standard output, and what a terminal on standard error gets. With `hang_up` nobody is there to read it."""
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=slave, env=env
    )
    os.close(slave)
    if hang_up:
        assert process.stdout is not None and process.stdout.readline() == b"started\n"
        os.close(master)
    out = process.communicate(b"go\n", timeout=60)[0].decode()
    shown = b""
    try:
        while not hang_up and (part := os.read(master, 4096)):
            shown += part
    except OSError:  # the end of a terminal
        pass
    assert process.returncode == 0, shown
    return out, shown.decode()


def test_a_terminal_gets_a_bar_and_its_cursor_back() -> None:
    out, shown = in_terminal(WORK.format(between="pass"))
    assert out == "done\n"
    assert "similarity" in shown and "━" in shown
    assert "3/3 batches" in shown and "images/s" in shown and "0 s left  loss [1.5]" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is shown again, last of all


def test_an_unfinished_bar_gives_the_cursor_back() -> None:
    _, shown = in_terminal(WORK.replace("bar.finish()", "").format(between="pass"))
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_a_terminal_that_goes_away_does_not_stop_the_work() -> None:
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    wait = "(print('started', flush=True), sys.stdin.readline()) if i == 0 else None"
    out, _ = in_terminal(ignore + WORK.format(between=wait), hang_up=True)
    assert out == "done\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [(41.6, "42 s"), (185, "3 min 05 s"), (7800, "2 h 10 min"), (float("inf"), "?"), (float("nan"), "?")],
)
def test_clock(value: float, text: str) -> None:
    assert clock(value) == text


def test_a_quiet_one_says_nothing_when_it_was_quick(capsys) -> None:
    assert list(track(range(3), "short", quiet=True)) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    assert list(track(range(3), "short")) == [0, 1, 2]
    assert "short: 3 batches" in capsys.readouterr().err
