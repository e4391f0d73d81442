"""Signals stop every command with 130; what ends one is a line where the input or the machine is at fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raptor.terminal.streams import is_users, one_line

WAITING = """
import sys, time
from raptor import cli

def wait(name, words):
    print("begun", flush=True)
    time.sleep(60)

cli.run_command = wait
sys.exit(cli.main(["phases"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_stops_any_command(number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", WAITING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None and run.stdout.readline() == "begun\n"
        run.send_signal(number)
        _, said = run.communicate(timeout=20)
    assert (run.returncode, said) == (130, "raptor: stopped\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_a_text_is_executed_ends_with_the_same_code(number: signal.Signals, tmp_path: Path) -> None:
    """Dataclasses execute texts while torch is imported. `python -m` then looks at how such a text ended."""
    code = WAITING.replace("time.sleep(60)", "").replace(
        'print("begun", flush=True)', """exec("print('begun', flush=True); time.sleep(60)")"""
    )
    (tmp_path / "waiting.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"}
    command = [sys.executable, "-m", "waiting"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None and run.stdout.readline() == "begun\n"
        run.send_signal(number)
        _, said = run.communicate(timeout=20)
    assert (run.returncode, said) == (130, "raptor: stopped\n")


def test_whose_error_it_is() -> None:
    memory = type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory")
    assert is_users(ValueError("x")) and is_users(OSError("x")) and is_users(memory)
    assert not is_users(RuntimeError("a defect")) and not is_users(KeyError("x"))
    assert one_line(ValueError("two\nlines \x1b[31m")) == "two lines \\x1b[31m" and "memory is full" in one_line(memory)
