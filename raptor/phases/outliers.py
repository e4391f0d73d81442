"""How much of the squared norm a few coordinates and a few tokens hold, layer by layer, streaming."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raptor.devices import Ranks
from raptor.streaming import Array, Record
from raptor.vit.trajectory import double, float_type


@dataclass(frozen=True)
class Outliers(Record):
    """Share of the squared norm, per layer, in the top 1 % of coordinates and of tokens (rounded up, at least one).

    Coordinates are ranked by their energy over all the data, tokens within each image. `even_*` is the share that
    the same number of coordinates or tokens would hold if all were alike.
    """

    coordinates: Array
    tokens: Array
    even_coordinates: float
    even_tokens: float


class OutlierShares:
    """Accumulates the energy of coordinates and tokens for `Outliers`."""

    def __init__(self) -> None:
        self._coordinate_ld = torch.zeros((), dtype=torch.float64)
        self._token_l = torch.zeros((), dtype=torch.float64)
        self._num_tokens = 0

    @torch.no_grad()
    def update(self, states: Sequence[Tensor], energy_btl: Tensor | None = None) -> None:
        """Add a batch; `energy_btl`, the tokens' squared norms (B, T, L), if known."""
        if energy_btl is None:
            norms = [torch.linalg.vector_norm(x, dim=2, dtype=float_type(x)) for x in states[1:]]
            energy_btl = torch.stack(norms, dim=2).square()
        self._num_tokens = energy_btl.shape[1]
        # Tokens are ranked within each image, because which ones are large differs from image to image.
        top_blt = energy_btl.transpose(1, 2).contiguous().topk(_one_percent(self._num_tokens), sorted=False).values
        self._token_l = self._token_l + double(top_blt.sum(2)).sum(0)
        # vector_norm squares and sums in one pass over memory; images are summed first because that axis is faster.
        norms_ltd = torch.stack([torch.linalg.vector_norm(x, dim=0, dtype=float_type(x)) for x in states[1:]])
        self._coordinate_ld = self._coordinate_ld + double(norms_ltd.square().sum(1))

    def reduce(self, ranks: Ranks) -> None:
        """Merge the sums of all ranks."""
        self._token_l = ranks.sum(self._token_l)
        self._coordinate_ld = ranks.sum(self._coordinate_ld)
        # A rank without images has counted none.
        self._num_tokens = max(ranks.gather(self._num_tokens))

    def result(self) -> Outliers:
        if self._num_tokens == 0:
            raise ValueError("no images were measured: the data is empty")
        dim = self._coordinate_ld.shape[1]
        total_l = self._coordinate_ld.sum(1)
        # Coordinates are ranked over all images: the huge ones of a model are the same everywhere.
        top_l = self._coordinate_ld.topk(_one_percent(dim)).values.sum(1)
        return Outliers(
            coordinates=(top_l / total_l).cpu().numpy(),
            tokens=(self._token_l / total_l).cpu().numpy(),
            even_coordinates=_one_percent(dim) / dim,
            even_tokens=_one_percent(self._num_tokens) / self._num_tokens,
        )


def _one_percent(count: int) -> int:
    return -(-count // 100)
