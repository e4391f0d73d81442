"""The mean of the last weights: by hand, in a run, and in one that is interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_run import blocks_of, tiny_run
from torch import nn

from raptor.run import Interrupted
from raptor.train.average import WeightAverage
from raptor.train.loop import Loop

OPTIONS = dict(budget="12steps", average_last=0.5)  # stage 2 has six steps, of which the last three count


def test_the_weights_end_as_the_mean_of_the_last_steps() -> None:
    """After the steps 0..4 the weights are 1, 10, 2, 3, 7; of the last three the mean is 4."""
    weight = nn.Parameter(torch.zeros(2))
    average = WeightAverage([("w", weight)], 0.6)
    for step, value in enumerate([1.0, 10.0, 2.0, 3.0, 7.0]):
        weight.data.fill_(value)
        average.add(step, 5)
        assert (average.tensors() != {}) == (step >= 2)
    torch.testing.assert_close(weight.data, torch.full((2,), 4.0))


def test_without_a_share_the_weights_stay() -> None:
    weight = nn.Parameter(torch.ones(2))
    average = WeightAverage([("w", weight)], 0.0)
    for step in range(3):
        weight.data += 1
        average.add(step, 3)
    assert weight.tolist() == [4.0, 4.0] and not average.tensors()


def test_a_surrogate_ends_with_the_mean_of_its_last_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the weights that the same run without a mean has after its last three steps."""
    seen: list[dict[str, torch.Tensor]] = []
    save = Loop._save

    def kept(loop: Loop, training, step: int, *args, **kwargs) -> None:
        blocks = training.stage.module.shared_blocks.state_dict()
        seen.append({name: value.double().clone() for name, value in blocks.items()})
        save(loop, training, step, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_save", kept)
        tiny_run(tmp_path / "plain", budget="12steps", checkpoint_minutes=0.0)
    found = blocks_of(tiny_run(tmp_path / "mean", **OPTIONS))
    assert len(seen) == 12
    for name, value in found.items():
        mean = torch.stack([weights[name] for weights in seen[-3:]]).mean(0)
        torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stop_after", [0, 3, 4])
def test_an_interrupted_run_ends_with_the_same_mean(tmp_path: Path, monkeypatch, stop_after: int) -> None:
    """Stopped before the mean began, and after its first and second step."""
    whole = tiny_run(tmp_path / "whole", **OPTIONS)
    steps = iter(range(6))

    def stop(loop: Loop) -> tuple[bool, bool]:
        return loop.state.stage == "stage2" and next(steps) == stop_after, True

    with monkeypatch.context() as patch, pytest.raises(Interrupted, match=f"stopped after step {stop_after} of stage2"):
        patch.setattr(Loop, "_stop_or_save", stop)
        tiny_run(tmp_path / "run", **OPTIONS)
    again = tiny_run(tmp_path / "run", **OPTIONS)
    for name, value in blocks_of(whole).items():
        assert torch.equal(blocks_of(again)[name], value), name
    assert again.summary.validation == whole.summary.validation
