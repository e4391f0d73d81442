"""Maps whose derivatives are known: blocks that are matrices, and the dense Jacobian of a tiny model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raptor.data.stream import Batch
from raptor.vit.groups import TokenGroups
from raptor.vit.view import Context, ViT


class LinearViT:
    """Stands for a view. Its images are its first states, one patch each."""

    name = "linear"
    device = torch.device("cpu")
    dtype = torch.float64
    phases = None

    def __init__(self, matrices: Sequence[Tensor], num_patches: int = 1) -> None:
        self.matrices = matrices
        self.num_layers = len(matrices)
        self.groups = TokenGroups(cls=0, registers=0, patches=num_patches)

    def embed(self, images: Tensor) -> tuple[Tensor, Context]:
        return images, Context([])

    def unroll(self, x_btd: Tensor, _context: Context, start: int = 0, stop: int | None = None) -> list[Tensor]:
        states = [x_btd]
        for matrix in self.matrices[start : self.num_layers if stop is None else stop]:
            states.append(states[-1] @ matrix.mT)
        return states


def dense_jacobian(vit: ViT, image: Tensor, first: int, last: int, tokens: slice) -> Tensor:
    """The Jacobian between the tangent spaces of the spheres of `tokens`, from that of the plain blocks."""
    with torch.no_grad():
        a_0, context = vit.embed(image[None])
        states = vit.unroll(a_0, context)

    def blocks(x_td: Tensor) -> Tensor:
        return vit.unroll(x_td[None], context, first, last)[-1][0]

    plain = torch.autograd.functional.jacobian(blocks, states[first][0])  # (T, D, T, D)
    projections = []
    for layer in (first, last):
        unit = states[layer][0] / states[layer][0].norm(dim=-1, keepdim=True)
        projections.append(torch.eye(vit.dim, dtype=unit.dtype) - unit[:, :, None] * unit[:, None, :])
    norm_in, norm_out = (states[layer][0].norm(dim=-1) for layer in (first, last))
    scaled = plain * norm_in[None, None, :, None] / norm_out[:, None, None, None]
    tangent = torch.einsum("tde,tesf,sfg->tdsg", projections[1], scaled, projections[0])
    own = tangent[tokens][:, :, tokens]
    size = own.shape[0] * own.shape[1]
    return own.reshape(size, size)


def in_batches(images: Tensor, size: int = 2) -> list[Batch]:
    return [Batch(some, None, torch.arange(len(some))) for some in images.split(size)]
