"""Where the state stands in the arguments of a block, the tensor in an output, and what stands in for a block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raptor.vit.calls import (
    LastBlockReached,
    StandIn,
    first_tensor,
    output_tensor,
    per_batch,
    reason_of,
    state_argument,
    with_state,
)

X = torch.arange(3.0)
Y = torch.arange(4.0)


def test_the_state_of_a_call_and_of_an_output() -> None:
    assert state_argument((X, 1), {}) is X and state_argument((), {"hidden_states": X}) is X
    assert state_argument((), {"x": X}) is None
    assert first_tensor(X) is X and first_tensor((X, "attention")) is X
    assert with_state(X, Y) is Y and with_state((X, "attention"), Y) == (Y, "attention")


@pytest.mark.parametrize(
    "output",
    [
        X,
        (X, Y),
        {"logits": X, "other": Y},
        {"last_hidden_state": X},
        SimpleNamespace(logits=X, last_hidden_state=Y),
        SimpleNamespace(pooler_output=None, last_hidden_state=X),
    ],
)
def test_the_first_tensor_that_an_output_has(output: Any) -> None:
    assert output_tensor(output) is X


def test_the_row_of_a_tensor_is_repeated_per_image() -> None:
    found = per_batch({"noise": torch.ones(1, 4), "flag": True}, torch.zeros(5, 3, 8, 8))
    assert found["noise"].shape == (5, 4) and found["flag"] is True


def test_an_error_without_words_is_named_by_its_type() -> None:
    assert reason_of(ValueError("first\nsecond")) == "first" and reason_of(KeyError()) == "KeyError"


@pytest.mark.parametrize("returns_tuple", [False, True])
def test_a_recorder_passes_the_state_on_and_keeps_the_other_arguments(returns_tuple: bool) -> None:
    x = torch.randn(2, 5, 8)
    recorder = StandIn(returns_tuple)
    output = recorder(hidden_states=x, scale=2)
    assert (output[0] if returns_tuple else output) is x
    assert isinstance(output, tuple) == returns_tuple
    assert recorder.state is x and recorder.call == ((), {"scale": 2})
    recorder(x, 3, scale=2)
    assert recorder.call == ((3,), {"scale": 2})


def test_the_last_recorder_stops_the_model_once_its_arguments_are_known() -> None:
    recorder = StandIn(returns_tuple=False, stops=True)
    with pytest.raises(LastBlockReached):
        recorder(torch.zeros(1, 2, 3), "rope")
    assert recorder.call == (("rope",), {})


def test_a_constant_gives_its_state_whatever_it_is_given() -> None:
    state = torch.randn(2, 5, 8)
    assert StandIn(returns_tuple=False, instead=state)(torch.zeros(1)) is state
    assert StandIn(returns_tuple=True, instead=state)(torch.zeros(1))[0] is state
