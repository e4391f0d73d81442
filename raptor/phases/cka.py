"""Linear CKA between layers, streaming."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raptor.devices import Ranks
from raptor.vit.groups import POOLED, TokenGroups
from raptor.vit.trajectory import double


class LinearCKA:
    """Minibatch linear CKA with the unbiased HSIC estimator (Nguyen et al. 2021). Samples are the images of a batch.

    `features`: `cls`, `patches` (the mean patch) or `both` (concatenated; whichever the model has). HSIC is averaged
    over batches, weighted by their number of images, and the ratio is taken at the end. Each batch's HSIC is unbiased
    and its variance falls as one over its number of images, so these weights give the least variance: a short last
    batch gets less weight. The estimator needs 4 images: a smaller batch is skipped. All this assumes batches drawn at
    random (`iterate(..., shuffle=True)`): with one class per batch it would be CKA within classes. The value depends a
    little on the batch size, so state it.
    """

    def __init__(self, groups: TokenGroups, features: str = "both") -> None:
        if features not in (*POOLED, "both"):
            raise ValueError(f"unknown CKA features {features!r}: choose from cls, patches, both")
        self.names = [name for name, _ in groups.present() if name in POOLED and features in (name, "both")]
        if not self.names:
            raise ValueError(f"this model has no tokens for CKA features {features!r}: choose another group")
        self.num_images = 0
        self._hsic_ll = torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def update(self, pooled: dict[str, Tensor]) -> None:
        """Add a batch of `pool_layers(states, groups)`."""
        # Side by side, so that cls and mean patch count by their own variance.
        features_bld = torch.cat([pooled[name] for name in self.names], dim=2)
        num = len(features_bld)
        # The unbiased estimator divides by n - 3.
        if num >= 4:
            self._hsic_ll = self._hsic_ll + num * _unbiased_hsic(double(features_bld).transpose(0, 1))
            self.num_images += num

    def reduce(self, ranks: Ranks) -> None:
        """Merge the batches of all ranks."""
        self._hsic_ll = ranks.sum(self._hsic_ll)
        self.num_images = sum(ranks.gather(self.num_images))

    def result(self) -> NDArray[np.float64]:
        """(L, L)."""
        if self.num_images == 0:
            raise ValueError("CKA needs at least one batch of 4 images: use a larger batch size")
        hsic_ll = (self._hsic_ll / self.num_images).cpu().numpy()
        own_l = np.diagonal(hsic_ll)
        if not (own_l > 0).all():
            layer = int(np.flatnonzero(~(own_l > 0))[0]) + 1
            raise ValueError(
                f"CKA is undefined: the features of layer {layer} are the same for all images, or not finite"
            )
        # Only here: a mean of the batches' ratios would be biased, a ratio of means is consistent.
        return hsic_ll / np.sqrt(np.outer(own_l, own_l))


def _unbiased_hsic(features_lnd: Tensor) -> Tensor:
    """HSIC_1 between every two layers, (L, L), from n images' features with a linear kernel; n >= 4."""
    n = features_lnd.shape[1]
    # The estimator does not change when features are centred; centring keeps its terms from cancelling.
    centred_lnd = features_lnd - features_lnd.mean(1, keepdim=True)
    kernel_lnn = centred_lnd @ centred_lnd.mT
    # An image's kernel with itself holds its norm only; leaving it out is what makes the estimator unbiased.
    kernel_lnn.diagonal(dim1=1, dim2=2).zero_()
    rows_ln = kernel_lnn.sum(2)
    total_l = rows_ln.sum(1)
    flat_l = kernel_lnn.flatten(1)
    # The trace of a product of symmetric kernels is the sum of their products, entry by entry.
    trace_ll = flat_l @ flat_l.T
    totals_ll = torch.outer(total_l, total_l) / ((n - 1) * (n - 2))
    return (trace_ll + totals_ll - 2 / (n - 2) * rows_ln @ rows_ln.T) / (n * (n - 3))
