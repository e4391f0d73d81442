from __future__ import annotations

import base64
import io
import json
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from raptor.files import RunError
from raptor.report.strips import ImagesFile, components, open_run, png, project, teacher_colours
from raptor.vit.open import open_vit
from raptor.vit.saved import save_vit
from raptor.vit.weights import fingerprint


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


def test_a_run_without_a_surrogate_is_not_shown_with_other_weights(tmp_path: Path) -> None:
    """images.json would keep them under the name of the run's own model."""
    made = [timm.create_model("test_vit") for _ in range(2)]
    files = [str(tmp_path / f"{i}.safetensors") for i in range(2)]
    for model, file in zip(made, files):
        save_file(model.state_dict(), file)
    shown = partial(
        open_run, tmp_path / "begun", {"model": "timm/test_vit", "fingerprint": fingerprint(made[0])}, "cpu"
    )
    assert fingerprint(shown(weights=files[0])[0].model) == fingerprint(made[0])
    with pytest.raises(RunError, match=r"1\.safetensors does not hold the weights that .*begun was made with"):
        shown(weights=files[1])
    with pytest.raises(RunError, match="begun holds no surrogate and has no teacher"):
        shown(teacher="scenes")
    save_vit(open_vit("timm/test_vit", weights=files[0]), tmp_path / "trained" / "teacher")
    with pytest.raises(RunError, match="trained holds a model with its own weights: leave out --weights"):
        open_run(tmp_path / "trained", {}, "cpu", weights=files[1])
