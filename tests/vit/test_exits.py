"""Rules for ending a phase, against angles, entropies and divergences that are known."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from raptor.vit.exits import Entropy, RandomSkip, ReadOutChange, SecondDifference, Turn, parse_rule, turn
from raptor.vit.groups import TokenGroups

GROUPS = TokenGroups(cls=1, registers=0, patches=2)


def _state(*vectors: tuple[float, float]) -> torch.Tensor:
    """States of which only cls matters."""
    x_btd = torch.zeros(len(vectors), 3, 2)
    x_btd[:, 0] = torch.tensor(vectors)
    return x_btd


def test_the_turn_is_the_angle_also_where_it_is_tiny() -> None:
    angles = torch.tensor([0.0, 1e-5, 0.3, math.pi / 2, 3.0], dtype=torch.float64)
    vectors = torch.stack([angles.cos(), angles.sin()], dim=-1).float()
    found = turn(torch.tensor([[2.0, 0.0]]).expand(5, 2), 3 * vectors)
    assert found.tolist() == pytest.approx(angles.tolist(), rel=1e-4, abs=1e-9)


def test_the_turn_rule_reads_cls() -> None:
    rule = Turn(GROUPS, threshold=0.1)
    before = _state((1, 0), (1, 0))
    after = _state((2, 0.02), (1, 1))
    assert rule.fires(before, after, 1).tolist() == [True, False]


def test_the_second_difference_has_to_be_small_twice_running() -> None:
    rule = SecondDifference(GROUPS, threshold=0.5)
    rule.begin(0)
    path = [_state((0, 0), (0, 0)), _state((1, 0), (1, 0)), _state((2, 0), (1, 1)), _state((3, 0), (1, 2))]
    fired = [rule.fires(a, b, i).tolist() for i, (a, b) in enumerate(pairwise(path), start=1)]
    # The first image repeats its update twice. The second one turned in between, so that it has one hit.
    assert fired == [[False, False], [False, False], [True, False]]
    rule.keep(torch.tensor([1]))
    assert rule.fires(path[3][1:], _state((1, 3)), 4).tolist() == [True]


def test_rules_that_read_classes() -> None:
    logits = {0.0: torch.tensor([0.0, 0.0]), 1.0: torch.tensor([5.0, 0.0])}

    def read(x_btd: torch.Tensor) -> torch.Tensor:
        return torch.stack([logits[float(v)] for v in x_btd[:, 0, 0]])

    def change(threshold: float) -> ReadOutChange:
        rule = ReadOutChange(read, threshold)
        rule.begin(0)
        return rule

    even, sure = _state((0, 0)), _state((1, 0))
    entropy = -sum(p * math.log(p) for p in torch.tensor([5.0, 0.0]).softmax(0).tolist())
    assert Entropy(read, entropy + 1e-4).fires(even, sure, 1).item()
    assert not Entropy(read, entropy - 1e-4).fires(even, sure, 1).item()
    assert not Entropy(read, math.log(2) - 1e-4).fires(sure, even, 1).item()
    p, q = [0.5, 0.5], torch.tensor([5.0, 0.0]).softmax(0).tolist()
    divergence = sum(a * math.log(a / b) for a, b in zip(p, q))
    assert change(divergence + 1e-4).fires(even, sure, 1).item()
    assert not change(divergence - 1e-4).fires(even, sure, 1).item()


def test_random_skipping_is_as_frequent_as_it_says_and_repeatable() -> None:
    x_btd = torch.zeros(20_000, 3, 2)
    share = RandomSkip(0.3, seed=1).fires(x_btd, x_btd, 1).float().mean()
    assert float(share) == pytest.approx(0.3, abs=4 * math.sqrt(0.3 * 0.7 / 20_000))
    first, again = (RandomSkip(0.3, seed=1).fires(x_btd, x_btd, 1) for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("turn", "cannot read the rule"),
        ("turn<no", "cannot read the rule"),
        ("turn<-1", "positive threshold"),
        ("entropy<.5", "has no head"),
        ("shake<.5", "unknown rule 'shake'"),
        ("random<1.5", "between 0 and 1"),
    ],
)
def test_rules_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rule(text, GROUPS)


def test_rules_by_name() -> None:
    found = parse_rule("turn < .02", GROUPS)
    assert isinstance(found, Turn) and found.threshold == 0.02
    assert isinstance(parse_rule("kl<.1", GROUPS, read_out=lambda x: x[:, 0]), ReadOutChange)
