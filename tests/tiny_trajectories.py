"""Trajectories of a small ViT for tests of DMD, and how eigenvalues are matched."""

from __future__ import annotations

import numpy as np
import torch

from raptor.dynamics.states import group_means
from raptor.vit.groups import TokenGroups

GROUPS = TokenGroups(cls=1, registers=4, patches=16)


def trajectories(states: list[torch.Tensor], name: str) -> torch.Tensor:
    return group_means([a.double() for a in states], GROUPS)[name]


def match(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Position in `found` of the value nearest to each of `expected`; fails unless one to one."""
    order = np.abs(found[None] - expected[:, None]).argmin(1)
    assert sorted(order) == list(range(len(expected)))
    return order
