"""Muon against torch's own, a singular value decomposition, and AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from raptor.open import open_vit
from raptor.phases import Phases
from raptor.surrogate.surrogate import make_surrogate, shared_blocks
from raptor.train.optimizer import is_matrix, make_optimizer, orthogonal


@pytest.mark.parametrize("shape", [(24, 64), (40, 48), (8, 96)])
def test_orthogonal_keeps_the_singular_vectors_and_evens_the_values(shape: tuple[int, int]) -> None:
    x_nmd = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    for x, made in zip(x_nmd, orthogonal(x_nmd)):
        u, _, vh = torch.linalg.svd(x, full_matrices=False)
        values = u.T @ made @ vh.T
        diagonal = values.diagonal()
        assert (values - diagonal.diag()).abs().max() < 1e-4
        assert diagonal.min() > 0.5 and diagonal.max() < 1.5


def _trained(name: str, start: list[Tensor], num_steps: int = 4) -> list[nn.Parameter]:
    parameters = [nn.Parameter(value.clone()) for value in start]
    taken = [p for p in parameters if name == "muon" and is_matrix("weight", p)]
    others = [p for p in parameters if not any(p is one for one in taken)]
    groups: list[dict[str, Any]] = [
        {"params": taken, "weight_decay": 0.1, "optimizer": "muon"},
        {"params": others, "weight_decay": 0.1, "optimizer": "adamw"},
    ]
    optimizer = make_optimizer(groups if taken else groups[1:], 0.01, (0.9, 0.999), fused=False)
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return parameters


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_matrices_move_as_with_torchs_muon() -> None:
    generator = torch.Generator().manual_seed(2)
    start = [torch.randn(shape, generator=generator) for shape in ((24, 64), (24, 64), (48, 16), (96, 24))]
    ours = _trained("muon", start)
    theirs = [nn.Parameter(value.clone()) for value in start]
    optimizer = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for parameter in theirs:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    for a, b, begin in zip(ours, theirs, start):
        assert (a - b).norm() < 0.02 * (b - begin).norm()  # torch's iterates in bf16


def test_everything_else_moves_as_with_adamw() -> None:
    generator = torch.Generator().manual_seed(3)
    start = [torch.randn(shape, generator=generator) for shape in ((24, 64), (64,), (7, 64), (3, 16, 64))]
    muon, adamw = _trained("muon", start), _trained("adamw", start)
    assert [is_matrix("weight", value) for value in start] == [True, False, False, False]
    assert not torch.equal(muon[0], adamw[0])
    for a, b in zip(muon[1:], adamw[1:]):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_gradient_of_zeros_or_nan_does_not_pass_for_another() -> None:
    x_nmd = torch.stack([torch.zeros(24, 64), torch.full((24, 64), float("nan")), torch.eye(24, 64)])
    zeros, nan, eye = orthogonal(x_nmd)
    assert not zeros.any() and nan.isnan().all() and eye.isfinite().all()


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
