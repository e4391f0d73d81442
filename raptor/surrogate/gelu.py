"""GELU of bf16 numbers by a short formula, and behind a linear layer with a gradient that reads each activation once.

A compiler sums the gradient of the layer's bias in another pass over the activations; here one kernel does both. With
the error function that kernel gains nothing: the formula is what it waits for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from raptor.devices import HAS_TRITON

# The normal distribution function as sigmoid(x (c0 + c1 x^2 + c2 x^4 + c3 x^6)), with x^2 held at LAST: the GELU is off
# by 1.3e-5 at most, and bf16 rounds a value of .01 by 2e-5.
COEFFICIENTS = (1.59534958, 7.34984776e-02, -5.20865744e-04, -1.64242901e-05)
LAST = 36.0
ROWS, COLUMNS = 32, 512  # of the activations, that one program of the kernel goes through
WARPS = 2  # that share a program


def gelu(x_btd: Tensor, weight_fd: Tensor, bias_f: Tensor, fused: bool = False) -> Tensor:
    """`GELU(W x + b)`.

    fused: in bf16 where a kernel can, take the gradient in one pass; the result is then once differentiable.
    """
    if fused and x_btd.is_cuda and HAS_TRITON and weight_fd.dtype == torch.bfloat16:
        return GELU.apply(F.linear(x_btd, weight_fd, bias_f.detach()), bias_f)
    return F.gelu(F.linear(x_btd, weight_fd, bias_f))


def short_gelu(z: Tensor) -> Tensor:
    """GELU of bf16 numbers by the short formula, which differs by less than they are rounded."""
    x = z.float()
    c0, c1, c2, c3 = COEFFICIENTS
    t = (x * x).clamp(max=LAST)
    return (x * torch.sigmoid(x * (c0 + t * (c1 + t * (c2 + t * c3))))).to(z.dtype)


def activation(z: Tensor) -> Tensor:
    """GELU, by the short formula where it is compiled to one kernel."""
    return short_gelu(z) if z.dtype == torch.bfloat16 and torch.compiler.is_compiling() else F.gelu(z)


@torch.library.custom_op("raptor::linear_gelu", mutates_args=())
def linear_gelu(x_btd: Tensor, weight_fd: Tensor, bias_f: Tensor) -> Tensor:
    """`GELU(W x + b)` without a gradient. On a GPU by the tanh form, which cuBLAS takes while the product is stored."""
    rows = torch._addmm_activation(bias_f, x_btd.flatten(0, -2), weight_fd.t(), use_gelu=True)
    return rows.view(*x_btd.shape[:-1], -1)


@linear_gelu.register_fake
def _(x_btd: Tensor, weight_fd: Tensor, bias_f: Tensor) -> Tensor:
    return x_btd.new_empty(*x_btd.shape[:-1], len(weight_fd))


class ShortGELU(nn.Module):
    """Stands for `nn.GELU()` in a bf16 model."""

    def forward(self, z: Tensor) -> Tensor:
        return activation(z)


class GELU(torch.autograd.Function):
    """Of a linear layer's output; the layer's bias is given only to take its gradient."""

    @staticmethod
    def forward(ctx: Any, z_btf: Tensor, bias_f: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(z_btf, bias_f)
        return activation(z_btf)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_btf: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        z_btf, bias_f = ctx.saved_tensors
        dz_btf, sums_nf = gelu_backward(grad_btf.contiguous(), z_btf.contiguous())
        return dz_btf, sums_nf.sum(0).to(bias_f.dtype)


@torch.library.custom_op("raptor::gelu_backward", mutates_args=())
def gelu_backward(grad_btf: Tensor, z_btf: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of `z_btf`, and its sums over `ROWS` rows each, (n, F): together the bias' gradient."""
    from raptor.surrogate.gelu_kernel import kernel

    num_columns = z_btf.shape[-1]
    num_rows = z_btf.numel() // num_columns
    num_sums, num_across = -(-num_rows // ROWS), -(-num_columns // COLUMNS)
    dz_btf = torch.empty_like(z_btf)
    sums_nf = z_btf.new_empty(num_sums, num_columns, dtype=torch.float32)
    arguments = (grad_btf, z_btf, dz_btf, sums_nf, num_rows, num_columns, num_across)
    sizes = {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}
    formula = {f"C{n}": c for n, c in enumerate(COEFFICIENTS)} | {"LAST": LAST}
    kernel[(num_sums * num_across,)](*arguments, **sizes, **formula)
    return dz_btf, sums_nf


@gelu_backward.register_fake
def _(grad_btf: Tensor, z_btf: Tensor) -> tuple[Tensor, Tensor]:
    num_rows = z_btf.numel() // z_btf.shape[-1]
    sums_nf = z_btf.new_empty((num_rows + ROWS - 1) // ROWS, z_btf.shape[-1], dtype=torch.float32)
    return torch.empty_like(z_btf), sums_nf
