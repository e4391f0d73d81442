from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from raptor.report.strips import ImagesFile, components, png, project, teacher_colours


def test_components_are_those_of_scikit_learn() -> None:
    from sklearn.decomposition import PCA

    generator = torch.Generator().manual_seed(0)
    points = torch.randn(200, 8, generator=generator, dtype=torch.float64) * torch.tensor([5.0, 3, 2, 1, 1, 1, 1, 1])
    mean, axes, share = components(points)
    reference = PCA(3, whiten=True).fit(points.numpy())
    scores = ((points - mean) @ axes).numpy()
    expected = reference.transform(points.numpy()) * (200 / 199) ** 0.5
    for i in range(3):
        same = min(abs(scores[:, i] - expected[:, i]).max(), abs(scores[:, i] + expected[:, i]).max())
        assert same < 1e-9
    assert share == pytest.approx(reference.explained_variance_ratio_.sum())


def test_colours_do_not_jump_when_axes_turn() -> None:
    """Layers that are rotations of one another look the same: the components are rotated onto each other."""
    generator = torch.Generator().manual_seed(1)
    last = torch.randn(4, 9, 6, generator=generator, dtype=torch.float64) * torch.tensor([4.0, 2, 1.5, 0.1, 0.1, 0.1])
    turned = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64)).Q
    colours, bases, explained = teacher_colours([3 * last @ turned, last @ turned.mT, last])
    assert len(colours) == len(bases) == len(explained) == 3
    for other in colours[:2]:
        assert torch.allclose(other, colours[2], atol=1e-8)
    assert torch.allclose(project(last, *bases[2]), colours[2])


def test_strips_hold_one_map_per_layer(full_page: str, full_run: Path) -> None:
    saved = json.loads((full_run / "images.json").read_text())
    assert saved["num_images"] == len(saved["images"]) == 2 and saved["num_layers"] == 12
    for row in saved["images"]:
        for side in ("teacher", "surrogate"):
            assert Image.open(io.BytesIO(base64.b64decode(row[side]))).size == (13 * 6, 6)
        assert row["cosine"][0] == pytest.approx(1, abs=1e-6) and row["cosine"][-1] < 0.999
    assert saved["images"][0]["teacher"] in full_page
    assert ImagesFile.read(full_run).to_dict() == saved


def test_png_keeps_its_pixels() -> None:
    colours = torch.tensor([[[0.0, 0.5, 1.0], [1.0, 0.0, 0.25]]])
    picture = Image.open(io.BytesIO(base64.b64decode(png(colours))))
    assert [picture.getpixel((x, 0)) for x in (0, 1)] == [(0, 128, 255), (255, 0, 64)]
