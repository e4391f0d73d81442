"""Modules that stand in the place of blocks while `embed` or `finish` runs the model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from raptor.vit.calls import state_argument
from raptor.vit.origin import Arguments


class LastBlockReached(Exception):
    """Stops a forward pass once the last block's arguments are known."""


class StandIn(nn.Module):
    """A module in the place of a block. It has none of the attributes that a model may read of its blocks."""


class Recorder(StandIn):
    """Keeps the arguments of its call and passes the state on."""

    def __init__(self, returns_tuple: bool, last: bool = False):
        super().__init__()
        self.returns_tuple = returns_tuple
        self.last = last
        self.call: tuple[tuple[Any, ...], Arguments] = ((), {})
        self.state: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.state = state_argument(args, kwargs)
        self.call = (args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"})
        if self.last:
            # An exception is the only way out of a forward that belongs to the model.
            raise LastBlockReached
        return (self.state,) if self.returns_tuple else self.state


class Constant(StandIn):
    """Returns a given state."""

    def __init__(self, state: Tensor, returns_tuple: bool):
        super().__init__()
        self.output = (state,) if returns_tuple else state

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        return self.output
