"""SwiGLU, for training with a gradient that reads every activation once.

A compiler takes the gradient of the two halves as a concatenation: each output element evaluates both halves' formulas,
and the bias' gradient reads the result again. Here one kernel does all of it, once differentiable.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from raptor.devices import HAS_TRITON

ROWS, COLUMNS = 64, 1024  # of the activations, that one program of the kernel goes through
STRIP = 1  # rows that it holds at once
WARPS = 4  # that share a program


def swiglu(x_btd: Tensor, weight_fd: Tensor, bias_f: Tensor, fused: bool = False) -> Tensor:
    """`SiLU(p) q` where `p` and `q` are the halves of the linear layer's output.

    fused: where a kernel can, take the gradient in one pass; the result is then once differentiable.
    """
    if fused and x_btd.is_cuda and HAS_TRITON and weight_fd.dtype != torch.float64:
        return SwiGLU.apply(F.linear(x_btd, weight_fd), bias_f)
    p, q = F.linear(x_btd, weight_fd, bias_f).chunk(2, dim=-1)
    return F.silu(p) * q


class SwiGLU(torch.autograd.Function):
    """Of a linear layer's output without its bias, and of that bias."""

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
    """Gradient of `z_btf`, and its sums over `ROWS` rows each, (n, 2 F): together the bias' gradient."""
    from raptor.surrogate.swiglu_kernel import kernel

    num_columns = grad_btf.shape[-1]
    num_rows = grad_btf.numel() // num_columns
    num_sums, num_across = -(-num_rows // ROWS), -(-num_columns // COLUMNS)
    dz_btf = torch.empty_like(z_btf)
    sums_nf = z_btf.new_empty(num_sums, 2 * num_columns, dtype=torch.float32)
    sizes = {"ROWS": ROWS, "COLUMNS": COLUMNS, "STRIP": STRIP, "num_warps": WARPS}
    arguments = (grad_btf, z_btf, bias_f, dz_btf, sums_nf, num_rows, num_columns, num_across)
    kernel[(num_sums * num_across,)](*arguments, **sizes)  # one axis: the others end at 65,535
    return dz_btf, sums_nf


@swiglu_backward.register_fake
def _(grad_btf: Tensor, z_btf: Tensor, bias_f: Tensor) -> tuple[Tensor, Tensor]:
    num_rows = z_btf.numel() // z_btf.shape[-1]
    sums_nf = z_btf.new_empty((num_rows + ROWS - 1) // ROWS, z_btf.shape[-1], dtype=torch.float32)
    return torch.empty_like(z_btf), sums_nf
