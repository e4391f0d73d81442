"""A teacher's blocks for a step's targets: folded once and rounded to bf16."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raptor.surrogate import gelu
from raptor.surrogate.attention import attend
from raptor.surrogate.blocks import CopiedBlock, PlainBlock, plain_block
from raptor.vit.view import ViT

FREEZE = False  # not measured yet


class FrozenBlock(nn.Module):
    """A block of the usual make with its norms' gains and LayerScale in its linear layers."""

    def __init__(self, block: PlainBlock):
        super().__init__()
        self.qkv, self.proj, self.wi, self.wo = (_rounded(*layer) for layer in block.fold().layers)
        self.num_heads, self.eps1, self.eps2 = block.num_heads, block.norm1.eps, block.norm2.eps

    def forward(self, x_btd: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        y_btd = self.qkv(_norm(x_btd, self.eps1))
        u_btd = x_btd + self.proj(attend(y_btd, self.num_heads, fused=True))
        z_btd = _norm(u_btd, self.eps2)
        if gelu.EPILOGUE:
            h_btf = gelu.linear_gelu(z_btd, self.wi.weight, self.wi.bias)
        else:
            h_btf = gelu.activation(self.wi(z_btd))
        return u_btd + self.wo(h_btf)


def _rounded(weight: Tensor, bias: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    linear.weight, linear.bias = (nn.Parameter(part.bfloat16(), requires_grad=False) for part in (weight, bias))
    return linear


def _norm(x_btd: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x_btd, x_btd.shape[-1:], eps=eps).to(x_btd.dtype)  # autocast would leave fp32


@torch.no_grad()
def frozen_blocks(teacher: ViT) -> list[nn.Module] | None:
    """All blocks of a teacher that runs in fp32; None where one of them is of another make."""
    size, weight = teacher.preprocess.size, next(teacher.model.parameters())
    x_btd, context = teacher.embed(torch.linspace(-1, 1, 3 * size * size).view(1, 3, size, size).to(weight))
    frozen: list[nn.Module] = []
    for layer, call in enumerate(context.calls, start=1):
        block = plain_block(CopiedBlock(teacher, layer, modulated=False), x_btd, *call)
        if block is None:
            return None
        frozen.append(FrozenBlock(block))
    return frozen
