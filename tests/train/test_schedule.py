"""Budgets and schedules against the numbers of the paper."""

from __future__ import annotations

import math

import pytest

from raptor.train.schedule import Budget, learning_rate, teacher_forcing


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


@pytest.mark.parametrize("total", [2, 3, 5, 7, 101])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.9])
def test_the_stages_together_have_exactly_the_steps_asked_for(total, share):
    for text, per_epoch in ((f"{total}steps", 1), ("1epoch", total)):
        budget = Budget.parse(text)
        first = budget.num_steps(per_epoch, share, lambda: 1.0)
        second = budget.num_steps(per_epoch, 1 - share, lambda: 1.0, before=share)
        assert first >= 1 and second >= 1 and first + second == total
        assert abs(first - share * total) <= 1
