"""SwiGLU with its bias, and a backward pass that reads every activation once.

A compiler takes the gradient of the two halves as a concatenation: each output element evaluates both halves' formulas,
and the bias' gradient reads the result again. On a GPU one kernel does all of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS, COLUMNS, TOGETHER = 64, 256, 8  # of the activations: those a program sums over, side by side, and at once

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for the CPU alone, or for a Mac
    triton = None


def swiglu(x_btd: Tensor, weight_fd: Tensor, bias_f: Tensor) -> Tensor:
    """`SiLU(p) q` where `p` and `q` are the halves of the linear layer's output."""
    if torch.is_grad_enabled():
        return _SwiGLU.apply(F.linear(x_btd, weight_fd), bias_f)
    p, q = F.linear(x_btd, weight_fd, bias_f).chunk(2, dim=-1)
    return F.silu(p) * q


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z_btf: Tensor, bias_f: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(z_btf, bias_f)
        p, q = (_wide(z_btf) + bias_f).chunk(2, dim=-1)
        return (F.silu(p) * q).to(z_btf.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_btf: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        z_btf, bias_f = ctx.saved_tensors
        dz_btf, sums_nf = swiglu_backward(grad_btf.contiguous(), z_btf.contiguous(), bias_f)
        return dz_btf, sums_nf.sum(0).to(bias_f.dtype)


@torch.library.custom_op("raptor::swiglu_backward", mutates_args=())
def swiglu_backward(grad_btf: Tensor, z_btf: Tensor, bias_f: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of `z_btf`, and its sums over some rows each, (n, 2 F): together the bias' gradient."""
    if z_btf.is_cuda and triton is not None:
        return launch(grad_btf, z_btf, bias_f)
    p, q = (_wide(z_btf) + bias_f).chunk(2, dim=-1)
    gate, grad = torch.sigmoid(p), grad_btf.to(p.dtype)
    dz = torch.cat([grad * q * gate * (1 + p * (1 - gate)), grad * p * gate], dim=-1)
    return dz.to(z_btf.dtype), dz.flatten(0, -2).sum(0, keepdim=True)


@swiglu_backward.register_fake
def _(grad_btf: Tensor, z_btf: Tensor, bias_f: Tensor) -> tuple[Tensor, Tensor]:
    num_rows = z_btf.numel() // z_btf.shape[-1]
    num_sums = triton.cdiv(num_rows, ROWS) if z_btf.is_cuda and triton is not None else 1
    wide = torch.promote_types(z_btf.dtype, torch.float32)
    return torch.empty_like(z_btf), z_btf.new_empty(num_sums, z_btf.shape[-1], dtype=wide)


def launch(grad_btf: Tensor, z_btf: Tensor, bias_f: Tensor) -> tuple[Tensor, Tensor]:
    """`swiglu_backward` by the kernel below."""
    num_columns = grad_btf.shape[-1]
    num_rows = grad_btf.numel() // num_columns
    num_sums = triton.cdiv(num_rows, ROWS)
    grid = (triton.cdiv(num_columns, COLUMNS), num_sums)  # programs that run together share rows, as memory lies
    dz_btf = torch.empty_like(z_btf)
    sums_nf = torch.empty(num_sums, 2 * num_columns, dtype=torch.float32, device=z_btf.device)
    sizes = {"ROWS": ROWS, "COLUMNS": COLUMNS, "TOGETHER": TOGETHER}
    _kernel[grid](grad_btf, z_btf, bias_f, dz_btf, sums_nf, num_rows, num_columns, **sizes)
    return dz_btf, sums_nf


def _wide(z: Tensor) -> Tensor:
    return z.to(torch.promote_types(z.dtype, torch.float32))


if triton is not None:

    @triton.jit
    def _kernel(
        grad, z, bias, dz, sums, num_rows, num_columns,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr,
    ):  # fmt: skip
        first_row = tl.program_id(1) * ROWS
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < num_columns
        bias_p = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        bias_q = tl.load(bias + num_columns + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        sum_p = tl.zeros((TOGETHER, COLUMNS), tl.float32)
        sum_q = tl.zeros((TOGETHER, COLUMNS), tl.float32)
        for start in range(0, ROWS, TOGETHER):
            row = (first_row + start + tl.arange(0, TOGETHER)).to(tl.int64)[:, None]
            mask = (row < num_rows) & inside[None, :]
            at = row * (2 * num_columns) + column[None, :]
            g = tl.load(grad + row * num_columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
            p = tl.load(z + at, mask=mask, other=0.0).to(tl.float32) + bias_p
            q = tl.load(z + at + num_columns, mask=mask, other=0.0).to(tl.float32) + bias_q
            gate = tl.sigmoid(p)
            dp = g * q * gate * (1 + p * (1 - gate))
            dq = g * p * gate
            tl.store(dz + at, dp.to(dz.dtype.element_ty), mask=mask)
            tl.store(dz + at + num_columns, dq.to(dz.dtype.element_ty), mask=mask)
            sum_p += dp
            sum_q += dq
        to = sums + tl.program_id(1).to(tl.int64) * (2 * num_columns) + column
        tl.store(to, tl.sum(sum_p, axis=0), mask=inside)
        tl.store(to + num_columns, tl.sum(sum_q, axis=0), mask=inside)
