"""The teacher as a training step runs it on a GPU: a bf16 copy whose blocks are folded. Nothing is measured with it."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raptor.surrogate.block import fast_is_on
from raptor.surrogate.fast import FastBlock, attend, view_of_copy
from raptor.surrogate.kernels.activations import ShortGELU, linear_gelu
from raptor.surrogate.surrogate import copied_block
from raptor.vit.view import ViT

_ALIGNED = 8  # bf16 matrix products are slow when the row length is not a multiple of this


def half_copy(vit: ViT) -> ViT:
    """A bf16 copy of the teacher, which needs half the memory traffic, with its blocks folded if they can be."""
    model = copy.deepcopy(vit.model).bfloat16()
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Conv2d:  # a subclass may do more than convolve
                plain = child.groups == 1 and child.padding in (0, (0, 0), "valid") and child.dilation == (1, 1)
                if plain and child.kernel_size == child.stride and child.kernel_size != (1, 1):
                    setattr(parent, name, PatchProduct(child))
            if type(child) is nn.GELU and child.approximate == "none":
                setattr(parent, name, ShortGELU())
    half = dataclasses.replace(vit, model=model).to(vit.device)
    for n, block in enumerate(frozen_blocks(vit)):
        half.blocks[n] = block
    return half


@torch.no_grad()
def frozen_blocks(teacher: ViT) -> list[FrozenBlock]:
    """All blocks of a teacher in fp32, folded; an empty list where one of them has no fast view."""
    frozen: list[FrozenBlock] = []
    if not fast_is_on():
        return frozen
    for layer in range(1, teacher.num_layers + 1):
        copied = copied_block(teacher, layer, modulated=False)
        view = view_of_copy(copied, teacher)
        if view is None or not view.stands_for(copied):
            return []
        frozen.append(FrozenBlock(view))
    return frozen


class FrozenBlock(nn.Module):
    """A block of the usual make with its norms' gains and LayerScale in its linear layers.

    `kernel_tokens` as in `FastBlock`.
    """

    kernel_tokens: tuple[int, ...] = ()

    def __init__(self, view: FastBlock):
        super().__init__()
        linears = []
        # Folded in fp32 and rounded once: rounding gains and matrices one by one would be further from the teacher.
        for weight, bias in view.fold().layers:
            # On meta no memory is taken for random weights, which are replaced at once.
            linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
            linear.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)
            linear.bias = nn.Parameter(bias.bfloat16(), requires_grad=False)
            linears.append(linear)
        self.qkv, self.proj, self.wi, self.wo = linears
        self.num_heads = view.num_heads
        self.eps1 = view.norm1.eps
        self.eps2 = view.norm2.eps

    def forward(self, x_btd: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        y_btd = self.qkv(_norm(x_btd, self.eps1))
        u_btd = x_btd + self.proj(attend(y_btd, self.num_heads, x_btd.shape[1] in self.kernel_tokens))
        return u_btd + self.wo(linear_gelu(_norm(u_btd, self.eps2), self.wi.weight, self.wi.bias))


def _norm(x_btd: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x_btd, x_btd.shape[-1:], eps=eps).to(x_btd.dtype)  # autocast would leave fp32


class PatchProduct(nn.Module):
    """A convolution whose windows do not overlap, as one matrix product.

    cuDNN is several times slower here: the product saves 2 ms of a step of 256 images of ViT-B on an H200.
    """

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.patch_size: tuple[int, int] = conv.kernel_size  # type: ignore[assignment]
        weight = conv.weight.detach().flatten(1)
        self.weight = nn.Parameter(F.pad(weight, (0, -weight.shape[1] % _ALIGNED)), requires_grad=False)
        self.bias = conv.bias

    def forward(self, images: Tensor) -> Tensor:
        p, q = self.patch_size
        height = images.shape[-2] // p * p
        width = images.shape[-1] // q * q
        cut = images[..., :height, :width].to(self.weight.dtype)
        patches = cut.unflatten(-1, (-1, q)).unflatten(-3, (-1, p)).permute(0, 2, 4, 1, 3, 5).flatten(3)  # (B, h, w, f)
        rows = F.pad(patches, (0, self.weight.shape[1] - patches.shape[-1]))
        return F.linear(rows, self.weight, self.bias).permute(0, 3, 1, 2)
