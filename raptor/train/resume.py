"""What a checkpoint holds of a surrogate and its optimizer, out and back in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from raptor.surrogate.surrogate import shared_blocks
from raptor.vit.view import ViT

Named = list[tuple[str, nn.Parameter]]


def checkpoint_tensors(student: ViT, named: Named, moments: Mapping[nn.Parameter, dict[str, Tensor]]) -> dict[str, Any]:
    """The surrogate's blocks, and the optimizer's state of each trained parameter, by name."""
    tensors = {f"block.{n}": p for n, p in shared_blocks(student).state_dict().items()}
    for n, p in named:
        tensors |= {f"optimizer.{key}.{n}": value for key, value in moments[p].items()}
    return tensors


def load_blocks(student: ViT, tensors: Mapping[str, Tensor]) -> None:
    """Put the blocks of a checkpoint into a surrogate."""
    state = {n.removeprefix("block."): v for n, v in tensors.items() if n.startswith("block.")}
    shared_blocks(student).load_state_dict(state)


def restore_optimizer(optimizer: Any, named: Named, tensors: Mapping[str, Tensor]) -> None:
    """Put the optimizer's state of a checkpoint back."""
    for n, p in named:
        for key in ("step", "exp_avg", "exp_avg_sq"):
            value = tensors[f"optimizer.{key}.{n}"]
            optimizer.state[p][key] = value if key == "step" and not optimizer.defaults["fused"] else value.to(p.device)
