"""A teacher's blocks for the targets of a training step: folded once, in bf16. Nothing is measured with them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raptor.surrogate.attention import attend
from raptor.surrogate.blocks import CopiedBlock, PlainBlock
from raptor.surrogate.gelu import linear_gelu
from raptor.vit.view import ViT


class FrozenBlock(nn.Module):
    """A block of the usual make with its norms' gains and LayerScale in its linear layers.

    `kernel_tokens` as in `PaperBlock`.
    """

    kernel_tokens: tuple[int, ...] = ()

    def __init__(self, block: PlainBlock):
        super().__init__()
        self.qkv, self.proj, self.wi, self.wo = (_rounded(*layer) for layer in block.fold().layers)
        self.num_heads, self.eps1, self.eps2 = block.num_heads, block.norm1.eps, block.norm2.eps

    def forward(self, x_btd: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        y_btd = self.qkv(_norm(x_btd, self.eps1))
        u_btd = x_btd + self.proj(attend(y_btd, self.num_heads, x_btd.shape[1] in self.kernel_tokens))
        return u_btd + self.wo(linear_gelu(_norm(u_btd, self.eps2), self.wi.weight, self.wi.bias))


def _rounded(weight: Tensor, bias: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    linear.weight, linear.bias = (nn.Parameter(part.bfloat16(), requires_grad=False) for part in (weight, bias))
    return linear


def _norm(x_btd: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x_btd, x_btd.shape[-1:], eps=eps).to(x_btd.dtype)  # autocast would leave fp32


@torch.no_grad()
def frozen_blocks(teacher: ViT) -> list[FrozenBlock]:
    """All blocks of a teacher that runs in fp32; none where one of them is of another make."""
    frozen: list[FrozenBlock] = []
    for layer in range(1, teacher.num_layers + 1):
        plain = CopiedBlock(teacher, layer, modulated=False).plain
        if plain is None:
            return []
        frozen.append(FrozenBlock(plain))
    return frozen
