"""Finite-time Lyapunov exponents along depth: how a small ball of states is stretched, step by step.

A few orthonormal tangent vectors of the normalised states (see `jacobian.py`) are carried through depth. After each
step a QR factorisation makes them orthonormal again; the logarithms of the diagonal of R are the growth of the
directions in that step. An exponent is their mean over the steps of a phase, in nats per step: positive where nearby
states part, negative where they meet. The vectors start at random and need some steps to find the fastest directions,
so the first steps understate the largest exponents.

For a token group the other tokens stay on the clean path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raptor.data.stream import Batch
from raptor.dynamics.jacobian import SpherePath, phases_of, sphere_paths
from raptor.dynamics.stability import seeded_generator
from raptor.dynamics.states import measured_groups
from raptor.streaming import ImageMoments, Record, Spread
from raptor.vit.view import ViT


@dataclass
class LyapunovResult(Record):
    """Exponents by group, spread over images, in nats per step; m of them, the largest first in the long run.

    exponents: `(k, m)`, by phase. growth: `(L, m)`, of each step (step l to l+1, at index l). m is smaller for a group
    whose tangent space is.
    """

    phases: list[int]
    exponents: dict[str, Spread]
    growth: dict[str, Spread]
    num_images: int


def measure_lyapunov(
    vit: ViT,
    batches: Iterable[Batch],
    phases: Sequence[int] | None = None,
    *,
    num_vectors: int = 16,
    seed: int = 0,
) -> LyapunovResult:
    """Finite-time Lyapunov spectrum of a teacher, a surrogate or an untrained model.

    Args:
        batches: such as `raptor.data.iterate(...)`; memory grows with their size, not with their number.
        phases: their lengths; by default those of a surrogate, else depth as one phase.
        num_vectors: tangent vectors carried through depth; each costs a forward-mode pass.
        seed: of the vectors.
    """
    if num_vectors < 1:
        raise ValueError(f"at least one tangent vector is needed, got {num_vectors}")
    lengths = phases_of(vit, phases)
    groups = measured_groups(vit.groups)
    growths: dict[str, ImageMoments] = {}
    exponents: dict[str, ImageMoments] = {}
    for name in groups:
        growths[name] = ImageMoments()
        exponents[name] = ImageMoments()
    for number, path in enumerate(sphere_paths(vit, batches)):
        generator = seeded_generator(path.units[0].device, seed, number)
        for name, tokens in groups.items():
            growth_blm = carry(path, tokens, num_vectors, generator)
            growths[name].update(growth_blm)
            # Phases differ in length: the mean per step makes their exponents comparable.
            by_phase = [growth_blm[:, first - 1 : last].mean(1) for first, last in lengths.spans]
            exponents[name].update(torch.stack(by_phase, 1))
    result = LyapunovResult(list(lengths), {}, {}, 0)
    for name in groups:
        result.exponents[name] = exponents[name].result()
        result.growth[name] = growths[name].result()
    result.num_images = result.growth["all"].num_images
    return result


def carry(path: SpherePath, tokens: slice, num_vectors: int, generator: torch.Generator) -> Tensor:
    """Log growth `(B, L, m)` of orthonormal tangent vectors in each step."""
    num_layers = len(path.units) - 1
    num_tokens = tokens.stop - tokens.start
    # Each token's sphere has one dimension less than the state: a cls token of width D has D - 1 directions.
    num_vectors = min(num_vectors, num_tokens * (path.units[0].shape[-1] - 1))
    start = [path.random_tangent(0, tokens, generator) for _ in range(num_vectors)]
    vectors, _ = _orthonormal(start, tokens)
    growths = []
    for layer in range(num_layers):
        pushed = [path.push(layer, layer + 1, vector_btd) for vector_btd in vectors]
        # Without a new basis after each step all vectors would turn to the fastest direction.
        vectors, growth_bm = _orthonormal(pushed, tokens)
        growths.append(growth_bm)
    return torch.stack(growths, 1)


def _orthonormal(vectors: Sequence[Tensor], tokens: slice) -> tuple[list[Tensor], Tensor]:
    """Orthonormal vectors with the span of the given ones on `tokens`, zero elsewhere, and the log diagonal of R."""
    matrix_bnm = torch.stack([vector_btd[:, tokens].flatten(1) for vector_btd in vectors], -1)
    q_bnm, r_bmm = torch.linalg.qr(matrix_bnm)
    orthonormal = []
    for column_bn, like in zip(q_bnm.unbind(-1), vectors):
        vector_btd = torch.zeros_like(like)
        vector_btd[:, tokens] = column_bn.view_as(like[:, tokens])
        orthonormal.append(vector_btd)
    # QR leaves the signs of the diagonal open, and a growth has no sign.
    return orthonormal, r_bmm.diagonal(dim1=1, dim2=2).abs().log()
