"""Scenes that are drawn once per process: drawing is a third of the time of a tiny run, and runs share their images."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from raptor.data.scenes.render import SceneBatch, Scenes

_DRAWN: dict[tuple[str, int, int], dict[int, SceneBatch]] = defaultdict(dict)


class RememberedScenes(Scenes):
    """As `Scenes`. An image does not depend on its batch (tests/data/scenes/test_render.py), so each may be kept."""

    def draw(self, indices: Tensor, device: str | torch.device = "cpu") -> SceneBatch:
        drawn = _DRAWN[self.split, self.size, self.seed]
        wanted = torch.as_tensor(indices).tolist()
        missing = sorted(set(wanted) - drawn.keys())
        if missing:
            fresh = super().draw(torch.tensor(missing))
            drawn.update((index, SceneBatch(*fields)) for index, *fields in zip(missing, *fresh))
        return SceneBatch(*(torch.stack(field).to(device) for field in zip(*(drawn[index] for index in wanted))))
