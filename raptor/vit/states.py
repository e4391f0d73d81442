"""What every measure of a trajectory shares: checks, precision, and the vectors of an image.

`states` is a list of the L+1 tensors `a_0..a_L`, each (B, T, D) of any float type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from raptor.vit.view import TokenGroups

POOLED = ("cls", "patches")  # the vectors of an image: its cls token and its mean patch


def check_states(states: Sequence[Tensor], num_layers: int, num_tokens: int | None = None) -> None:
    """Refuse a list of states of another depth or token count, or of no images."""
    if len(states) != num_layers + 1:
        raise ValueError(f"expected the {num_layers + 1} states a_0..a_{num_layers}, got {len(states)}")
    if num_tokens is not None and states[0].shape[1] != num_tokens:
        raise ValueError(f"states have {states[0].shape[1]} tokens, but the token groups hold {num_tokens}")
    if len(states[0]) == 0:
        raise ValueError("a batch of states has no images")


@torch.no_grad()
def pool(states: Sequence[Tensor], groups: TokenGroups) -> dict[str, Tensor]:
    """The vectors of an image at layers 1..L: `cls` and `patches` (the mean patch), those present, each (B, L, D)."""
    return {
        name: torch.stack([x[:, where].mean(1, dtype=float_type(x)) for x in states[1:]], dim=1)
        for name, where in groups.present()
        if name in POOLED
    }


def float_type(x: Tensor) -> torch.dtype:
    """float32, or what `x` is where that is finer."""
    return torch.promote_types(x.dtype, torch.float32)


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in `float_type(x)`."""
    return x.to(float_type(x))


def double(x: Tensor) -> Tensor:
    """float64 on the same device; Apple's GPUs have none, so there on the CPU."""
    return (x.cpu() if x.device.type == "mps" else x).double()
