"""What changes the parameters after a backward pass: AdamW, or Muon for matrices and AdamW for the rest.

Muon is torch's. It keeps a running mean of a matrix's gradients and steps along the nearest matrix with orthogonal rows
or columns, so that every direction of the matrix moves by as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def num_moments(name: str) -> int:
    """How many of an optimizer's moments are as large as the parameter."""
    return len([moment for moment in MOMENTS[name] if moment != "step"])


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon takes a parameter: the weight of a linear layer, but not a table or the factors of adapters, whose
    rows belong to different depths.
    """
    return name.endswith("weight") and parameter.ndim == 2 and min(parameter.shape) >= _LEAST_SIDE


def moments_to_save(
    groups: Sequence[ParameterGroup], state: Mapping[nn.Parameter, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The optimizers' state by the names of the parameters."""
    saved = {}
    for group in groups:
        for name, parameter in group.named:
            for key in MOMENTS[group.optimizer]:
                # By name: torch's own state_dict numbers parameters, and another order of them would mix their moments.
                value = state.get(parameter, {}).get(key)
                if value is None:  # a parameter that never had a gradient, which is the same as zeros
                    value = torch.zeros(_shape(key, parameter), device=parameter.device)
                saved[f"optimizer.{key}.{name}"] = value
    return saved


def restore_moments(
    optimizers: Sequence[torch.optim.Optimizer], groups: Sequence[ParameterGroup], saved: Mapping[str, Tensor]
) -> None:
    """Put the state of a checkpoint back; `damaged_moment` has found nothing wrong with it."""
    where = {}
    for group in groups:
        for name, parameter in group.named:
            where[parameter] = (name, group.optimizer)
    for optimizer in optimizers:
        for parameters in optimizer.param_groups:
            for parameter in parameters["params"]:
                name, kind = where[parameter]
                for key in MOMENTS[kind]:
                    value = saved[f"optimizer.{key}.{name}"]
                    # AdamW counts steps on the host unless it is fused; a count on the GPU would be waited for.
                    if key != "step" or optimizer.defaults["fused"]:
                        value = value.to(parameter.device)
                    optimizer.state[parameter][key] = value


def damaged_moment(groups: Sequence[ParameterGroup], saved: Mapping[str, Tensor]) -> str | None:
    """What is wrong with the optimizers' state of a checkpoint; None if nothing is."""
    for group in groups:
        for name, parameter in group.named:
            for key in MOMENTS[group.optimizer]:
                value = saved.get(f"optimizer.{key}.{name}")
                if value is None:
                    return f"no {key} of {name}"
                if value.shape != _shape(key, parameter) or not value.isfinite().all():
                    return f"a damaged {key} of {name}"
    return None


def _shape(key: str, parameter: Tensor) -> torch.Size:
    """The shape of a moment: a count of steps is one number."""
    if key == "step":
        return torch.Size()
    return parameter.shape
