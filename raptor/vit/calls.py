"""What is done with a model from outside: its calls, where the state stands in them, stand-ins for blocks, copies."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from raptor.vit.origin import Arguments


def state_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The state that a block was called with: its first argument, or transformers' name for it; None without either."""
    return args[0] if args else kwargs.get("hidden_states")


def per_batch(kwargs: Mapping[str, Any], images: Tensor) -> Arguments:
    """`kwargs` for a call with `images`: the single row of each tensor is repeated per image, on the images' device."""
    found = dict(kwargs)
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            # A view: a row for each image takes no memory.
            found[name] = value.to(images.device).expand(images.shape[0], *value.shape[1:])
    return found


def first_tensor(output: Any) -> Tensor:
    """The state in a block's output; transformers, among others, returns it as the first entry of a tuple."""
    if isinstance(output, tuple | list):
        return output[0]
    return output


def with_state(output: Any, state: Tensor) -> Any:
    """A block's output with `state` in the place of its own state; see `first_tensor`."""
    # Named tuples and other subclasses take their fields one by one; no block is known to return one.
    if type(output) in (tuple, list):
        return type(output)((state, *output[1:]))
    return state


def output_tensor(output: Any) -> Tensor:
    """A model's output as one tensor: its logits, pooled features or token states, the first that it has."""
    if isinstance(output, Tensor):
        return output
    # In the order of what is furthest along: scores before features before tokens.
    for key in ("logits", "pooler_output", "last_hidden_state"):
        value = getattr(output, key, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(output, Mapping):
        for key in ("x_norm_clstoken", "logits", "out", "pooler_output", "last_hidden_state"):
            if isinstance(output.get(key), Tensor):
                return output[key]
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    raise ValueError(
        f"cannot read a tensor out of the model's output of type {type(output).__name__}: return a tensor, or a dict "
        "with logits or last_hidden_state"
    )


class LastBlockReached(Exception):
    """Stops a forward pass once the last block's arguments are known."""


class StandIn(nn.Module):
    """A module in the place of a block, for one call. It has none of the attributes that a model may read of blocks.

    It keeps the arguments of its call and passes the state on, or returns the state `instead`. With `stops` it ends the
    forward pass.
    """

    def __init__(self, returns_tuple: bool, instead: Tensor | None = None, stops: bool = False):
        super().__init__()
        self.returns_tuple = returns_tuple
        self.instead = instead
        self.stops = stops
        self.call: tuple[tuple[Any, ...], Arguments] = ((), {})
        self.state: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.state = state_argument(args, kwargs)
        self.call = (args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"})
        if self.stops:
            # An exception is the only way out of a forward that belongs to the model.
            raise LastBlockReached
        state = self.state
        if self.instead is not None:
            state = self.instead
        return (state,) if self.returns_tuple else state


def copied(module: nn.Module, name: str, instead: Mapping[int, Any] | None = None) -> Any:
    """A copy of a module. `instead` holds, by their ids, what stands in the copy for parts that are not copied.

    A user's module may hold what Python cannot copy, such as an open file or a tensor with a gradient's history.
    """
    try:
        return copy.deepcopy(module, dict(instead or {}))
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"{name} cannot be copied ({reason_of(error)}): keep out of the module what copy.deepcopy refuses"
        ) from None


def reason_of(error: Exception) -> str:
    """The first line of an error's message, at most 200 characters, or else its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def same_arguments(call: Any, other: Any) -> bool:
    """Whether two calls have equal tensors, numbers and strings, and otherwise the same objects."""
    values, structure = tree_flatten(call)
    other_values, other_structure = tree_flatten(other)
    if structure != other_structure:
        return False
    for a, b in zip(values, other_values):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            is_same = a is b or (a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
        else:
            # `==` of other types may mean anything; of arrays it is not even a bool. And 1 == True.
            is_plain = type(a) is type(b) and isinstance(a, bool | int | float | complex | str)
            is_same = a is b or (is_plain and a == b)
        if not is_same:
            return False
    return True
