from __future__ import annotations

import pytest

from raptor.commands.reproduce import EXPERIMENTS, experiment


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_every_experiment_can_be_run_by_name(name: str) -> None:
    assert callable(experiment(name)) and experiment(name).__doc__
