"""What a config.json records of a model's origin."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from raptor.data.preprocess import Preprocess
from raptor.streaming import decode
from raptor.vit.origin import Base, Opened, Structure, SurrogateSpec


def test_parts_that_are_given_now_win() -> None:
    assert Structure(cls=0, norm="norm").given() == {"cls": 0, "norm": "norm"}


@pytest.mark.parametrize(
    "recorded",
    [
        Base(source="timm/x", kwargs={"depth": 4}, num_classes=0),
        Opened(model="timm/x", size=32, preprocess=Preprocess(size=32, resize=32), structure=Structure(cls=1)),
        SurrogateSpec((7, 5), block="paper", conditioning="mlp", adapters=3),
        SurrogateSpec((7, 5), copy=(2, 12)),
    ],
)
def test_what_is_recorded_comes_back(recorded: Base | Opened | SurrogateSpec) -> None:
    assert decode(type(recorded), asdict(recorded)) == recorded


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(block="mine"), "unknown block 'mine': choose from teacher, paper"),
        (dict(conditioning="film"), "unknown conditioning 'film'"),
        (dict(copy="best"), "unknown copy 'best'"),
        (dict(copy=(1,)), r"one block of each of the 2 phases, got \[1\]"),
        (dict(copy=(2, 2)), "a block of its phase, 3 to 4, got 2"),
        (dict(copy=(0, 3)), "a block of its phase, 1 to 2, got 0"),
        (dict(adapters=-1), "adapters must be a rank of 0 or more"),
        (dict(adapters=True), "adapters must be a rank of 0 or more"),
    ],
)
def test_specs_that_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SurrogateSpec((2, 2), **fields)
