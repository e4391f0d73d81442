"""Random states of a small trajectory, and their CKA by hand."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import torch
from torch import Tensor

from raptor.vit.groups import TokenGroups

GROUPS = TokenGroups(cls=1, registers=2, patches=5)
NUM_LAYERS, DIM = 4, 12


def make_states(num_images: int, groups: TokenGroups = GROUPS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A residual walk with a shared offset and one huge coordinate, so that cosines are neither 0 nor 1."""
    generator = torch.Generator().manual_seed(num_images)
    x = torch.randn(num_images, groups.num_tokens, DIM, generator=generator)
    x[..., 3] += 4
    states = [x]
    for _ in range(NUM_LAYERS):
        states.append(states[-1] + 0.7 * torch.randn(x.shape, generator=generator))
    return [s.to(dtype) for s in states]


def split(states: list[Tensor], sizes: list[int]) -> list[list[Tensor]]:
    return [list(batch) for batch in zip(*(s.split(sizes) for s in states))]


def in_float64(states: list[Tensor]) -> np.ndarray:
    """(L, B, T, D) over a_1..a_L."""
    return np.stack([s.double().numpy() for s in states[1:]])


def features_by_hand(states: list[Tensor], features: str) -> np.ndarray:
    x_lbtd = in_float64(states)
    parts = {"cls": x_lbtd[:, :, 0], "patches": x_lbtd[:, :, 3:].mean(axis=2)}
    return np.concatenate(list(parts.values()), axis=2) if features == "both" else parts[features]


def hsic_by_hand(x_nd: np.ndarray, y_nd: np.ndarray) -> float:
    """The U-statistic as the sum it abbreviates: over all ordered quadruples of distinct images."""
    k, l, n = x_nd @ x_nd.T, y_nd @ y_nd.T, len(x_nd)
    terms = [k[i, j] * (l[i, j] + l[q, r] - 2 * l[i, q]) for i, j, q, r in permutations(range(n), 4)]
    return float(np.mean(terms))


def direct_cka(batches: list[list[Tensor]], features: str) -> np.ndarray:
    per_batch = [features_by_hand(states, features) for states in batches]
    sizes = [len(states[0]) for states in batches]
    hsic = np.average([[[hsic_by_hand(x, y) for y in f] for x in f] for f in per_batch], axis=0, weights=sizes)
    return hsic / np.sqrt(np.outer(np.diagonal(hsic), np.diagonal(hsic)))
