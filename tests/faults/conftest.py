from __future__ import annotations

import time
from pathlib import Path

import pytest
from fault_cases import Faults, WholeRuns


@pytest.fixture
def faults(tmp_path: Path, record_property) -> Faults:
    counts = dict.fromkeys(("runs", "kills", "other faults", "artefacts checked", "lost or damaged"), 0)
    record_property("faults", counts)  # printed by tests/conftest.py
    return Faults(counts, tmp_path / "report")


@pytest.fixture(scope="session")
def whole_runs(tmp_path_factory: pytest.TempPathFactory) -> WholeRuns:
    """Runs without faults, each made when it is first asked for."""
    folder = tmp_path_factory.mktemp("whole")
    done = {}

    def whole(kind: str) -> tuple[Path, float]:
        if kind not in done:
            faults = Faults({"runs": 0}, folder / "report")
            began = time.monotonic()
            assert faults.finish(kind, folder / kind) == 0, faults.said()
            done[kind] = folder / kind, time.monotonic() - began
        return done[kind]

    return whole
