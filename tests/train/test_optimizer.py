"""Muon against a singular value decomposition, the rest against AdamW, rates of the paper, means, checkpoints."""

from __future__ import annotations

import math
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from raptor.phases.cut import Phases
from raptor.surrogate.surrogate import make_surrogate, shared_blocks
from raptor.train.optimizer import (
    ParameterGroup,
    is_matrix,
    make_optimizers,
    parameter_groups,
)
from raptor.vit.open import open_vit


def _made(name: str, start: list[Tensor]) -> tuple[list[ParameterGroup], list[torch.optim.Optimizer]]:
    named = [(f"{n}.weight", nn.Parameter(value.clone())) for n, value in enumerate(start)]
    taken = [(n, p) for n, p in named if name == "muon" and is_matrix(n, p)]
    others = [(n, p) for n, p in named if not any(p is one for _, one in taken)]
    groups = [ParameterGroup(taken, 0.1, "muon"), ParameterGroup(others, 0.1)]
    return groups, make_optimizers(groups, 0.01, (0.9, 0.999), fused=False)


def _step(groups: list[ParameterGroup], optimizers: list[torch.optim.Optimizer], generator: torch.Generator) -> None:
    for _, parameter in sorted((entry for group in groups for entry in group.named), key=lambda entry: entry[0]):
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for optimizer in optimizers:
        optimizer.step()


def _trained(name: str, start: list[Tensor], num_steps: int = 4) -> list[Tensor]:
    groups, optimizers = _made(name, start)
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        _step(groups, optimizers, generator)
    named = dict(entry for group in groups for entry in group.named)
    return [named[f"{n}.weight"].detach() for n in range(len(start))]


@pytest.mark.parametrize("shape", [(24, 64), (48, 40)])
def test_a_matrix_steps_along_its_gradients_singular_vectors(shape: tuple[int, int]) -> None:
    """By the first step, whose momentum is the gradient: `W - lr (wd W + .2 sqrt(max) U S V^T)`."""
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    (moved,) = _trained("muon", [start], num_steps=1)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, _, vh = torch.linalg.svd(gradient, full_matrices=False)
    turned = (start * (1 - 0.01 * 0.1) - moved) / (0.01 * 0.2 * math.sqrt(max(shape)))
    values = u.T @ turned @ vh.T
    assert (values - values.diagonal().diag()).abs().max() < 0.05  # torch iterates in bf16
    assert values.diagonal().min() > 0.6 and values.diagonal().max() < 1.3


@pytest.mark.parametrize(
    ("name", "shape", "taken"),
    [
        ("a.weight", (16, 16), True),
        ("a.weight", (15, 40), False),  # as the one column of the depth MLP's first layer
        ("a.weight", (16, 16, 16), False),
        ("a.weight", (64,), False),
        ("conditioning.rows", (16, 64), False),
        ("adapters.matrices.0.up", (32, 64), False),
    ],
)
def test_muon_takes_the_weights_of_linear_layers(name: str, shape: tuple[int, ...], taken: bool) -> None:
    assert is_matrix(name, torch.zeros(shape)) is taken


def test_a_second_step_along_the_same_gradient_has_its_direction_and_size() -> None:
    """The momentum of equal gradients is along them, and the steps of Muon have no length of a gradient's."""
    weight = nn.Parameter(torch.zeros(16, 16))
    (muon,) = make_optimizers([ParameterGroup([("a.weight", weight)], 0.0, "muon")], 1.0, (0.9, 0.999), fused=False)
    weight.grad = torch.eye(16)
    muon.step()
    momentum = muon.state[weight]["momentum_buffer"]
    torch.testing.assert_close(momentum, (1 - 0.95) * torch.eye(16))  # torch's: a running mean, not a sum
    muon.step()
    torch.testing.assert_close(momentum, (1 - 0.95**2) * torch.eye(16))
    assert muon.defaults["ns_steps"] == 5  # as docs/method.md states


def test_everything_else_moves_as_with_adamw() -> None:
    generator = torch.Generator().manual_seed(3)
    start = [torch.randn(shape, generator=generator) for shape in ((24, 64), (64,), (7, 64), (3, 16, 64))]
    muon = _trained("muon", start)
    adamw = _trained("adamw", start)
    assert [is_matrix("weight", value) for value in start] == [True, False, False, False]
    assert not torch.equal(muon[0], adamw[0])
    for a, b in zip(muon[1:], adamw[1:]):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def _taken(model: nn.Module, phases: list[int], **options: Any) -> dict[str, bool]:
    """Which parameters of the first tied block go to Muon."""
    teacher = open_vit(model, size=28)
    surrogate = make_surrogate(teacher, Phases.from_lengths(phases), **options)
    return {name: is_matrix(name, p) for name, p in shared_blocks(surrogate)[0].named_parameters()}


def test_of_a_surrogate_it_takes_the_weights_of_linear_layers() -> None:
    """Fused queries, keys and values (3D x D) and SwiGLU too; neither norms, biases and scales nor rows per depth."""
    swiglu = timm.create_model(
        "vit_giant_patch14_reg4_dinov2", img_size=28, embed_dim=32, depth=34, num_heads=2, mlp_ratio=4.0
    )
    taken = _taken(swiglu, [17, 17], adapters=2)  # 17 rows of a table and 34 of factors: matrices by their shape
    weights = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight")
    assert {name for name in taken if taken[name]} == {f"block.block.{name}" for name in weights}
    assert {"conditioning.rows", "adapters.matrices.0.down", "adapters.matrices.0.up"} <= set(taken)


def test_a_block_with_convolutions_leaves_them_to_adamw() -> None:
    weights = [(name, p.shape) for name, p in nn.Sequential(nn.Conv2d(32, 32, 3), nn.Linear(32, 96)).named_parameters()]
    assert [is_matrix(name, torch.zeros(shape)) for name, shape in weights] == [False, False, True, False]
    in_proj = dict(nn.MultiheadAttention(32, 2).named_parameters())["in_proj_weight"]
    assert is_matrix("attn.in_proj_weight", in_proj)
    assert not is_matrix("attn.relative_position_bias_table", torch.zeros(732, 16))


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    named = [("a.weight", nn.Parameter(torch.zeros(16, 32))), ("a.bias", nn.Parameter(torch.zeros(16)))]
    matrices, others = parameter_groups(named, "muon", 0.1)
    assert matrices == ParameterGroup(named[:1], 0.1, "muon") and others == ParameterGroup(named[1:], 0.1)
    assert parameter_groups(named, "adamw", 0.1) == [ParameterGroup(named, 0.1)]
