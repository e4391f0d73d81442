"""Muon against torch's own, a singular value decomposition, and AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from raptor.train.optimizer import is_matrix, make_optimizer, moments_of, orthogonal


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (40, 48)])
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
    optimizer = make_optimizer(name, [{"params": parameters, "weight_decay": 0.1}], 0.01, (0.9, 0.999), fused=False)
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return parameters


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_matrices_move_as_with_torchs_muon() -> None:
    generator = torch.Generator().manual_seed(2)
    start = [torch.randn(shape, generator=generator) for shape in ((24, 64), (24, 64), (48, 16))]
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
    assert [is_matrix(value) for value in start] == [True, False, False, False]
    assert not torch.equal(muon[0], adamw[0])
    for a, b in zip(muon[1:], adamw[1:]):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert moments_of("muon", start[0]) == ("exp_avg",) and moments_of("muon", start[1]) == moments_of(
        "adamw", start[0]
    )
