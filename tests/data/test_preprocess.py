"""Preprocessing against torchvision."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps
from tiny_images import picture
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from raptor.data import Preprocess
from raptor.data.preprocess import as_rgb


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


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_photographs_are_upright(kind: str) -> None:
    for orientation in range(1, 9):
        exif, stream = Image.Exif(), BytesIO()
        exif[ExifTags.Base.Orientation] = orientation
        picture(40, 24).save(stream, kind, exif=exif)
        stored = Image.open(stream)
        expected = ImageOps.exif_transpose(stored).convert("RGB")
        turned = as_rgb(stored)
        assert turned.tobytes() == expected.tobytes() and turned.size == expected.size
        assert as_rgb(turned).tobytes() == turned.tobytes()  # once only
        assert as_rgb(stored, turned=False).tobytes() == stored.convert("RGB").tobytes()
        preprocess = Preprocess(size=16, resize=16)
        assert torch.equal(preprocess.decode(stored), preprocess.decode(expected))
    damaged = picture(40, 24)
    damaged.info["exif"] = b"Exif\0\0no such thing"
    assert as_rgb(damaged).tobytes() == damaged.tobytes()


@pytest.mark.parametrize("kind", ["png", "tiff", "ppm"])
def test_sixteen_bits_are_scaled_and_not_clipped(kind: str) -> None:
    """Pillow would make all that is brighter than 1/256 of the range white."""
    grey, stream = np.asarray(picture(40, 30).convert("L")), BytesIO()
    Image.fromarray(grey.astype(np.uint16) * 256 + 17).save(stream, kind)
    assert np.array_equal(np.asarray(as_rgb(Image.open(stream))), np.stack([grey] * 3, axis=2))


def test_a_transparent_palette_gives_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    stream, palette = BytesIO(), picture(40, 30).convert("P")
    palette.save(stream, "png", transparency=bytes(range(256)))
    assert as_rgb(Image.open(stream)).tobytes() == palette.convert("RGB").tobytes() and not recwarn.list


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


def test_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match="resize"):
        Preprocess(size=224, resize=200)
    with pytest.raises(ValueError, match="interpolation"):
        Preprocess(interpolation="cubic")
    with pytest.raises(ValueError, match="three numbers"):
        Preprocess(std=(1.0, 0.0, 1.0))
