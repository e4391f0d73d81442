"""Corruptions against independent code, and a row of results by brute force."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from scipy.ndimage import gaussian_filter
from tiny_certified import PHASES, all_states, image_batches, tiny_vit
from tiny_images import write_tree

from raptor.certificate.heads import resolve_head
from raptor.certificate.shift import SEVERITIES, CorruptedImages, Corruption, measure_shift
from raptor.data import iterate, open_data
from raptor.data.preprocess import Preprocess
from raptor.surrogate.surrogate import make_surrogate

SIDE = 112


@pytest.fixture(scope="module")
def picture() -> torch.Tensor:
    """A smooth picture with an edge, uint8 (3, S, S)."""
    y, x = torch.meshgrid(torch.linspace(0, 1, SIDE), torch.linspace(0, 1, SIDE), indexing="ij")
    return (255 * torch.stack([x, y, (x > 0.5).float()])).to(torch.uint8)


def one(corruption: Corruption, image: torch.Tensor, seed: int) -> torch.Tensor:
    return corruption(image[None], [seed])[0]


def test_words_are_corruptions_or_data() -> None:
    assert Corruption.parse("noise") == Corruption("noise", 3) and str(Corruption.parse("jpeg:5")) == "jpeg:5"
    assert Corruption.parse("photos/noise") is None and Corruption.parse("scenes") is None
    with pytest.raises(ValueError, match=r"^--shift blur:6: the severity of blur is 1 to 5, such as blur:3$"):
        Corruption.parse("blur:6")


def test_noise_has_the_stated_deviation_and_follows_the_seed() -> None:
    grey = torch.full((3, SIDE, SIDE), 128, dtype=torch.uint8)
    noisy = one(Corruption("noise", 2), grey, seed=1)
    assert (noisy.float() - 128).std().item() == pytest.approx(255 * 0.12, rel=0.02)
    assert torch.equal(noisy, one(Corruption("noise", 2), grey, seed=1))
    assert not torch.equal(noisy, one(Corruption("noise", 2), grey, seed=2))


def test_blur_is_a_gaussian_of_a_width_that_follows_the_size(picture: torch.Tensor) -> None:
    sigma = SEVERITIES["blur"][3] * SIDE / 224
    blurred = one(Corruption("blur", 4), picture, seed=0).numpy()
    for channel in range(3):
        expected = gaussian_filter(picture[channel].double().numpy(), sigma, mode="mirror", truncate=4)
        assert np.abs(blurred[channel] - expected).max() < 2


def test_jpeg_and_contrast_are_pillows(picture: torch.Tensor) -> None:
    image = Image.fromarray(picture.permute(1, 2, 0).numpy())
    file = io.BytesIO()
    image.save(file, "JPEG", quality=15)
    expected = np.asarray(Image.open(file)).astype(int)
    ours = one(Corruption("jpeg", 3), picture, seed=0).permute(1, 2, 0).numpy().astype(int)
    assert np.abs(ours - expected).mean() < 0.5  # both are libjpeg, with the same quality
    flat = one(Corruption("contrast", 3), picture, seed=0).permute(1, 2, 0).numpy().astype(int)
    assert np.abs(flat - np.asarray(ImageEnhance.Contrast(image).enhance(0.2)).astype(int)).max() <= 1


@pytest.mark.parametrize("kind", SEVERITIES)
def test_each_severity_changes_more(kind: str, picture: torch.Tensor) -> None:
    changes = []
    for severity in range(1, 6):
        changed = one(Corruption(kind, severity), picture, seed=0)
        assert changed.dtype == torch.uint8 and changed.shape == picture.shape
        changes.append((changed.float() - picture.float()).abs().mean().item())
    assert changes == sorted(changes) and changes[0] > 0


@pytest.mark.parametrize("kind", SEVERITIES)
def test_corrupted_images_keep_names_and_do_not_depend_on_the_batch(kind: str, tmp_path: Path) -> None:
    write_tree(tmp_path, [f"{c}/{i}.png" for c in "ab" for i in range(3)])
    data = open_data(str(tmp_path), "all")
    changed = CorruptedImages(data, Corruption(kind))
    preprocess = Preprocess(size=32, resize=32)
    whole = torch.cat([batch.images for batch in iterate(changed, preprocess, 4)])
    single = torch.cat([batch.images for batch in iterate(changed, preprocess, 1)])
    clean = torch.cat([batch.images for batch in iterate(data, preprocess, 4)])
    assert torch.equal(whole, single) and not torch.equal(whole, clean)
    assert list(changed.names) == list(data.names) and changed.labels == data.labels


def test_a_row_by_brute_force() -> None:
    teacher = tiny_vit(num_classes=3)
    surrogate = make_surrogate(teacher, PHASES, copy="last")
    head, _ = resolve_head(teacher)
    found = measure_shift(surrogate, teacher, image_batches(1), name="others", head=head, bootstrap=50)
    exact, own = all_states(teacher, image_batches(1)), all_states(surrogate, image_batches(1))
    relative = []
    for x, y in zip(exact[1:], own[1:]):
        relative.append(float(torch.linalg.matrix_norm(x - y).mean() / torch.linalg.matrix_norm(x).mean()))
    assert found.eps.value == pytest.approx(max(relative), rel=1e-4)
    assert found.eps_layer == int(np.argmax(relative)) + 1
    assert found.eps.lower < found.eps.value < found.eps.upper  # type: ignore[operator]
    rows = exact[-1].flatten(0, 1)
    r2 = 1 - float((exact[-1] - own[-1]).square().sum() / (rows - rows.mean(0)).square().sum())
    assert found.r2_last.value == pytest.approx(r2, rel=1e-4)
    images = torch.cat([batch.images for batch in image_batches(1)])
    theirs, ours = teacher(images).argmax(-1), surrogate(images).argmax(-1)
    assert found.agreement is not None
    assert found.agreement.value == pytest.approx((theirs == ours).double().mean().item())
    assert found.floor == pytest.approx(max(theirs.tolist().count(c) for c in range(3)) / 21)
