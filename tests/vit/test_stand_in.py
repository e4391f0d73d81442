"""Modules in the place of blocks give what a block gives."""

from __future__ import annotations

import pytest
import torch

from raptor.vit.stand_in import Constant, LastBlockReached, Recorder


@pytest.mark.parametrize("returns_tuple", [False, True])
def test_a_recorder_passes_the_state_on_and_keeps_the_other_arguments(returns_tuple: bool) -> None:
    x = torch.randn(2, 5, 8)
    recorder = Recorder(returns_tuple)
    output = recorder(hidden_states=x, scale=2)
    assert (output[0] if returns_tuple else output) is x
    assert isinstance(output, tuple) == returns_tuple
    assert recorder.state is x and recorder.call == ((), {"scale": 2})
    recorder(x, 3, scale=2)
    assert recorder.call == ((3,), {"scale": 2})


def test_the_last_recorder_stops_the_model_once_its_arguments_are_known() -> None:
    recorder = Recorder(returns_tuple=False, last=True)
    with pytest.raises(LastBlockReached):
        recorder(torch.zeros(1, 2, 3), "rope")
    assert recorder.call == (("rope",), {})


def test_a_constant_gives_its_state_whatever_it_is_given() -> None:
    state = torch.randn(2, 5, 8)
    assert Constant(state, returns_tuple=False)(torch.zeros(1)) is state
    assert Constant(state, returns_tuple=True)(torch.zeros(1))[0] is state
