"""A stage: its length, its rates against the paper's, and its steps across a checkpoint and with a mean of weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raptor.devices import open_fabric
from raptor.train.optimizer import damaged_moment, parameter_groups
from raptor.train.stage import Budget, Stage, Training, learning_rate


class Drawn(Stage):
    """A stage whose gradients are drawn by the step's number."""

    name = "drawn"
    clip = 1e9
    lr = 0.01
    min_lr = 0.01
    warmup = 0.0

    def __init__(self, name: str, weights: list[Tensor], average_last: float = 0.0):
        self.module = nn.ParameterList(nn.Parameter(value.clone()) for value in weights)
        named = [(f"{n}.weight", parameter) for n, parameter in enumerate(self.module)]
        self.groups = parameter_groups(named, name, weight_decay=0.1)
        self.average_last = average_last

    def losses(self, wrapped: Any, step: int, num_steps: int, propagate: Callable[[Tensor], None]) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        loss = torch.zeros(())
        for weight in self.module:
            loss = loss + (weight * torch.randn(weight.shape, generator=generator)).sum()
        propagate(loss)
        return loss[None]

    def tensors(self) -> dict[str, Tensor]:
        return {f"block.{n}": weight.detach() for n, weight in enumerate(self.module)}


START = [torch.randn(shape, generator=torch.Generator().manual_seed(4)) for shape in ((24, 64), (64,), (40, 20))]


def training_of(stage: Stage, tensors: dict[str, Tensor] | None = None) -> Training:
    return Training(stage, open_fabric("cpu", "fp32"), tensors or {})


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("stop_after", [1, 3])  # before the mean of the last three steps began, and in it
def test_a_restored_training_goes_on_to_the_last_bit(name: str, stop_after: int) -> None:
    whole = training_of(Drawn(name, START, 0.6))
    for step in range(5):
        whole.step(step, 5)
    first = training_of(Drawn(name, START, 0.6))
    for step in range(stop_after + 1):
        first.step(step, 5)
    saved = {key: value.clone() for key, value in first.tensors().items()}
    assert any(key.startswith("average.") for key in saved) == (stop_after == 3)
    second = training_of(Drawn(name, [saved[f"block.{n}"] for n in range(3)], 0.6), saved)
    for step in range(stop_after + 1, 5):
        second.step(step, 5)
    assert all(torch.equal(one, other) for one, other in zip(whole.weights, second.weights))


def test_the_weights_end_as_the_mean_of_the_last_steps() -> None:
    plain = training_of(Drawn("adamw", START))
    averaged = training_of(Drawn("adamw", START, 0.6))
    seen = []
    for step in range(5):
        plain.step(step, 5)
        averaged.step(step, 5)
        seen.append([weight.detach().double().clone() for weight in plain.weights])
    for n, weight in enumerate(averaged.weights):
        mean = torch.stack([weights[n] for weights in seen[-3:]]).mean(0)
        torch.testing.assert_close(weight.double(), mean, rtol=1e-6, atol=1e-7)


def test_a_checkpoint_without_a_moment_or_with_a_damaged_one_is_named() -> None:
    stage = Drawn("muon", [torch.ones(24, 64), torch.ones(64)])
    saved = training_of(stage).tensors()
    assert sorted(saved) == [
        "block.0",
        "block.1",
        "optimizer.exp_avg.1.weight",
        "optimizer.exp_avg_sq.1.weight",
        "optimizer.momentum_buffer.0.weight",
        "optimizer.step.1.weight",
    ]
    assert damaged_moment(stage.groups, saved) is None
    assert damaged_moment(stage.groups, {}) == "no momentum_buffer of 0.weight"
    saved["optimizer.exp_avg_sq.1.weight"][3] = float("nan")
    assert damaged_moment(stage.groups, saved) == "a damaged exp_avg_sq of 1.weight"


def test_the_papers_learning_rate():
    """Warm-up over 10,000 of 312,500 steps to 1e-4, cosine to 1e-6."""
    num = 312_500
    peak = 1e-4
    low = 1e-6
    rates = [learning_rate(step, num, peak, low, 0.032) for step in (0, 4_999, 9_999, 161_249, 312_499)]
    assert rates[:3] == pytest.approx([1e-8, 5e-5, 1e-4], rel=1e-12)
    assert rates[3] == pytest.approx((peak + low) / 2, rel=1e-4)
    assert rates[4] == pytest.approx(low, rel=1e-12)
    quarter = learning_rate(10_000 + 302_500 // 4 - 1, num, peak, low, 0.032)
    assert quarter == pytest.approx(low + (peak - low) * (1 + math.cos(math.pi / 4)) / 2, rel=1e-9)


def test_the_rate_never_leaves_its_bounds_and_peaks_once():
    for num in (1, 2, 3, 7, 40, 1000):
        for warmup in (0.0, 0.032, 0.5, 1.0):
            rates = [learning_rate(step, num, 1.0, 0.1, warmup) for step in range(num)]
            assert max(rates) == 1.0
            assert min(rates) > 0
            top = rates.index(1.0)
            assert rates[:top] == sorted(rates[:top])
            assert rates[top:] == sorted(rates[top:], reverse=True)
            if top < num - 1:
                assert rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("120s", 120, "s"),
        ("5m", 300, "s"),
        ("1.5min", 90, "s"),
        ("2h", 7200, "s"),
        ("3000steps", 3000, "steps"),
        ("1step", 1, "steps"),
        ("20epochs", 20, "epochs"),
        (" 0.5 Epoch ", 0.5, "epochs"),
    ],
)
def test_budgets(text, amount, unit):
    assert Budget.parse(text) == Budget(amount, unit)


@pytest.mark.parametrize("text", ["", "s", "12", "1.2.3s", ".s", "0s", "-3s", "3 weeks", "nans", "infs", "1e3s"])
def test_what_is_no_budget_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match=r"^cannot read the budget .*: write 120s") as error:
        Budget.parse(text)
    assert "\n" not in str(error.value)


def test_a_budget_has_an_end():
    assert Budget.parse("10000000000s").amount == 1e10
    with pytest.raises(ValueError, match="cannot read the budget"):
        Budget.parse("10000000001s")


def test_seconds_become_steps_by_the_time_of_one():
    assert Budget.parse("30s").num_steps(7, 0.25, lambda: 0.5) == 15
    assert Budget.parse("1s").num_steps(7, 0.25, lambda: 0.5, before=0.5) == 1  # half a step
    assert Budget.parse("0.1s").num_steps(7, 1.0, lambda: 0.5) == 1


def test_epochs_become_steps_and_a_part_of_one_is_a_step():
    assert Budget.parse("3epochs").num_steps(7.5, 1.0, lambda: 1.0) == 22
    assert Budget.parse("0.01epochs").num_steps(7.5, 1.0, lambda: 1.0) == 1
    assert Budget.parse("0.01epochs").num_steps(7.5, 1.0, lambda: 1.0, before=0.0) == 1


@pytest.mark.parametrize("total", [2, 3, 5, 7, 101])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.9])
def test_the_stages_together_have_exactly_the_steps_asked_for(total, share):
    for text, per_epoch in ((f"{total}steps", 1), ("1epoch", total)):
        budget = Budget.parse(text)
        first = budget.num_steps(per_epoch, share, lambda: 1.0)
        second = budget.num_steps(per_epoch, 1 - share, lambda: 1.0, before=share)
        assert first >= 1 and second >= 1 and first + second == total
        assert abs(first - share * total) <= 1
