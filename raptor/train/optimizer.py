"""What changes the parameters after a backward pass: AdamW, or Muon for matrices and AdamW for the rest.

Muon keeps a running sum of a matrix's gradients and steps along the nearest matrix with orthogonal rows or columns, so
that every direction of the matrix moves by as much. Such a step is scaled to the size that one of AdamW has.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

RATES = {"adamw": 1.0, "muon": 2.0}  # good learning rates relative to AdamW's: docs/results/recipe.md
OPTIMIZERS = tuple(RATES)
_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the iteration's polynomial: singular values of 0 to 1 go near 1 fast
_NUM_ITERATIONS = 5
_ADAMW_SIZE = 0.2  # root mean square of an entry's step with AdamW, in units of the learning rate
_LEAST_SIDE = 16


def make_optimizer(
    groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], fused: bool
) -> torch.optim.AdamW:
    """The optimizer of a stage.

    Args:
        groups: as torch's optimizers take them, each with its `optimizer`, one of `OPTIMIZERS`.
        fused: AdamW as one kernel, for a GPU.
    """
    kind = Muon if any(group["optimizer"] == "muon" for group in groups) else torch.optim.AdamW
    return kind(groups, lr=lr, betas=betas, fused=fused)


def moments_of(name: str) -> tuple[str, ...]:
    """What an optimizer keeps of each parameter from step to step."""
    return ("exp_avg",) if name == "muon" else ("step", "exp_avg", "exp_avg_sq")


def num_moments(name: str) -> int:
    """How many of them are as large as the parameter."""
    return len(moments_of(name)) - ("step" in moments_of(name))


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon takes a parameter: the weight of a linear layer.

    A table and the factors of adapters are none: their rows are of different depths.
    """
    return name.endswith("weight") and parameter.ndim == 2 and min(parameter.shape) >= _LEAST_SIDE


class Muon(torch.optim.AdamW):
    """Muon for the groups whose `optimizer` it is, AdamW for the others; learning rates mean the same for both."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        for group in groups:
            if group["optimizer"] == "muon":
                self._turn(group, [p for p in group["params"] if p.grad is not None])
        self.param_groups = [group for group in groups if group["optimizer"] == "adamw"]
        super().step(closure)
        self.param_groups = groups

    def _turn(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """One step of matrices. Those with the same shorter side are made orthogonal together, in few kernels."""
        if not parameters:
            return
        by_side: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for parameter, ahead in zip(parameters, self._ahead(parameters)):
            by_side[min(parameter.shape)].append((parameter, ahead))
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        for alike in by_side.values():
            steps_nmd = orthogonal(_stacked([ahead for _, ahead in alike]))
            for (parameter, _), step_md in zip(alike, steps_nmd):
                longer = max(parameter.shape)
                size = group["lr"] * _ADAMW_SIZE * math.sqrt(longer)
                _wide(parameter).add_(step_md[:, :longer], alpha=-size)

    def _ahead(self, parameters: list[Tensor]) -> list[Tensor]:
        """The running sums of the parameters' gradients, as they will be if this step's gradients come again."""
        for parameter in parameters:
            if "exp_avg" not in self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
        sums = [self.state[p]["exp_avg"] for p in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_mul_(sums, _MOMENTUM)
        torch._foreach_add_(sums, gradients)
        ahead = torch._foreach_mul(sums, _MOMENTUM)
        torch._foreach_add_(ahead, gradients)
        return list(ahead)


def _wide(matrix: Tensor) -> Tensor:
    """A matrix with its shorter side first."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


def _stacked(matrices: list[Tensor]) -> Tensor:
    """Matrices with the same shorter side M as (N, M, D), filled up with zeros, which the iteration leaves as they are.

    For a small model one product of all of them takes hardly longer than one of two.
    """
    side, longest = min(matrices[0].shape), max(max(matrix.shape) for matrix in matrices)
    x_nmd = matrices[0].new_zeros(len(matrices), side, longest)
    for row_md, matrix in zip(x_nmd, matrices):
        row_md[:, : max(matrix.shape)].copy_(_wide(matrix))
    return x_nmd


def orthogonal(x_nmd: Tensor) -> Tensor:
    """The matrices (N, M, D), M <= D, with singular values near 1 instead of their own, by Newton-Schulz iteration."""
    x = x_nmd.bfloat16() if x_nmd.is_cuda else x_nmd
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b gram + c gram^2
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.to(x_nmd.dtype)
