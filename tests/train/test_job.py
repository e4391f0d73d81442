"""What one distillation works with: its stages and the steps of each."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_run import tiny_run

from raptor.config import DistillConfig
from raptor.train.job import Job


def job_of(**options: Any) -> Job:
    config = DistillConfig("scenes", recipe="paper", **options)
    return Job(config, None, None, None, "fp32")  # type: ignore[arg-type]


def test_one_stage_alone_is_as_long_as_beside_the_other():
    for stage, name in (("1", "stage1"), ("2", "stage2")):
        assert job_of(stage=stage).stages() == {name: 0.5}
    assert job_of(stage1_share=0.0).stages() == {"stage2": 1.0}
    with pytest.raises(ValueError, match="leaves nothing for stage 1"):
        job_of(stage1_share=0.0, stage="1").stages()


@pytest.mark.parametrize(("budget", "stages"), [("6steps", (3, 3)), ("1epochs", (4, 4)), ("5steps", (2, 3))])
def test_budgets_of_steps_and_epochs(tmp_path, budget, stages):
    """64 images in batches of 8 are 8 steps an epoch, shared by two stages."""
    result = tiny_run(tmp_path / "run", budget=budget)
    assert result.summary.num_steps == dict(zip(("stage1", "stage2"), stages))


def test_one_step_cannot_be_shared_by_two_stages(tmp_path):
    with pytest.raises(ValueError, match="give --budget 2steps or more"):
        tiny_run(tmp_path / "run", budget="1steps")
    assert tiny_run(tmp_path / "run", budget="1steps", stage1_share=0.0).summary.num_steps == {"stage2": 1}
