"""Layer-layer similarity of a trajectory, streaming: memory does not grow with the number of images.

Every accumulator takes batches of `states`, a list of the L+1 tensors `a_0..a_L`, each (B, T, D) of any float type.
All matrices are L x L over `a_1..a_L`; `a_0` is never in them. Norms and cosines are float32 or better, running sums
float64 on the device of the states, and nothing waits for the device before the result is read (bad states are noted
on the device and looked at every 50 batches).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raptor.devices import ONE_PROCESS, Ranks, full_precision
from raptor.phases.cka import LinearCKA
from raptor.phases.outliers import Outliers, OutlierShares
from raptor.streaming import Array, Moments, Result, reduce_all
from raptor.vit.groups import POOLED, TokenGroups
from raptor.vit.trajectory import (
    NonFiniteStates,
    Trajectories,
    at_least_float32,
    check_states,
    double,
    float_type,
    pool_layers,
)

_CHECK_EVERY = 50  # batches
NUM_BLOCKS = 64  # of images, for the bootstrap: memory does not grow with the number of images
MAX_CHUNK = 2**27  # how many numbers of the stacked states are held at once


@dataclass(frozen=True)
class Blocks:
    """Mean matrices (N, L, L) of blocks of images, and how many images each block has, (N,)."""

    matrix_nll: Array
    sizes: NDArray[np.int64]

    def resampled(self, num_resamples: int, seed: int = 0) -> Array:
        """The matrix over all images, (R, L, L), with the blocks drawn again with replacement."""
        num = len(self.sizes)
        # Counts of each block, not drawn blocks: all resamples are then one product.
        drawn = np.random.default_rng(seed).multinomial(num, np.full(num, 1 / num), size=num_resamples)
        weights_rn = drawn * self.sizes
        matrix_rll = np.einsum("rn,nlm->rlm", weights_rn / weights_rn.sum(1, keepdims=True), self.matrix_nll)
        matrix_rll = (matrix_rll + matrix_rll.swapaxes(1, 2)) / 2
        diagonal = np.arange(matrix_rll.shape[1])
        matrix_rll[:, diagonal, diagonal] = 1.0
        return matrix_rll


class CosineSimilarity:
    """Mean cosine between the same token at layers l and m.

    `result()` has one matrix for `all` tokens, one for each group present, and `pooled`: the mean of the cosines of
    the cls token and of the mean patch, whichever the model has. A token of norm zero has no direction: it is an
    error. With `statistics`, every coordinate is standardised first. With `blocks_of` (a variant), the matrices of that
    variant are also kept for up to `NUM_BLOCKS` blocks of images, dealt out in turn, for a bootstrap over images.
    """

    def __init__(
        self,
        num_layers: int,
        groups: TokenGroups,
        statistics: CoordinateStatistics | None = None,
        model: str = "the model",
        blocks_of: str | None = None,
    ) -> None:
        self.num_layers = num_layers
        self.groups = groups
        self.statistics = statistics
        self.blocks_of = blocks_of
        self.num_images = 0
        self._bad = _BadStates(num_layers, model)
        # Sums over images; the first batch gives them their shape and device.
        self._token_tll = torch.zeros((), dtype=torch.float64)
        self._pooled_ll = torch.zeros((), dtype=torch.float64)
        self._block_nll = torch.zeros((), dtype=torch.float64)
        self._block_sizes = np.zeros(NUM_BLOCKS, dtype=np.int64)

    @torch.no_grad()
    def update(self, states: Sequence[Tensor], pooled: dict[str, Tensor], start: int | None = None) -> Tensor:
        """Add a batch; returns the squared norms of its tokens, (B, T, L).

        pooled: from `pool_layers`. start: the number of images before the batch; by default the number seen.
        """
        if start is None:
            start = self.num_images
        # The block of an image follows from its place in the stream, whichever rank has it.
        block_b = (torch.arange(len(states[0])) + start) % NUM_BLOCKS
        self._block_sizes += np.bincount(block_b.numpy(), minlength=NUM_BLOCKS)
        grams = []
        for x_btld in _chunks(states):
            grams.append(_gram(x_btld if self.statistics is None else self.statistics.standardise(x_btld)))
        cosine_btll, energy_btl = _cosines(torch.cat(grams))
        # Token by token: every group can be read off at the end. Over batches in float64, because float32 sums of
        # thousands of batches lose digits.
        self._token_tll = self._token_tll + double(cosine_btll.sum(0))
        kept_bll: Tensor | None = None
        if self.blocks_of not in (None, "pooled"):
            where = dict(self.groups.present()).get(str(self.blocks_of), slice(None))
            kept_bll = double(cosine_btll[:, where].mean(1))
        energies = [energy_btl.flatten(0, 1)]
        for x_bld in pooled.values():
            vectors = x_bld if self.statistics is None else self.statistics.standardise(x_bld)
            cosine_bll, energy_bl = _cosines(_gram(vectors))
            self._pooled_ll = self._pooled_ll + double(cosine_bll.sum(0))
            energies.append(energy_bl)
            if self.blocks_of == "pooled":
                share_bll = double(cosine_bll) / len(pooled)
                kept_bll = share_bll if kept_bll is None else kept_bll + share_bll
        if kept_bll is not None:
            if self._block_nll.dim() == 0:
                self._block_nll = kept_bll.new_zeros(NUM_BLOCKS, self.num_layers, self.num_layers)
            self._block_nll.index_add_(0, block_b.to(kept_bll.device), kept_bll)
        self.num_images += len(states[0])
        self._bad.watch(states[0], torch.cat(energies))
        return energy_btl

    def reduce(self, ranks: Ranks) -> None:
        """Merge the sums of all ranks; raises where this rank saw states that are not finite."""
        self._bad.check()
        self._token_tll = ranks.sum(self._token_tll)
        self._pooled_ll = ranks.sum(self._pooled_ll)
        self._block_nll = ranks.sum(self._block_nll)
        self._block_sizes = np.sum(ranks.gather(self._block_sizes), axis=0)
        self.num_images = sum(ranks.gather(self.num_images))

    def result(self) -> dict[str, Array]:
        """Variant -> (L, L) matrix. Raises `NonFiniteStates` if any state was not finite."""
        if self.num_images == 0:
            raise ValueError("no images were measured: the data is empty")
        self._bad.check()
        token_tll = (self._token_tll / self.num_images).cpu().numpy()
        present = dict(self.groups.present())
        matrices: dict[str, Array] = {"all": token_tll.mean(axis=0)}
        for name, where in present.items():
            matrices[name] = token_tll[where].mean(axis=0)
        num_pooled = sum(name in present for name in POOLED)
        if num_pooled > 0:
            matrices["pooled"] = (self._pooled_ll / (num_pooled * self.num_images)).cpu().numpy()
        for name, matrix in matrices.items():
            # Rounding differs above and below the diagonal, and a vector's cosine with itself is 1 up to rounding.
            matrices[name] = (matrix + matrix.T) / 2
            np.fill_diagonal(matrices[name], 1.0)
        return matrices

    def blocks(self) -> Blocks | None:
        """The mean matrix of each block of images; None without `blocks_of`."""
        if self.blocks_of is None:
            return None
        used = self._block_sizes > 0
        sizes = self._block_sizes[used]
        sums_nll = self._block_nll.cpu().numpy()[used]
        return Blocks(sums_nll / sizes[:, None, None], sizes)


class CoordinateStatistics:
    """Mean and standard deviation of each coordinate at each layer, over all images and tokens."""

    def __init__(self, num_layers: int, model: str = "the model") -> None:
        self.num_layers = num_layers
        self._bad = _BadStates(num_layers, model)
        self._moments = Moments()  # of (L, D)
        self._scale: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def update(self, states: Sequence[Tensor]) -> None:
        check_states(states, self.num_layers)
        variances = []
        means = []
        for x_btd in states[1:]:
            variance_d, mean_d = torch.var_mean(at_least_float32(x_btd).flatten(0, 1), dim=0, correction=0)
            variances.append(variance_d)
            means.append(mean_d)
        variance_ld = double(torch.stack(variances))
        mean_ld = double(torch.stack(means))
        num_tokens = states[0].shape[0] * states[0].shape[1]
        self._moments.add(mean_ld, variance_ld * num_tokens, num_tokens)
        # Plus 1, because a layer of zeros has statistics, even though it has no cosine.
        self._bad.watch(states[0], 1 + mean_ld.square().sum(1)[None] + variance_ld.sum(1)[None])

    def reduce(self, ranks: Ranks) -> None:
        """Merge the statistics of all ranks; raises where this rank saw states that are not finite."""
        self._bad.check()
        self._moments.reduce(ranks)

    def result(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation (L, D) of each coordinate; the divisor is the number of tokens."""
        self._bad.check()
        return self._moments.mean, self._moments.variance.sqrt()

    def standardise(self, x: Tensor) -> Tensor:
        """(…, L, D) with each coordinate to mean 0 and deviation 1; a coordinate that never varies becomes 0."""
        if self._scale is None:
            mean, std = self.result()
            inverse = torch.where(std > 0, 1 / std, 0.0)
            dtype = torch.promote_types(x.dtype, torch.float32)
            self._scale = (mean.to(x.device, dtype), inverse.to(x.device, dtype))
        mean, inverse = self._scale
        return (x - mean) * inverse


