"""A small folder of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raptor.data import ImageData, open_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 images of noise in two classes."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for i in range(23):
        path = root / f"{'ab'[i % 2]}" / f"{i:02d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 20, 3), dtype=np.uint8)).save(path)
    return root


@pytest.fixture
def data(folder: Path) -> ImageData:
    return open_data(str(folder), "all")
