"""What one distillation works with: its stages and the steps of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_run import tiny_run

from raptor.config import Recipe
from raptor.train.job import Job


def test_one_stage_alone_is_as_long_as_beside_the_other():
    recipe = Recipe(recipe="paper")
    for stage, name in (("1", "stage1"), ("2", "stage2")):
        assert Job(None, recipe, None, None, None, stage=stage).stages() == {name: 0.5}  # type: ignore[arg-type]
    joint = replace(recipe, stage1_share=0.0)
    assert Job(None, joint, None, None, None).stages() == {"stage2": 1.0}  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leaves nothing for stage 1"):
        Job(None, joint, None, None, None, stage="1").stages()  # type: ignore[arg-type]


@pytest.mark.parametrize(("budget", "stages"), [("6steps", (3, 3)), ("1epochs", (4, 4)), ("5steps", (2, 3))])
def test_budgets_of_steps_and_epochs(tmp_path, budget, stages):
    """64 images in batches of 8 are 8 steps an epoch, shared by two stages."""
    result = tiny_run(tmp_path / "run", budget=budget)
    assert result.summary.num_steps == dict(zip(("stage1", "stage2"), stages))


def test_one_step_cannot_be_shared_by_two_stages(tmp_path):
    with pytest.raises(ValueError, match="give --budget 2steps or more"):
        tiny_run(tmp_path / "run", budget="1steps")
    assert tiny_run(tmp_path / "run", budget="1steps", stage1_share=0.0).summary.num_steps == {"stage2": 1}
