"""Rank and coherence of the updates `Delta_l = x̂_(l+1) - x̂_l`.

For patches, registers and all tokens the rows of the update matrix are the tokens of one image, and the numbers are
spread over images. For cls, and a single register, they are the images, since one token is trivially of rank 1: one
number for the whole set.

Singular values of an image's updates cost far more than its forward pass on a GPU, so they are taken on a stated number
of images, spread evenly over the set (`num_rank_images`), and on the CPU, where many small matrices are faster. When
the states are on a GPU, a separate thread does this in parallel. A single token uses every image.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raptor.devices import Ranks
from raptor.dynamics.states import EvenSubset, by_group, eigenvalues, measured_groups, take_rows, unit
from raptor.streaming import ImageMoments, NotSaved, Record, Spread, reduce_all
from raptor.vit.groups import TokenGroups
from raptor.vit.trajectory import check_states

RANK_IMAGES = 64
_TOGETHER = 8  # images whose Gram matrices are held at once


@dataclass
class RankResult(Record):
    """By group, `L` values each (step l to l+1, at index l).

    values: `(N, 3, groups, L)`, stable rank, effective rank and coherence of single images, for bootstraps; the groups
    are the first ones of `stable_rank`, those of several tokens. Not saved.
    """

    stable_rank: dict[str, Spread]
    effective_rank: dict[str, Spread]
    coherence: dict[str, Spread]
    num_rank_images: int
    values: NotSaved[np.ndarray | None] = None


def ranks_from_squares(squares: Tensor) -> tuple[Tensor, Tensor]:
    """Stable and effective rank from squared singular values `(..., n)`; both are 0 when all are 0."""
    squares = squares.clamp_min(0)
    top = squares.amax(-1)
    stable = torch.where(top > 0, squares.sum(-1) / top.clamp_min(torch.finfo(squares.dtype).tiny), 0)
    # Rounding of a Gram matrix leaves squares of this size where the singular value is zero.
    noise = squares.shape[-1] * torch.finfo(squares.dtype).eps * top
    values = torch.where(squares > noise[..., None], squares, 0).sqrt()
    total = values.sum(-1, keepdim=True)
    entropy = torch.special.entr(values / total.clamp_min(torch.finfo(squares.dtype).tiny)).sum(-1)
    return stable, torch.where(top > 0, entropy.exp(), 0)


def small_gram(updates: Tensor) -> Tensor:
    """The smaller Gram matrix of matrices `(..., T, D)`, in float64: its eigenvalues are squared singular values."""
    # Squaring halves the digits, so float32 would lose the small singular values.
    updates = updates.double()
    if updates.shape[-2] <= updates.shape[-1]:
        return updates @ updates.mT
    return updates.mT @ updates


def coherence(updates: Tensor) -> Tensor:
    """Mean cosine of each row of `(..., T, D)` with the mean row; rows that are zero count as cosine 0."""
    return torch.linalg.vecdot(unit(updates), unit(updates.mean(-2, keepdim=True))).mean(-1)


class Rank:
    """Streaming stable rank, effective rank and coherence by token group.

    `num_images` is the number of images to come, if known: the `num_rank_images` are then spread evenly over them;
    otherwise they are the first ones.
    """

    def __init__(self, groups: TokenGroups, num_rank_images: int = RANK_IMAGES, num_images: int | None = None) -> None:
        self.groups = groups
        self._subset = EvenSubset(num_rank_images, num_images)
        self._spans: dict[str, slice] = {}
        self._single: dict[str, tuple[int, _UpdatesOverImages]] = {}
        for name, span in measured_groups(groups).items():
            if name == "all" or span.stop - span.start > 1:
                self._spans[name] = span
            else:
                self._single[name] = (span.start, _UpdatesOverImages())
        self._coherence = ImageMoments()
        self._ranks = ImageMoments()
        self._worker: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []

    @torch.no_grad()
    def update(self, states: Sequence[Tensor], places: Sequence[int] | None = None) -> None:
        """Add the trajectory `a_0..a_L` of a batch, each `(B, T, D)`, of the images at `places` of the stream."""
        check_states(states, num_tokens=self.groups.num_tokens)
        # A single token of one image is one row: its rank says something only over images.
        for token, over_images in self._single.values():
            x_lbd = unit(torch.stack([a[:, token] for a in states]))
            over_images.update(x_lbd[1:] - x_lbd[:-1])
        rows, kept_places = self._subset.pick(len(states[0]), places)
        for start in range(0, len(rows), _TOGETHER):
            some = rows[start : start + _TOGETHER]
            x_lbtd = unit(torch.stack([take_rows(a, some) for a in states]))
            update_bltd = (x_lbtd[1:] - x_lbtd[:-1]).transpose(0, 1)
            parts = [update_bltd[:, :, span] for span in self._spans.values()]
            some_places = kept_places[start : start + _TOGETHER]
            self._coherence.update(torch.stack([coherence(part) for part in parts], 1), some_places)
            grams = [small_gram(part) for part in parts]
            if grams[0].device.type == "cpu":
                self._factorise(grams, some_places)
                continue
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1)  # one thread, so that images stay in order
            self._jobs.append(self._worker.submit(self._factorise, grams, some_places))

    def _factorise(self, grams: Sequence[Tensor], places: Sequence[int]) -> None:
        """Add the ranks of the Gram matrices `(B, L, n, n)` of each group."""
        ranks_of_groups = []
        for gram_bl in grams:
            # LAPACK would not converge, with an error that names no cause.
            if not bool(gram_bl.isfinite().all()):
                raise ValueError("an update along depth is not finite: check the model's weights, or use fp32")
            squares = eigenvalues(gram_bl.flatten(0, 1))
            ranks_of_groups.append(torch.stack(ranks_from_squares(squares.unflatten(0, gram_bl.shape[:2])), 1))
        self._ranks.update(torch.stack(ranks_of_groups, 2), places)  # (B, 2, groups, L)

    def reduce(self, ranks: Ranks) -> None:
        self._finish()
        reduce_all(ranks, self._ranks, self._coherence)
        for _, over_images in self._single.values():
            over_images.reduce(ranks)

    def _finish(self) -> None:
        """Wait for the worker."""
        for job in self._jobs:
            job.result()
        if self._worker is not None:
            self._worker.shutdown()
        self._jobs = []
        self._worker = None

    def result(self) -> RankResult:
        self._finish()
        ranks = self._ranks.result()  # (2, groups, L)
        values = np.concatenate([self._ranks.kept(), self._coherence.kept()[:, None]], 1)
        result = RankResult(
            stable_rank=by_group(ranks[0], self._spans),
            effective_rank=by_group(ranks[1], self._spans),
            coherence=by_group(self._coherence.result(), self._spans),
            num_rank_images=ranks.num_images,
            values=values,
        )
        for name, (_, over_images) in self._single.items():
            numbers = over_images.result()
            result.stable_rank[name], result.effective_rank[name], result.coherence[name] = numbers
        return result


class _UpdatesOverImages:
    """Ranks and coherence of updates whose rows are images, from a streaming second moment.

    Keeps an `L x D x D` float64 matrix: 57 MB for a ViT-B, 755 MB for a ViT-g.
    """

    def __init__(self) -> None:
        self.num_images = 0
        self._second: Tensor | None = None
        self._sum = torch.zeros((), dtype=torch.float64)
        self._unit_sum = torch.zeros((), dtype=torch.float64)

    def update(self, update_lbd: Tensor) -> None:
        """Add a batch of updates `(L, B, D)`."""
        wide = update_lbd.double()
        if self._second is None:
            self._second = wide.mT @ wide
        else:
            # In place: a second matrix of this size might not fit.
            self._second.baddbmm_(wide.mT, wide)
        self._sum = self._sum.to(wide.device) + wide.sum(1)
        self._unit_sum = self._unit_sum.to(wide.device) + unit(wide).sum(1)
        self.num_images += wide.shape[1]

    def reduce(self, ranks: Ranks) -> None:
        self._second = ranks.sum(self._second)
        self._sum = ranks.sum(self._sum)
        self._unit_sum = ranks.sum(self._unit_sum)
        self.num_images = sum(ranks.gather(self.num_images))

    def result(self) -> tuple[Spread, Spread, Spread]:
        """Stable rank, effective rank and coherence by step, without deviation: one number for the set."""
        if self._second is None:
            raise ValueError("no images were measured: call update with at least one batch first")
        stable, effective = ranks_from_squares(eigenvalues(self._second))
        # The mean of the cosines with the mean update is the mean unit update, along the mean update.
        coherent = torch.linalg.vecdot(self._unit_sum / self.num_images, unit(self._sum))
        num = self.num_images
        return (
            Spread(stable.cpu().numpy(), num_images=num),
            Spread(effective.cpu().numpy(), num_images=num),
            Spread(coherent.cpu().numpy(), num_images=num),
        )
