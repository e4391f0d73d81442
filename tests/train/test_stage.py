"""How long a stage is, and how its steps are timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raptor.devices import Ranks
from raptor.train import stage
from raptor.train.stage import Budget


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


def test_all_ranks_time_as_many_steps_as_the_first() -> None:
    class Second(Ranks):
        def first(self, function: Any) -> Any:
            function()
            return True  # rank 0 found its step slow

    done: list[int] = []
    timed = stage.time_steps(done.append, 1, 3, lambda: 0.1 * len(done), Second(1, 2))
    assert timed == (pytest.approx(0.1), 1) and done == [0, 1]


class Clock:
    """Steps that take the time they are said to, and ten seconds more where the loader has to start again."""

    def __init__(self) -> None:
        self.now = 0.0
        self.last = -1

    def step(self, i: int, num: int) -> None:
        self.now += (3.0 if i < num / 4 else 1.0) + (10.0 if i != self.last + 1 or i == 0 else 0.0)
        self.last = i


@pytest.mark.parametrize(("first_alone", "expected"), [(False, (16 * 3 + 48 * 1) / 64), (True, (15 * 3 + 48 * 1) / 63)])
def test_each_kind_of_step_has_its_share_and_no_start_is_timed(monkeypatch, first_alone, expected):
    clock = Clock()
    monkeypatch.setattr(stage, "_clock", lambda device: clock.now)

    def kind(i: int, num: int) -> object:
        return "first" if first_alone and i == 0 else i < num / 4

    for device in ("cpu", "cuda"):
        found, num_timed = stage.mean_seconds(clock.step, kind, torch.device(device))
        assert found == pytest.approx(expected) and num_timed == (1 + 2 if device == "cpu" else 1 + 16)
