"""A clock that jumps by hours changes no result."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_artefacts import Artefacts
from fault_cases import MODEL, Faults, WholeRuns


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