@dataclass(frozen=True)
class SimilarityResult(Result):
    """What one pass over the images gives. `cka` is None when not asked for, or when no batch had 4 images."""

    matrices: dict[str, Array]
    cka: Array | None
    outliers: Outliers
    num_images: int
    blocks: Blocks | None = None


def measure_similarity(
    trajectories: Trajectories | Iterable[Sequence[Tensor]],
    num_layers: int,
    groups: TokenGroups,
    statistics: CoordinateStatistics | None = None,
    cka_features: str | None = "both",
    model: str = "the model",
    blocks_of: str | None = None,
) -> SimilarityResult:
    """Similarity over a stream of trajectories, one batch of states `a_0..a_L` at a time; of all ranks that share it.

    `statistics` (from an earlier pass) standardises coordinates before the cosine; CKA and outliers stay those of the
    raw states. `cka_features` None leaves CKA out. `model` names the model in errors. `blocks_of` is the variant whose
    matrices are kept by blocks of images, see `CosineSimilarity`.
    """
    cosine = CosineSimilarity(num_layers, groups, statistics, model, blocks_of)
    cka = None
    if cka_features is not None:
        cka = LinearCKA(groups, cka_features)
    outliers = OutlierShares()
    ranks = ONE_PROCESS
    if isinstance(trajectories, Trajectories):
        ranks = trajectories.ranks
    found: Any
    for found in trajectories:
        start = None
        states: Sequence[Tensor] = found
        if isinstance(trajectories, Trajectories):
            states, _, batch = found
            start = batch.start
        check_states(states, num_layers, groups.num_tokens)
        pooled = pool_layers(states, groups)
        energy_btl = cosine.update(states, pooled, start)
        # With statistics those norms are of standardised states.
        outliers.update(states, energy_btl if statistics is None else None)
        if cka is not None:
            cka.update(pooled)
    reduce_all(ranks, cosine, outliers, cka)
    matrices = cosine.result()
    cka_ll = None
    if cka is not None and cka.num_images > 0:
        cka_ll = cka.result()
    return SimilarityResult(matrices, cka_ll, outliers.result(), cosine.num_images, cosine.blocks())


