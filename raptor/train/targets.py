"""Where a step's targets come from: a bf16 copy of the teacher."""

from __future__ import annotations

import copy
import dataclasses

import torch.nn.functional as F
from torch import Tensor, nn

from raptor.vit.view import ViT

ALIGNED = 8  # a bf16 product of rows that are no multiple of this takes a slow kernel


def half_copy(vit: ViT) -> ViT:
    """A bf16 copy of a model that only gives targets."""
    model = copy.deepcopy(vit.model).bfloat16()
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Conv2d and _cuts_patches(child):  # a subclass may do more than convolve
                setattr(parent, name, PatchProduct(child))
    return dataclasses.replace(vit, model=model).to(vit.device)


def _cuts_patches(conv: nn.Conv2d) -> bool:
    plain = conv.groups == 1 and conv.padding in (0, (0, 0), "valid") and conv.dilation == (1, 1)
    return plain and conv.kernel_size == conv.stride and conv.kernel_size != (1, 1)


class PatchProduct(nn.Module):
    """A convolution whose windows do not overlap, as one matrix product: cuDNN's takes several times as long."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.patch_size: tuple[int, int] = conv.kernel_size  # type: ignore[assignment]
        weight = conv.weight.detach().flatten(1)
        self.weight = nn.Parameter(F.pad(weight, (0, -weight.shape[1] % ALIGNED)), requires_grad=False)
        self.bias = conv.bias

    def forward(self, images: Tensor) -> Tensor:
        p, q = self.patch_size
        height, width = images.shape[-2] // p * p, images.shape[-1] // q * q
        cut = images[..., :height, :width].to(self.weight.dtype)
        patches = cut.unflatten(-1, (-1, q)).unflatten(-3, (-1, p)).permute(0, 2, 4, 1, 3, 5).flatten(3)  # (B, h, w, f)
        rows = F.pad(patches, (0, self.weight.shape[1] - patches.shape[-1]))
        return F.linear(rows, self.weight, self.bias).permute(0, 3, 1, 2)
