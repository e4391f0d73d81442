"""The kernel of raptor.surrogate.gelu_kernel against autograd of the formula, in Triton's interpreter."""

from __future__ import annotations

from interpreted import check_interpreted

KERNEL = """
import torch
import torch.nn.functional as F
from raptor.surrogate import gelu

generator = torch.Generator().manual_seed(0)
for dtype, rtol in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
    for num_rows, num_columns in ((64, 512), (100, 600), (3, 40)):
        z, bias, grad = (torch.randn(*size, generator=generator) for size in ((num_rows, num_columns), (num_columns,), (num_rows, num_columns)))
        z, bias, grad = (2 * z).to(dtype).requires_grad_(), bias.requires_grad_(), grad.to(dtype)
        out = gelu.GELU.apply(z, bias)
        out.backward(grad)
        exact_z = z.detach().double().requires_grad_()
        exact = F.gelu(exact_z)
        exact.backward(grad.double())
        for ours, theirs in ((out, exact), (z.grad, exact_z.grad), (bias.grad, exact_z.grad.sum(0))):
            assert (ours.double() - theirs).norm() <= rtol * theirs.norm(), (dtype, num_rows, num_columns)
        assert out.dtype == z.grad.dtype == dtype and bias.grad.dtype == torch.float32
print("same")
"""  # noqa: E501


def test_the_kernel_gives_the_formulas_gradient() -> None:
    """Run by Triton's interpreter on the CPU, with rows and columns that fill its tiles and that do not."""
    check_interpreted(KERNEL)
