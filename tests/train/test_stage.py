"""The stages of a distillation: image sizes, the head term, hand-overs, and which stage is averaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_run import blocks_of, metrics, tiny_run
from torch import Tensor, nn

from raptor.config import Recipe
from raptor.data import TrainStream
from raptor.run import Interrupted
from raptor.train.loop import Loop
from raptor.train.stage import parameter_groups
from raptor.train.step import DistillStep


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
    options = dict(budget="12steps", average_last=0.5)
    whole = tiny_run(tmp_path / "whole", **options)
    tiny_run(tmp_path / "first", stage="1", **options)
    joined = tiny_run(tmp_path / "second", stage="2", start=str(tmp_path / "first"), **options)
    assert all(torch.equal(blocks_of(joined)[name], value) for name, value in blocks_of(whole).items())
    last, mean = (tiny_run(tmp_path / f"one-{share}", stage1_share=1.0, average_last=share) for share in (0.0, 0.5))
    assert any(not torch.equal(blocks_of(mean)[name], value) for name, value in blocks_of(last).items())


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    named = [("a.weight", nn.Parameter(torch.zeros(16, 32))), ("a.bias", nn.Parameter(torch.zeros(16)))]
    matrices, others = parameter_groups(named, Recipe(recipe="default", optimizer="muon", weight_decay=0.1))
    assert (matrices.optimizer, matrices.weight_decay, matrices.named) == ("muon", 0.1, named[:1])
    assert (others.optimizer, others.weight_decay, others.named) == ("adamw", 0.1, named[1:])
    (together,) = parameter_groups(named, Recipe(recipe="adamw"))
    assert (together.optimizer, together.named) == ("adamw", named)


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