class _BadStates:
    """The first batch in which each state was not finite, or had a vector of norm zero; kept on the device."""

    def __init__(self, num_layers: int, model: str) -> None:
        self.model = model
        self.batch = 0
        self._first = torch.full((2, num_layers + 1), -1)

    def watch(self, a_0: Tensor, energy_nl: Tensor) -> None:
        """Look at a batch: its first state, and squared norms of vectors at the layers 1..L."""
        norm = torch.linalg.vector_norm(a_0, dtype=float_type(a_0)).view(1)
        not_finite = torch.cat([~norm.isfinite(), ~energy_nl.amax(0).isfinite()])
        zero = torch.cat([torch.zeros_like(norm).bool(), energy_nl.amin(0) == 0])
        bad = torch.stack([not_finite, zero])
        self._first = self._first.to(bad.device, non_blocking=True)
        self._first = torch.where(bad & (self._first < 0), self.batch, self._first)
        self.batch += 1
        if self.batch % _CHECK_EVERY == 0:
            self.check()

    def check(self) -> None:
        for kind, first_l in zip(("not finite", "zero"), self._first.tolist()):
            found = [(batch, layer) for layer, batch in enumerate(first_l) if batch >= 0]
            if not found:
                continue
            batch, layer = min(found)
            place = f"layer {layer} in batch {batch} (the first batch is 0)"
            if kind == "not finite":
                raise NonFiniteStates.of(self.model, f"(or their norm is beyond float32) at {place}")
            raise ValueError(
                f"the states of {self.model} have a vector of norm zero at {place}: its cosine is undefined"
            )


def _chunks(states: Sequence[Tensor]) -> Iterator[Tensor]:
    """`a_1..a_L` stacked to (b, T, L, D), few images at a time, so that the stack stays small beside the states."""
    x_btd = states[0]
    # A stack of the whole batch would take as much memory again as its states.
    num_images = max(1, MAX_CHUNK // (x_btd[0].numel() * (len(states) - 1)))
    for start in range(0, len(x_btd), num_images):
        yield torch.stack([x[start : start + num_images] for x in states[1:]], dim=2)


def _gram(x: Tensor) -> Tensor:
    """(…, L, D) to the Gram matrix of the layers' vectors, (…, L, L), in float32 or better."""
    x_nld = x.flatten(0, -3)
    with full_precision(x.device):
        # Products of bf16 states come out in float32: rounded to bf16, cosines were 1.0 where the truth was .99875.
        if x.is_cuda and torch.version.hip is None and x.dtype in (torch.bfloat16, torch.float16):
            gram_nll = torch.bmm(x_nld, x_nld.mT, out_dtype=torch.float32)
        else:
            x_nld = at_least_float32(x_nld)
            gram_nll = torch.bmm(x_nld, x_nld.mT)
    return gram_nll.view(*x.shape[:-1], x.shape[-2])


def _cosines(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines (…, L, L) and squared norms (…, L) from a Gram matrix, which is overwritten."""
    energy = gram.diagonal(dim1=-2, dim2=-1).clone()
    inverse = energy.rsqrt()
    return gram.mul_(inverse[..., :, None]).mul_(inverse[..., None, :]), energy
