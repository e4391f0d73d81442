"""Softmax attention over queries, keys and values that come out of one linear layer.

torch's kernels fill whole tiles of tokens, and the gradients of the three are then packed by another pass over
memory. Ours take a smaller tile for the tokens that whole ones leave, and write the packed gradient. They are used only
where they were measured: in bf16, on an NVIDIA GPU of compute capability 9.0 (H100, H200), with heads of 32 or 64
coordinates and short sequences. They were run there on 261 tokens and 6 heads of 64; any other shape is compared with
torch's attention first (`kernel_is_right`).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raptor.devices import HAS_TRITON
from raptor.surrogate.block import attend

FORWARD = (64, 64, 4, 3)  # rows and columns of a tile, warps, stages of loading
BACKWARD = (64, 32, 4, 2)  # tokens of a program's tile, of the tiles it goes through, warps, stages of loading
_SMALLEST = 16  # tile of a matrix product
_CAPABILITY = (9, 0)
_HEAD_DIMS = (32, 64)
_MAX_TOKENS = 512  # of longer sequences whole tiles leave little
_TOLERANCE = 2e-2  # of the norm; rounding to bf16 is 3e-3


def takes_kernel(device: torch.device, num_tokens: int, num_heads: int, head_dim: int) -> bool:
    """Whether our kernels run here and are right. It runs them, so call it outside compiled and captured code."""
    if device.type != "cuda" or torch.version.cuda is None or not HAS_TRITON:  # ROCm calls its devices cuda too
        return False
    if torch.cuda.get_device_capability(device) != _CAPABILITY:
        return False
    measured = head_dim in _HEAD_DIMS and num_tokens <= _MAX_TOKENS
    return measured and kernel_is_right(device, num_tokens, num_heads, head_dim)


def choose_attention(blocks: Sequence[Any], token_counts: Sequence[int]) -> None:
    """Tell each block that can at which numbers of tokens it takes attention by our kernels.

    Known before anything is compiled or captured, because the kernels are checked by running them.
    """
    for block in blocks:
        if hasattr(block, "kernel_tokens"):
            head_dim = block.qkv.in_features // block.num_heads
            device = block.qkv.weight.device
            fits = [num for num in token_counts if takes_kernel(device, num, block.num_heads, head_dim)]
            block.kernel_tokens = tuple(fits)


@functools.cache
def kernel_is_right(device: torch.device, num_tokens: int, num_heads: int, head_dim: int) -> bool:
    """Whether output and gradient equal torch's attention in fp32 on two images of noise; says so if not."""
    generator = torch.Generator().manual_seed(0)
    dim = num_heads * head_dim
    qkv, grad = (torch.randn(2, num_tokens, f, generator=generator).to(device).bfloat16() for f in (3 * dim, dim))
    exact = _output_and_gradients(qkv.float(), grad.float(), num_heads, kernel=False)
    try:
        ours = _output_and_gradients(qkv, grad, num_heads, kernel=True)
        error = float(torch.stack([(a - b).norm() / b.norm() for a, b in zip(ours, exact)]).max())
        problem = None if error <= _TOLERANCE else f"it is off by {error:.2g}"
    except Exception as failure:  # whatever Triton or the driver raises
        problem = (str(failure).strip() or type(failure).__name__).splitlines()[0]
    if problem is not None:
        shape = f"{num_tokens} tokens and {num_heads} heads of {head_dim}"
        print(f"our attention kernel is not used for {shape}, torch's is: {problem}", file=sys.stderr, flush=True)
    return problem is None


@torch.enable_grad()
def _output_and_gradients(qkv_btf: Tensor, grad_btd: Tensor, num_heads: int, kernel: bool) -> list[Tensor]:
    """Output and the gradients of queries, keys and values, each (B, T, D) in fp32."""
    leaf_btf = qkv_btf.detach().requires_grad_()
    with torch.autocast(qkv_btf.device.type, enabled=False):
        out_btd = attention(leaf_btf, num_heads)[0] if kernel else attend(leaf_btf, num_heads)
        (dqkv_btf,) = torch.autograd.grad(out_btd, leaf_btf, grad_btd)
    return [part.float() for part in (out_btd.detach(), *dqkv_btf.chunk(3, dim=-1))]


@torch.library.custom_op("raptor::attention", mutates_args=())
def attention(qkv_btf: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Softmax attention over packed queries, keys and values, (B, T, 3 D), and the base-2 logarithm of each softmax's
    denominator, (B, H, T). Once differentiable.
    """
    from raptor.surrogate.kernels.attention_triton import forward

    qkv_btf = qkv_btf.contiguous()
    out_btd, lse_bht = _empty(qkv_btf, num_heads)
    b, h, t = lse_bht.shape
    dim = out_btd.shape[-1] // num_heads
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
    from raptor.surrogate.kernels.attention_triton import backward

    qkv_btf = qkv_btf.contiguous()
    grad_btd = grad_btd.contiguous()
    delta_bht = delta_bht.contiguous()
    b, h, t = lse_bht.shape
    dim = grad_btd.shape[-1] // lse_bht.shape[1]
    outer, inner, warps, stages = BACKWARD
    tails = {"OUTER_TAIL": _tail(t, outer), "INNER_TAIL": _tail(t, inner)}
    sizes = {"T": t, "H": h, "D": dim, "OUTER": outer, "INNER": inner, **tails}
    factor = 1 / math.sqrt(dim)
    dqkv_btf = torch.empty_like(qkv_btf)
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
    # In fp32, because it is subtracted from products that may be nearly as large.
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
