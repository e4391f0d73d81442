from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import stochastic_depth
from matplotlib.figure import Figure
from quick import DRAWN
from sweep import Json

IMAGES: dict[str, Any] = dict(data=["scenes"], limit=96, val_images=48, device="cpu", num_workers=0)
SHAPE: dict[str, Any] = dict(size=32, patch=8, dim=32, depth=4, heads=2, k=2, tokens="all")
BUDGETS: dict[str, Any] = dict(
    teacher_budget="8steps", teacher_batch=32, teacher_lr=3e-3, raptor_budget="4steps", raptor_batch=16
)


@pytest.fixture(scope="session")
def tiny() -> dict[str, Any]:
    """Options of the smallest version of every experiment: scenes of 32 px, teachers of four blocks of dim 32."""
    return {"images": IMAGES, "scratch": {**IMAGES, **SHAPE, **BUDGETS}}


@pytest.fixture(scope="session")
def sweep_folder(tmp_path_factory: pytest.TempPathFactory, tiny: dict[str, Any]) -> Path:
    """A tiny stochastic-depth sweep: p = 0 and .5 with one seed, .5 with another. All tests share its teachers."""
    folder = tmp_path_factory.mktemp("sweep")
    config = stochastic_depth.StochasticDepth(**tiny["scratch"], p=[0.0, 0.5], more_p=[0.5], out=str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", DRAWN)
        found: Json = stochastic_depth.main(config)
    assert found["missing"] == []
    return folder


@pytest.fixture(scope="session")
def teacher(sweep_folder: Path) -> str:
    """The folder of one of its teachers."""
    return str(sweep_folder / "teachers" / "p0-s0" / "teacher")
