"""GELU and SwiGLU behind a linear layer against their formulas, and the gradient's shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.func import hessian, jacrev

from raptor.surrogate.fast import fused_gelu, fused_swiglu
from raptor.surrogate.kernels.activations import ShortGELU, gelu_backward, short_gelu


def test_the_short_formula_is_off_by_less_than_bf16_rounds():
    z = torch.cat([torch.linspace(-30, 30, 20001), torch.tensor([-1e4, 1e4])]).bfloat16()
    exact, ours = F.gelu(z.double()), short_gelu(z)
    assert ours.dtype == torch.bfloat16
    rounding = 2.0**-8 * exact.abs()
    assert ((ours.double() - exact).abs() <= rounding + 2e-5).all()


def test_compiled_bf16_takes_the_short_formula_and_all_else_the_error_function():
    torch._dynamo.reset()
    module, z = ShortGELU(), torch.randn(1000, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(z.bfloat16()), short_gelu(z.bfloat16()))
    assert not torch.equal(short_gelu(z.bfloat16()), F.gelu(z.bfloat16()))
    assert torch.equal(compiled(z), F.gelu(z)) and torch.equal(module(z.bfloat16()), F.gelu(z.bfloat16()))


def test_without_a_gpu_it_is_torchs_own():
    x, weight, bias = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)
    assert torch.equal(fused_gelu(x, weight, bias), F.gelu(F.linear(x, weight, bias)))


def test_the_gradients_shapes_are_known_to_the_compiler():
    grad, z = (torch.empty(2, 70, 12, dtype=torch.bfloat16, device="meta") for _ in range(2))
    dz, sums = gelu_backward(grad, z)
    assert dz.shape == z.shape and dz.dtype == torch.bfloat16
    assert sums.shape == (5, 12) and sums.dtype == torch.float32


def test_off_a_gpu_swiglu_is_the_plain_formula_and_takes_any_derivative() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((2, 3), (8, 3), (8,)))
    z = x @ weight.T + bias
    expected = z[:, :4] / (1 + (-z[:, :4]).exp()) * z[:, 4:]
    torch.testing.assert_close(fused_swiglu(x, weight, bias), expected, rtol=1e-12, atol=1e-12)
    given = [v.requires_grad_() for v in (x, weight, bias)]
    assert torch.autograd.gradcheck(lambda *v: fused_swiglu(*v), given)
    assert torch.autograd.gradgradcheck(lambda *v: fused_swiglu(*v), given)
    assert jacrev(lambda v: fused_swiglu(v, weight, bias))(x).shape == (2, 4, 2, 3)
    assert hessian(lambda v: fused_swiglu(v, weight, bias).sum())(x).abs().sum() > 0
