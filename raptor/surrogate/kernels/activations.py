"""SwiGLU and GELU behind a linear layer, with gradients that read every activation once.

A compiler takes the gradient of SwiGLU's two halves as a concatenation, where each output element evaluates the
formulas of both halves, and it sums the gradients of the layers' biases in another pass over the activations. Here one
kernel does all of it, once differentiable.

GELU of bf16 numbers has a short formula: with the error function its kernel gains nothing, because it waits for that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# The normal distribution function as sigmoid(x (c0 + c1 x^2 + c2 x^4 + c3 x^6)), with x^2 held at LAST: the GELU is off
# by 1.3e-5 at most, and bf16 rounds a value of .01 by 2e-5.
COEFFICIENTS = (1.59534958, 7.34984776e-02, -5.20865744e-04, -1.64242901e-05)
LAST = 36.0

# Rows and columns of the activations that one program of a kernel goes through, and the warps that share a program.
SWIGLU_ROWS = 64
SWIGLU_COLUMNS = 1024
SWIGLU_WARPS = 4
SWIGLU_STRIP = 1  # rows that it holds at once
GELU_ROWS = 32
GELU_COLUMNS = 512
GELU_WARPS = 2


class SwiGLU(torch.autograd.Function):
    """SwiGLU of a linear layer's output without its bias, and that bias."""

    @staticmethod
    def forward(ctx: Any, z_btf: Tensor, bias_f: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(z_btf, bias_f)
        p, q = (z_btf.float() + bias_f).chunk(2, dim=-1)
        return (F.silu(p) * q).to(z_btf.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_btf: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        z_btf, bias_f = ctx.saved_tensors
        dz_btf, sums_nf = swiglu_backward(grad_btf.contiguous(), z_btf.contiguous(), bias_f)
        return dz_btf, sums_nf.sum(0).to(bias_f.dtype)


@torch.library.custom_op("raptor::swiglu_backward", mutates_args=())
def swiglu_backward(grad_btf: Tensor, z_btf: Tensor, bias_f: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of `z_btf`, and its sums over `SWIGLU_ROWS` rows each, (n, 2 F): together the bias' gradient."""
    from raptor.surrogate.kernels.activations_triton import swiglu_kernel

    num_columns = grad_btf.shape[-1]
    num_rows = grad_btf.numel() // num_columns
    num_sums = -(-num_rows // SWIGLU_ROWS)
    num_across = -(-num_columns // SWIGLU_COLUMNS)
    dz_btf = torch.empty_like(z_btf)
    sums_nf = z_btf.new_empty(num_sums, 2 * num_columns, dtype=torch.float32)
    sizes = {"ROWS": SWIGLU_ROWS, "COLUMNS": SWIGLU_COLUMNS, "STRIP": SWIGLU_STRIP, "num_warps": SWIGLU_WARPS}
    arguments = (grad_btf, z_btf, bias_f, dz_btf, sums_nf, num_rows, num_columns, num_across)
    swiglu_kernel[(num_sums * num_across,)](*arguments, **sizes)  # one axis: the others end at 65,535
    return dz_btf, sums_nf


@swiglu_backward.register_fake
def _(grad_btf: Tensor, z_btf: Tensor, bias_f: Tensor) -> tuple[Tensor, Tensor]:
    num_rows = z_btf.numel() // z_btf.shape[-1]
    sums_nf = z_btf.new_empty((num_rows + SWIGLU_ROWS - 1) // SWIGLU_ROWS, z_btf.shape[-1], dtype=torch.float32)
    return torch.empty_like(z_btf), sums_nf


def short_gelu(z: Tensor) -> Tensor:
    """GELU of bf16 numbers by the short formula, which differs by less than they are rounded."""
    x = z.float()
    c0, c1, c2, c3 = COEFFICIENTS
    t = (x * x).clamp(max=LAST)
    return (x * torch.sigmoid(x * (c0 + t * (c1 + t * (c2 + t * c3))))).to(z.dtype)


def activation(z: Tensor) -> Tensor:
    """GELU, by the short formula where it is compiled to one kernel."""
    return short_gelu(z) if z.dtype == torch.bfloat16 and torch.compiler.is_compiling() else F.gelu(z)


class ShortGELU(nn.Module):
    """Stands for `nn.GELU()` in a bf16 model."""

    def forward(self, z: Tensor) -> Tensor:
        return activation(z)


class GELU(torch.autograd.Function):
    """GELU of a linear layer's output. The layer's bias is in it already, and is given only to take its gradient."""

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
    """Gradient of `z_btf`, and its sums over `GELU_ROWS` rows each, (n, F): together the bias' gradient."""
    from raptor.surrogate.kernels.activations_triton import gelu_kernel

    num_columns = z_btf.shape[-1]
    num_rows = z_btf.numel() // num_columns
    num_sums = -(-num_rows // GELU_ROWS)
    num_across = -(-num_columns // GELU_COLUMNS)
    dz_btf = torch.empty_like(z_btf)
    sums_nf = z_btf.new_empty(num_sums, num_columns, dtype=torch.float32)
    arguments = (grad_btf, z_btf, dz_btf, sums_nf, num_rows, num_columns, num_across)
    sizes = {"ROWS": GELU_ROWS, "COLUMNS": GELU_COLUMNS, "num_warps": GELU_WARPS}
    formula = {f"C{n}": c for n, c in enumerate(COEFFICIENTS)} | {"LAST": LAST}
    gelu_kernel[(num_sums * num_across,)](*arguments, **sizes, **formula)
    return dz_btf, sums_nf


@gelu_backward.register_fake
def _(grad_btf: Tensor, z_btf: Tensor) -> tuple[Tensor, Tensor]:
    num_rows = z_btf.numel() // z_btf.shape[-1]
    sums_nf = z_btf.new_empty((num_rows + GELU_ROWS - 1) // GELU_ROWS, z_btf.shape[-1], dtype=torch.float32)
    return torch.empty_like(z_btf), sums_nf


@torch.library.custom_op("raptor::linear_gelu", mutates_args=())
def linear_gelu(x_btd: Tensor, weight_fd: Tensor, bias_f: Tensor) -> Tensor:
    """`GELU(W x + b)` without a gradient. On a GPU by the tanh form, which cuBLAS takes while the product is stored."""
    rows = torch._addmm_activation(bias_f, x_btd.flatten(0, -2), weight_fd.t(), use_gelu=True)
    return rows.view(*x_btd.shape[:-1], -1)


@linear_gelu.register_fake
def _(x_btd: Tensor, weight_fd: Tensor, bias_f: Tensor) -> Tensor:
    return x_btd.new_empty(*x_btd.shape[:-1], len(weight_fd))
