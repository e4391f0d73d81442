"""The stages of a distillation: shares of the budget, image sizes, the head term, hand-overs, what is averaged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import blocks_of, metrics, tiny_run
from torch import Tensor

from raptor.config import DistillConfig
from raptor.data import TrainStream
from raptor.run import Interrupted
from raptor.train.job import stage_shares
from raptor.train.loop import Loop
from raptor.train.step import DistillStep, teacher_forcing


def test_the_first_size_is_that_of_the_first_share_of_the_run(tmp_path, monkeypatch):
    """Each stage has five of ten steps, so the six with the smaller size end after the first step of stage 2."""
    seen: list[tuple[str, int]] = []
    batch = TrainStream.batch

    def noted(stream: TrainStream, step: int, stage: str = "stage1", size: int | None = None) -> Tensor:
        images = batch(stream, step, stage, size)
        seen.append((stage, images.shape[-1]))
        return images

    monkeypatch.setattr(TrainStream, "batch", noted)
    tiny_run(tmp_path / "run", budget="10steps", sizes=[24, 32], first_size_until=0.6)
    assert [size for stage, size in seen if stage == "stage1"] == [24] * 5
    assert [size for stage, size in seen if stage == "stage2"] == [24, 32, 32, 32, 32]


def test_the_head_term_is_logged_resumed_and_of_stage_2_only(tmp_path, monkeypatch):
    options = dict(head_weight=0.5, checkpoint_minutes=0)
    whole = tiny_run(tmp_path / "whole", **options)
    lines = [line for line in metrics(whole.folder) if "loss" in line]
    assert all(("head_loss" in line) == (line["stage"] == "stage2") for line in lines)
    assert all(len(line["layer_loss"]) == 4 for line in lines)
    assert all(line["loss"] == pytest.approx(sum(line["layer_loss"]) / 4, rel=1e-5) for line in lines)
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_stop_or_save", lambda loop: ((loop.state.stage, loop.state.step) == ("stage2", 1), True))
        with pytest.raises(Interrupted):
            tiny_run(tmp_path / "run", **options)
    again = tiny_run(tmp_path / "run", **options)
    assert all(torch.equal(blocks_of(whole)[n], v) for n, v in blocks_of(again).items())
    resumed = [line["head_loss"] for line in metrics(again.folder) if "head_loss" in line]
    assert resumed == [line["head_loss"] for line in lines if "head_loss" in line]
    plain = blocks_of(tiny_run(tmp_path / "plain"))
    assert any(not torch.equal(plain[n], v) for n, v in blocks_of(whole).items())


def test_only_the_stage_that_a_recipe_ends_with_is_averaged(tmp_path: Path) -> None:
    whole = tiny_run(tmp_path / "whole", average_last=0.5)
    tiny_run(tmp_path / "first", stage="1")
    joined = tiny_run(tmp_path / "second", stage="2", start=str(tmp_path / "first"), average_last=0.5)
    assert all(torch.equal(blocks_of(joined)[name], value) for name, value in blocks_of(whole).items())
    last, mean = (tiny_run(tmp_path / f"one-{share}", stage1_share=1.0, average_last=share) for share in (0.0, 0.5))
    assert any(not torch.equal(blocks_of(mean)[name], value) for name, value in blocks_of(last).items())


def test_hand_overs_are_drawn_by_the_step_so_that_a_resumed_run_is_the_same(tmp_path, monkeypatch):
    drawn = []
    forward = DistillStep.forward

    def noted(step, images, stage, *args, lengths=None, **options):
        drawn.append((stage, lengths))
        return forward(step, images, stage, *args, lengths=lengths, **options)

    monkeypatch.setattr(DistillStep, "forward", noted)
    options = dict(hand_over=0.5, budget="40steps", stage1_share=0.1, checkpoint_minutes=0)
    whole = tiny_run(tmp_path / "whole", **options)
    of_stage2 = [lengths for stage, lengths in drawn if stage == "stage2"]
    given = [lengths for lengths in of_stage2 if lengths is not None]
    # 36 draws of probability .5: outside 8 to 28 once in 1,000.
    assert all(lengths is None for stage, lengths in drawn if stage == "stage1") and 8 <= len(given) <= 28
    assert {tuple(lengths) for lengths in given} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_stop_or_save", lambda loop: ((loop.state.stage, loop.state.step) == ("stage2", 9), True))
        with pytest.raises(Interrupted):
            tiny_run(tmp_path / "run", **options)
    again = tiny_run(tmp_path / "run", **options)
    assert all(torch.equal(blocks_of(whole)[n], v) for n, v in blocks_of(again).items())


def shares(**options: Any) -> dict[str, float]:
    return stage_shares(DistillConfig("scenes", recipe="paper", **options))


def test_one_stage_alone_is_as_long_as_beside_the_other():
    for stage, name in (("1", "stage1"), ("2", "stage2")):
        assert shares(stage=stage) == {name: 0.5}
    assert shares(stage1_share=0.0) == {"stage2": 1.0}
    with pytest.raises(ValueError, match="leaves nothing for stage 1"):
        shares(stage1_share=0.0, stage="1")


@pytest.mark.parametrize(("budget", "stages"), [("6steps", (3, 3)), ("1epochs", (4, 4)), ("5steps", (2, 3))])
def test_budgets_of_steps_and_epochs(tmp_path, budget, stages):
    """64 images in batches of 8 are 8 steps an epoch, shared by two stages."""
    result = tiny_run(tmp_path / "run", budget=budget)
    assert result.summary.num_steps == dict(zip(("stage1", "stage2"), stages))


def test_one_step_cannot_be_shared_by_two_stages(tmp_path):
    with pytest.raises(ValueError, match="give --budget 2steps or more"):
        tiny_run(tmp_path / "run", budget="1steps")
    assert tiny_run(tmp_path / "run", budget="1steps", stage1_share=0.0).summary.num_steps == {"stage2": 1}


def test_lambda_is_annealed_linearly_to_zero():
    lam = [teacher_forcing(step, 400, 0.5, 0.25) for step in range(400)]
    assert lam[0] == 0.5
    assert lam[50] == 0.25
    assert lam[99] == pytest.approx(0.005)
    assert set(lam[100:]) == {0.0}
    assert teacher_forcing(0, 10, 1.0, 0.0) == 0.0
    assert teacher_forcing(0, 4, 0.5, 0.25) == 0.5  # over one step
    assert [teacher_forcing(step, 4, 0.5, 0.125) for step in (0, 1)] == [0.5, 0.0]  # over half a step
    assert teacher_forcing(9, 10, 1.0, math.inf) == 1.0
