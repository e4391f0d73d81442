from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import stochastic_depth


@pytest.fixture(scope="session")
def tiny() -> SimpleNamespace:
    """Options of the smallest version of every experiment: scenes of 32 px, teachers of four blocks of dim 32."""
    budgets = dict(teacher_budget="8steps", teacher_batch=32, teacher_lr=3e-3, raptor_budget="4steps", raptor_batch=16)
    return SimpleNamespace(
        images=dict(data="scenes", limit=96, val_images=48, device="cpu"),
        shape=dict(size=32, patch=8, dim=32, depth=4, heads=2),
        budgets=dict(**budgets, k=2),
    )


@pytest.fixture(scope="session")
def sweep_folder(tmp_path_factory: pytest.TempPathFactory, tiny: SimpleNamespace) -> Path:
    """A tiny stochastic-depth sweep: p = 0 and .5 with one seed, .5 with another."""
    folder = tmp_path_factory.mktemp("sweep")
    stochastic_depth.run(**tiny.images, **tiny.shape, **tiny.budgets, p=[0.0, 0.5], more_p=[0.5], out=str(folder))
    return folder
