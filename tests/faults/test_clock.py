"""A clock that jumps by hours changes no result, and ends no sweep early."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fault_artefacts import Artefacts
from fault_cases import MODEL, Faults, WholeRuns

from raptor.experiments.cells import Cell, Sweep, run_sweep


@pytest.mark.parametrize("kind", MODEL)
def test_a_training_under_a_clock_that_jumps(kind: str, tmp_path: Path, faults: Faults, whole_runs: WholeRuns) -> None:
    artefacts = Artefacts(tmp_path / "run", MODEL[kind])
    assert faults.finish(kind, artefacts.folder, {"clock": 0, "die_at": 70}) == -9
    faults.fault("kills", artefacts)
    assert faults.finish(kind, artefacts.folder, {"clock": 1}) == 0, faults.said()
    faults.fault("other faults", artefacts)
    faults.ends_like(artefacts, whole_runs(kind)[0])
    summary = (artefacts.folder / "summary.json").read_text()
    assert '"seconds": -' not in summary


def test_a_clock_that_jumps_ahead_does_not_end_a_sweep(tmp_path: Path, faults: Faults, monkeypatch) -> None:
    now = time.time

    def work(cell: Cell) -> dict[str, int]:
        monkeypatch.setattr(time, "time", lambda: now() + 7200 * (cell.options["value"] + 1))
        return {"value": cell.options["value"]}

    sweep = Sweep(tmp_path, tuple(Cell(name, {"value": i}) for i, name in enumerate("abc")))
    assert len(run_sweep(sweep, work, max_seconds=600.0)) == 3
    faults.fault("other faults")
