"""Findings in words, against numbers read off by hand and against the committed results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raptor.dynamics.findings import arrival, boundary_finding, find
from raptor.dynamics.measure import DynamicsFile

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "dynamics"


def test_arrival_is_the_layer_after_the_last_one_below() -> None:
    assert arrival(np.array([0.1, 0.95, 0.8, 0.93, 1.0])) == 3
    assert arrival(np.array([0.95, 1.0])) == 0


def test_boundary_finding_by_hand() -> None:
    # steps 1..4, phases 2 | 2: the third step begins the second phase
    line = boundary_finding(np.array([0.1, 0.2, 0.6, 0.3]), (2, 2))
    assert "0.600 rad in the first step of a later phase, 0.200 in the others (3.00 times)" in line


@pytest.mark.parametrize("name", ["scenes", "dinov2s-k3"])
def test_findings_of_committed_results(name: str) -> None:
    measured = DynamicsFile.read_file(RESULTS / f"{name}.json")
    for result in measured.sides().values():
        lines = find(result, measured.phases)
        norm = result.direction.norm["all"].mean
        assert f"{norm[0]:.3g} at layer 0, {norm[-1]:.3g} at layer {len(norm) - 1}" in lines[0]
        assert not any("nan" in line for line in lines)
        kinds = [line.split()[0].rstrip(":,") for line in lines]
        assert kinds[:4] == ["norm", "direction", "speed", "phases"]
        assert ("sensitivity" in kinds) == (result.stability is not None)
        assert ("basins" in kinds) == (result.basins is not None)
        for group, speed in result.direction.speed.items():
            if group != "all":
                assert f"{group} {speed.mean.mean():.3f} rad" in lines[2]
    assert not any(line.startswith("phases") for line in find(measured.teacher))
