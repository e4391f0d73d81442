"""The kernels of raptor.surrogate.kernels.activations_triton against autograd, interpreted by Triton."""

from __future__ import annotations

from interpreted import check_interpreted

GELU = """
import torch
import torch.nn.functional as F
from raptor.surrogate.kernels.activations import GELU

generator = torch.Generator().manual_seed(0)
for dtype, rtol in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
    for num_rows, num_columns in ((64, 512), (100, 600), (3, 40)):
        z, bias, grad = (torch.randn(*size, generator=generator) for size in ((num_rows, num_columns), (num_columns,), (num_rows, num_columns)))
        z, bias, grad = (2 * z).to(dtype).requires_grad_(), bias.requires_grad_(), grad.to(dtype)
        out = GELU.apply(z, bias)
        out.backward(grad)
        exact_z = z.detach().double().requires_grad_()
        exact = F.gelu(exact_z)
        exact.backward(grad.double())
        for ours, theirs in ((out, exact), (z.grad, exact_z.grad), (bias.grad, exact_z.grad.sum(0))):
            assert (ours.double() - theirs).norm() <= rtol * theirs.norm(), (dtype, num_rows, num_columns)
        assert out.dtype == z.grad.dtype == dtype and bias.grad.dtype == torch.float32
"""  # noqa: E501

SWIGLU = """
import torch
import torch.nn.functional as F
from raptor.surrogate.kernels.activations import SwiGLU

generator = torch.Generator().manual_seed(0)
for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
    for num_rows, num_columns in ((64, 256), (100, 300), (3, 40)):
        z, bias = torch.randn(num_rows, 2 * num_columns, generator=generator), torch.randn(2 * num_columns, generator=generator)
        grad = torch.randn(num_rows, num_columns, generator=generator)
        z, bias, grad = z.to(dtype).requires_grad_(), bias.requires_grad_(), grad.to(dtype)
        out = SwiGLU.apply(z, bias)
        out.backward(grad)
        exact_z, exact_bias = z.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
        p, q = (exact_z + exact_bias).chunk(2, dim=-1)
        exact = F.silu(p) * q
        exact.backward(grad.double())
        for ours, theirs in ((out, exact), (z.grad, exact_z.grad), (bias.grad, exact_bias.grad)):
            assert (ours.double() - theirs).norm() <= rtol * theirs.norm(), (dtype, num_rows, num_columns)
        assert out.dtype == z.grad.dtype == dtype and bias.grad.dtype == torch.float32
"""  # noqa: E501


def test_the_kernels_give_the_formulas_gradients() -> None:
    """Run by Triton's interpreter on the CPU, with rows and columns that fill its tiles and that do not."""
    check_interpreted(GELU, SWIGLU)
