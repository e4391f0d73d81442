"""Softmax attention over queries, keys and values that come out of one linear layer.

torch's attention fills whole tiles of 128 tokens, and the gradients of the three are then packed by another pass over
memory. `FUSED` takes kernels of our own, which are not measured yet.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raptor.devices import HAS_TRITON

FUSED = False
FORWARD = (128, 64, 4, 3)  # rows and columns of a tile, warps, stages of loading
BACKWARD = (128, 64, 8, 2)  # tokens of a program's tile, of the tiles it goes through, warps, stages of loading
_SMALLEST = 16  # tile of a matrix product
_HEAD_DIMS = (16, 32, 64, 128)


def attend(qkv_btf: Tensor, num_heads: int, fused: bool = False) -> Tensor:
    """Attention over queries, keys and values stacked along the last axis, `(B, T, 3 D)`.

    fused: in bf16 take our kernels; the result is then once differentiable.
    """
    b, t, f = qkv_btf.shape
    dim = f // 3 // num_heads
    fused = FUSED and fused and qkv_btf.is_cuda and HAS_TRITON and dim in _HEAD_DIMS
    if fused and qkv_btf.dtype == torch.bfloat16:
        return attention(qkv_btf, num_heads)[0]
    q, k, v = qkv_btf.view(b, t, 3, num_heads, dim).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, f // 3)


@torch.library.custom_op("raptor::attention", mutates_args=())
def attention(qkv_btf: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """The same by our kernel, and the base-2 logarithm of each softmax's denominator, (B, H, T)."""
    from raptor.surrogate.attention_kernel import forward

    qkv_btf = qkv_btf.contiguous()
    out_btd, lse_bht = _empty(qkv_btf, num_heads)
    (b, h, t), dim = lse_bht.shape, out_btd.shape[-1] // num_heads
    rows, columns, warps, stages = FORWARD
    tails = {"ROW_TAIL": _tail(t, rows), "COLUMN_TAIL": _tail(t, columns)}
    sizes = {"T": t, "H": h, "D": dim, "ROWS": rows, "COLUMNS": columns, **tails}
    grid = (b * h * -(-t // rows),)
    scale = math.log2(math.e) / math.sqrt(dim)
    forward[grid](qkv_btf, out_btd, lse_bht, scale, **sizes, num_warps=warps, num_stages=stages)
    return out_btd, lse_bht


@attention.register_fake
def _(qkv_btf: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    return _empty(qkv_btf, num_heads)


@torch.library.custom_op("raptor::attention_backward", mutates_args=())
def attention_backward(qkv_btf: Tensor, grad_btd: Tensor, lse_bht: Tensor, delta_bht: Tensor) -> Tensor:
    """Gradient of `qkv_btf`; `delta_bht` are the products of output and gradient."""
    from raptor.surrogate.attention_kernel import backward

    qkv_btf, grad_btd, delta_bht = qkv_btf.contiguous(), grad_btd.contiguous(), delta_bht.contiguous()
    (b, h, t), dim = lse_bht.shape, grad_btd.shape[-1] // lse_bht.shape[1]
    outer, inner, warps, stages = BACKWARD
    tails = {"OUTER_TAIL": _tail(t, outer), "INNER_TAIL": _tail(t, inner)}
    sizes = {"T": t, "H": h, "D": dim, "OUTER": outer, "INNER": inner, **tails}
    factor, dqkv_btf = 1 / math.sqrt(dim), torch.empty_like(qkv_btf)
    tensors = (qkv_btf, grad_btd, lse_bht, delta_bht, dqkv_btf)
    grid = (b * h * -(-t // outer),)
    backward[grid](*tensors, math.log2(math.e) * factor, factor, **sizes, num_warps=warps, num_stages=stages)
    return dqkv_btf


@attention_backward.register_fake
def _(qkv_btf: Tensor, grad_btd: Tensor, lse_bht: Tensor, delta_bht: Tensor) -> Tensor:
    return torch.empty_like(qkv_btf, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], *output)


def _gradient(ctx: Any, grad_btd: Tensor, _lse: Tensor | None) -> tuple[Tensor, None]:
    qkv_btf, out_btd, lse_bht = ctx.saved_tensors
    delta_bth = (grad_btd.float() * out_btd.float()).unflatten(-1, (lse_bht.shape[1], -1)).sum(dim=-1)
    return attention_backward(qkv_btf, grad_btd, lse_bht, delta_bth.transpose(1, 2)), None


attention.register_autograd(_gradient, setup_context=_save)


def _empty(qkv_btf: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    b, t, f = qkv_btf.shape
    return qkv_btf.new_empty(b, t, f // 3), qkv_btf.new_empty(b, num_heads, t, dtype=torch.float32)


def _tail(num_tokens: int, tile: int) -> int:
    """The size of the tile that holds what whole tiles leave: a power of two; 0 if they leave nothing."""
    left = num_tokens % tile
    return max(_SMALLEST, 1 << (left - 1).bit_length()) if left else 0
