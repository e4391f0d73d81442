"""Small images for tests of readers, and where the real samples are."""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

SPLIT_TREE = [f"{part}/{name}/{i}.png" for part in ("train", "val") for name in ("cat", "ant", "bee") for i in range(3)]


needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder of real images is not here")


def sample(name: str) -> Path:
    if not (SHARED / name).is_file():
        pytest.skip(f"the real sample {name} is not available")
    return SHARED / name


def pixels(seed: int, side: int = 8) -> np.ndarray:
    """Noise (side, side, 3), a function of the seed."""
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def same(left: Any, right: Any) -> bool:
    return np.array_equal(np.asarray(left), np.asarray(right))


def encoded(seed: int, kind: str = "png") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels(seed)).save(stream, kind, **({"lossless": True} if kind == "webp" else {}))
    return stream.getvalue()


def write_tree(root: Path, paths: list[str]) -> None:
    for seed, path in enumerate(paths):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(encoded(seed, path.rsplit(".", 1)[1]))


def write_hashed(root: Path, paths: list[str]) -> Path:
    """Images whose pixels follow from their paths, so that other names are other images."""
    for path in paths:
        save_array(root / path, pixels(zlib.crc32(path.encode())))
    return root


def save_array(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def colour(seed: int, height: int = 6, width: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colour with some noise, so that resampling errors show."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    return Image.fromarray(np.clip(smooth + rng.integers(-20, 21, smooth.shape), 0, 255).astype(np.uint8))
