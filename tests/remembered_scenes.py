"""Scenes that are drawn once per process: drawing is a third of the time of a tiny run, and runs share their images."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from raptor.data.scenes.render import SceneBatch, draw_scenes

_DRAWN: dict[tuple[str, int], dict[int, SceneBatch]] = defaultdict(dict)


def remembered(indices: Tensor, size: int, split: str, device: str | torch.device = "cpu") -> SceneBatch:
    """As `draw_scenes`. An image does not depend on its batch (tests/data/scenes/test_render.py): each is kept."""
    drawn = _DRAWN[split, size]
    wanted = torch.as_tensor(indices).tolist()
    missing = sorted(set(wanted) - drawn.keys())
    if missing:
        fresh = draw_scenes(torch.tensor(missing), size, split)
        drawn.update((index, SceneBatch(*fields)) for index, *fields in zip(missing, *fresh))
    return SceneBatch(*(torch.stack(field).to(device) for field in zip(*(drawn[index] for index in wanted))))
