"""What changes the parameters after a backward pass: AdamW, or Muon for matrices and AdamW for the rest.

Muon is torch's. It keeps a running mean of a matrix's gradients and steps along the nearest matrix with orthogonal rows
or columns, so that every direction of the matrix moves by as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raptor.train.stage import ParameterGroup

RATES = {"adamw": 1.0, "muon": 2.0}  # good learning rates relative to AdamW's: docs/results/recipe.md
OPTIMIZERS = tuple(RATES)
MOMENTS = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}
"""What each optimizer keeps of a parameter from step to step."""
_MOMENTUM = 0.95
_LEAST_SIDE = 16


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
        muon = torch.optim.Muon(by_kind["muon"], lr=lr, momentum=_MOMENTUM, adjust_lr_fn="match_rms_adamw")
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
                value = state.get(parameter, {}).get(key)
                if value is None:  # a parameter that never had a gradient, which is the same as zeros
                    value = torch.zeros(()) if key == "step" else torch.zeros_like(parameter)
                saved[f"optimizer.{key}.{name}"] = value
    return saved


def restore_moments(
    optimizers: Sequence[torch.optim.Optimizer], groups: Sequence[ParameterGroup], saved: Mapping[str, Tensor]
) -> None:
    """Put the state of a checkpoint back; `damaged_moment` has found nothing wrong with it."""
    named = {parameter: (name, group.optimizer) for group in groups for name, parameter in group.named}
    for optimizer in optimizers:
        for parameters in optimizer.param_groups:
            for parameter in parameters["params"]:
                name, kind = named[parameter]
                for key in MOMENTS[kind]:
                    value = saved[f"optimizer.{key}.{name}"]
                    # AdamW counts steps on the host unless it is fused.
                    stays = key == "step" and not optimizer.defaults["fused"]
                    optimizer.state[parameter][key] = value if stays else value.to(parameter.device)


def damaged_moment(groups: Sequence[ParameterGroup], saved: Mapping[str, Tensor]) -> str | None:
    """What is wrong with the optimizers' state of a checkpoint; None if nothing is."""
    for group in groups:
        for name, parameter in group.named:
            for key in MOMENTS[group.optimizer]:
                value = saved.get(f"optimizer.{key}.{name}")
                shape = torch.Size() if key == "step" else parameter.shape
                if value is None:
                    return f"no {key} of {name}"
                if value.shape != shape or not value.isfinite().all():
                    return f"a damaged {key} of {name}"
    return None
