"""kill -9 at random moments, and before every kind of file operation: nothing is lost, and the weights are the same."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from fault_artefacts import Artefacts
from fault_cases import MODEL, Faults, WholeRuns

pytestmark = pytest.mark.slow
NUM_KILLS = 20
MAX_PROCESSES = 150


@pytest.mark.parametrize("kind", MODEL)
def test_killed_at_random_moments(kind: str, tmp_path: Path, faults: Faults, whole_runs: WholeRuns) -> None:
    """Each process is killed at a moment of the duration of a whole run, until one finishes; then a new run begins."""
    whole, seconds = whole_runs(kind)
    draw = random.Random(kind)
    num_kills = num_finished = num_started = 0
    while num_kills < NUM_KILLS or not num_finished:
        artefacts = Artefacts(tmp_path / f"run-{num_finished}", MODEL[kind])
        while not (artefacts.folder / "summary.json").exists():
            num_started += 1
            assert num_started < MAX_PROCESSES, f"only {num_kills} of {num_started} processes were still running"
            began = time.monotonic()
            process = faults.start(kind, artefacts.folder)
            last = num_kills >= NUM_KILLS
            process.join(None if last else draw.uniform(0, seconds))
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()
            if process.exitcode == -signal.SIGKILL:
                num_kills += 1
                faults.fault("kills", artefacts)
            else:
                assert process.exitcode == 0, faults.said()
                seconds = min(seconds, time.monotonic() - began)
        assert faults.finish(kind, artefacts.folder) == 0, faults.said()
        faults.ends_like(artefacts, whole)
        num_finished += 1


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("kind", MODEL)
def test_killed_before_each_file_operation(
    kind: str, torn: bool, tmp_path: Path, faults: Faults, whole_runs: WholeRuns
) -> None:
    """Process n is killed before its n-th file operation: first all within one checkpoint, then over several, then
    those of the model and the summary at the end. With `torn` what was not synced yet is cut in half."""
    artefacts = Artefacts(tmp_path / "run", MODEL[kind])
    for number in range(1, MAX_PROCESSES, 2):
        code = faults.finish(kind, artefacts.folder, {"die_at": number + torn, "torn": torn})
        if code == 0:
            break
        assert code == -signal.SIGKILL, faults.said()
        faults.fault("kills", artefacts)
    assert number > NUM_KILLS
    faults.ends_like(artefacts, whole_runs(kind)[0])
