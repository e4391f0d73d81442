"""SwiGLU against its formula."""

from __future__ import annotations

import pytest
import torch
from torch.func import hessian, jacrev

from raptor.surrogate.swiglu import swiglu


@pytest.mark.parametrize("fused", [False, True])
def test_off_a_gpu_it_is_the_plain_formula_and_takes_any_derivative(fused: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((2, 3), (8, 3), (8,)))
    z = x @ weight.T + bias
    expected = z[:, :4] / (1 + (-z[:, :4]).exp()) * z[:, 4:]
    torch.testing.assert_close(swiglu(x, weight, bias, fused=fused), expected, rtol=1e-12, atol=1e-12)
    given = [v.requires_grad_() for v in (x, weight, bias)]
    assert torch.autograd.gradcheck(lambda *v: swiglu(*v, fused=fused), given)
    assert torch.autograd.gradgradcheck(lambda *v: swiglu(*v, fused=fused), given)
    assert jacrev(lambda v: swiglu(v, weight, bias, fused=fused))(x).shape == (2, 4, 2, 3)
    assert hessian(lambda v: swiglu(v, weight, bias, fused=fused).sum())(x).abs().sum() > 0
