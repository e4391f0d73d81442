"""Where the state stands in the arguments of a block, and the tensor in an output."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raptor.vit.calls import first_tensor, output_tensor, per_batch, reason_of, state_argument, with_state

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
