"""What changes the weights after a backward pass: AdamW, or Muon for matrices and AdamW for the rest.

Muon is torch's. It keeps a running mean of a matrix's gradients and steps along the nearest matrix with orthogonal rows
or columns, so that every direction of the matrix moves by as much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

OPTIMIZERS = ("adamw", "muon")
MOMENTS = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}
"""What each optimizer keeps of a parameter from step to step."""
_MOMENTUM = 0.95
_LEAST_SIDE = 16  # a single column, as in the depth MLP's first layer, would lose its length: AdamW takes it


class ParameterGroup(NamedTuple):
    """Parameters by name, their weight decay, and the name of their optimizer, one of `OPTIMIZERS`."""

    named: list[tuple[str, nn.Parameter]]
    weight_decay: float
    optimizer: str = "adamw"


def parameter_groups(
    named: list[tuple[str, nn.Parameter]], optimizer: str, weight_decay: float
) -> list[ParameterGroup]:
    """All parameters in one group; with `muon` those that it takes are a group of their own."""
    if optimizer == "adamw":
        return [ParameterGroup(named, weight_decay)]
    matrices = []
    others = []
    for name, parameter in named:
        if is_matrix(name, parameter):
            matrices.append((name, parameter))
        else:
            others.append((name, parameter))
    return [ParameterGroup(matrices, weight_decay, "muon"), ParameterGroup(others, weight_decay)]


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon takes a parameter: the weight of a linear layer, but not a table or the factors of adapters, whose
    rows belong to different depths.
    """
    return name.endswith("weight") and parameter.ndim == 2 and min(parameter.shape) >= _LEAST_SIDE


def make_optimizers(
    groups: Sequence[ParameterGroup], lr: float, betas: tuple[float, float], fused: bool
) -> list[torch.optim.Optimizer]:
    """One optimizer for each kind that the groups name.

    Args:
        lr: learning rate. It means the same for both, because Muon's steps are scaled to the size of AdamW's.
        betas: decay rates of AdamW's moments.
        fused: AdamW as one kernel, for a GPU.
    """
    by_kind: dict[str, list[dict[str, Any]]] = {kind: [] for kind in OPTIMIZERS}
    for group in groups:
        if group.named:
            parameters = [parameter for _, parameter in group.named]
            by_kind[group.optimizer].append({"params": parameters, "weight_decay": group.weight_decay})
    made: list[torch.optim.Optimizer] = []
    if by_kind["muon"]:
        # torch's default scales steps to Muon's own rates; this one gives them the size of AdamW's, .2 lr per entry.
        muon = torch.optim.Muon(
            by_kind["muon"], lr=lr, momentum=_MOMENTUM, nesterov=True, ns_steps=5, adjust_lr_fn="match_rms_adamw"
        )
        made.append(muon)
    if by_kind["adamw"]:
        made.append(torch.optim.AdamW(by_kind["adamw"], lr=lr, betas=betas, fused=fused))
    return made


def named_parameters(groups: Sequence[ParameterGroup]) -> list[tuple[str, nn.Parameter]]:
    """Name and parameter of all that is trained."""
    return [pair for group in groups for pair in group.named]


def moments(groups: Sequence[ParameterGroup]) -> Iterator[tuple[str, nn.Parameter, str, torch.Size]]:
    """Each entry of the optimizers' state: its name in a checkpoint, the parameter, the moment and its shape."""
    for group in groups:
        for name, parameter in group.named:
            for key in MOMENTS[group.optimizer]:
                shape = parameter.shape
                if key == "step":  # a count is one number
                    shape = torch.Size()
                yield f"optimizer.{key}.{name}", parameter, key, shape


def damaged_moment(groups: Sequence[ParameterGroup], saved: Mapping[str, Tensor]) -> str | None:
    """What is wrong with the optimizers' state of a checkpoint; None if nothing is."""
    for entry, _, key, shape in moments(groups):
        value = saved.get(entry)
        name = entry.removeprefix(f"optimizer.{key}.")
        if value is None:
            return f"no {key} of {name}"
        if value.shape != shape or not value.isfinite().all():
            return f"a damaged {key} of {name}"
    return None
