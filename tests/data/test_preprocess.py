from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from raptor.data import Preprocess
from raptor.data.stream import draw_crops, random_resized_crop


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colour with some noise, so that resampling errors show."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    return Image.fromarray(np.clip(smooth + rng.integers(-20, 21, smooth.shape), 0, 255).astype(np.uint8))


@pytest.mark.parametrize("shape", [(500, 375), (333, 401), (160, 160), (90, 1000), (256, 300), (601, 257)])
@pytest.mark.parametrize("size, resize", [(224, 256), (32, 32)])
def test_equals_torchvision(shape: tuple[int, int], size: int, resize: int) -> None:
    image = picture(*shape)
    preprocess = Preprocess(size=size, resize=resize)
    reference = v2.Compose(
        [
            v2.Resize(resize, interpolation=v2.InterpolationMode.BICUBIC, antialias=True),
            v2.CenterCrop(size),
            v2.ToImage(),
        ]
    )
    decoded = preprocess.decode(image)
    assert decoded.shape == (3, resize, resize) and decoded.dtype == torch.uint8
    assert torch.equal(preprocess.crop(decoded), reference(image))
    scaled = F.to_dtype(reference(image), torch.float32, scale=True)
    expected = F.normalize(scaled, list(preprocess.mean), list(preprocess.std))
    torch.testing.assert_close(preprocess(image), expected, atol=2e-6, rtol=0)


def test_grey_and_alpha_become_rgb() -> None:
    grey = picture(40, 30).convert("L")
    decoded = Preprocess(size=16, resize=16).decode(grey)
    assert torch.equal(decoded[0], decoded[1]) and torch.equal(decoded[1], decoded[2])
    assert Preprocess(size=16, resize=16).decode(picture(40, 30).convert("RGBA")).shape == (3, 16, 16)


@pytest.mark.parametrize(
    "native, size, expected",
    [
        (518, None, (224, 256)),
        (224, None, (224, 256)),
        (48, None, (48, 48)),
        (224, 448, (448, 512)),
        (518, 98, (98, 98)),
    ],
)
def test_for_native(native: int, size: int | None, expected: tuple[int, int]) -> None:
    preprocess = Preprocess.for_native(native, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), size=size)
    assert (preprocess.size, preprocess.resize) == expected
    assert preprocess.mean == (0.5, 0.5, 0.5)


def test_dictionary_survives_json() -> None:
    preprocess = Preprocess(size=48, resize=48, mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0))
    assert Preprocess.from_dict(json.loads(json.dumps(preprocess.to_dict()))) == preprocess
    with pytest.raises(ValueError, match="unknown preprocessing keys: colour"):
        Preprocess.from_dict({"colour": 1})


def test_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match="resize"):
        Preprocess(size=224, resize=200)
    with pytest.raises(ValueError, match="interpolation"):
        Preprocess(interpolation="cubic")
    with pytest.raises(ValueError, match="three numbers"):
        Preprocess(std=(1.0, 0.0, 1.0))


@pytest.mark.parametrize(
    "box", [(0, 0, 20, 20), (5, 9, 13, 31), (0, 3, 64, 40), (10, 0, 40, 64), (0, 0, 64, 64), (63, 63, 1, 1)]
)
@pytest.mark.parametrize("size", [32, 56])
def test_crop_equals_torchvision(box: tuple[int, int, int, int], size: int) -> None:
    """Up- and downscaling, against float resampling of the cut-out crop."""
    images = torch.stack([torch.from_numpy(np.array(picture(64, 64, seed))).permute(2, 0, 1) for seed in range(2)])
    params = torch.tensor([[*box, 0], [*box, 1]])
    cropped = random_resized_crop(images, params, size)
    expected = F.resized_crop(images.float(), *box, [size, size], antialias=True)
    expected[1] = expected[1].flip(-1)
    torch.testing.assert_close(cropped, expected, atol=2e-3, rtol=0)


def test_crops_follow_the_law() -> None:
    """Area uniform in the scale, all crops inside, half of them flipped."""
    generator = torch.Generator().manual_seed(3)
    top, left, height, width, flip = draw_crops(20_000, 256, generator, (0.2, 0.6)).unbind(1)
    area = height * width / 256**2
    assert (top >= 0).all() and (left >= 0).all() and (top + height <= 256).all() and (left + width <= 256).all()
    assert area.min() > 0.19 and area.max() < 0.61
    assert area.mean().item() == pytest.approx(0.4, abs=0.005)
    assert (width / height).log().mean().item() == pytest.approx(0, abs=0.01)
    assert flip.double().mean().item() == pytest.approx(0.5, abs=0.02)
    room = (256 - width).double()
    assert (left / room).mean().item() == pytest.approx(0.5, abs=0.01)


def test_crop_that_cannot_fit_is_the_whole_image() -> None:
    crops = draw_crops(5, 64, torch.Generator().manual_seed(0), scale=(1.0, 1.0), ratio=(1.2, 1.3), flip=0.0)
    assert crops.tolist() == [[0, 0, 64, 64, 0]] * 5
