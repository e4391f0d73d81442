"""Geometry of frames against torchvision and interpolation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms.v2 import functional as TF

from raptor.probes.frames import Geometry, crop_images, crop_targets, draw_boxes, pixel_centres, resize


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(2, 16))
def test_cells_are_where_bilinear_resizing_takes_its_two_patches(height: int, width: int, patch: int) -> None:
    geometry = Geometry(height, width, patch, (height, width))
    for side in geometry.sides:
        num, matrix, (starts, shares) = side.num_patches, side.to_image(), side.cells()
        assert starts[0] == 0 and starts[-1] == len(shares) and int(starts.diff().max()) <= patch
        rebuilt = torch.zeros(len(shares), num + 2)
        for cell in range(num + 1):
            pixels = slice(starts[cell], starts[cell + 1])
            rebuilt[pixels, cell], rebuilt[pixels, cell + 1] = 1 - shares[pixels], shares[pixels]
        assert (rebuilt[:, 0] == 0).all() and (rebuilt[:, -1] == 0).all()
        torch.testing.assert_close(rebuilt[:, 1:-1], matrix, rtol=0, atol=1e-5)


@pytest.mark.parametrize("frame", [(30, 47), (28, 42)])
def test_upsampling_is_interpolation_without_the_padding(frame: tuple[int, int]) -> None:
    geometry = Geometry(*frame, patch=7, target=frame)
    assert geometry.padded[0] % 7 == geometry.padded[1] % 7 == 0
    coarse = torch.randn(2, *geometry.grid, 3)
    whole = F.interpolate(coarse.permute(0, 3, 1, 2), size=geometry.padded, mode="bilinear")
    top, left = geometry.start
    expected = whole[:, :, top : top + frame[0], left : left + frame[1]].permute(0, 2, 3, 1)
    torch.testing.assert_close(
        resize(coarse, *[side.to_image() for side in geometry.sides]), expected, rtol=1e-5, atol=1e-5
    )


def test_padding_round_trip() -> None:
    geometry = Geometry(30, 47, patch=7, target=(60, 94))
    images = torch.rand(2, 3, 30, 47)
    padded = geometry.pad(images)
    top, left = geometry.start
    assert padded.shape[-2:] == (35, 49) and (top, left) == (2, 1)
    assert torch.equal(padded[:, :, top : top + 30, left : left + 47], images)
    assert padded.count_nonzero() == images.count_nonzero()
    # A ramp over the image, read on the four times finer grid, comes back as the ramp at the target's pixels.
    rows, columns = (side.cell_centres(4) for side in geometry.sides)
    ramp = (100 * rows[:, None] + columns[None])[None, ..., None]
    back = resize(ramp, *[side.to_target(4) for side in geometry.sides])[0, ..., 0]
    y, x = pixel_centres(60, 94)
    inner = (slice(8, -8), slice(8, -8))
    torch.testing.assert_close(back[inner], (100 * y[:, None] + x[None])[inner], rtol=1e-4, atol=1e-3)


def test_a_linear_head_commutes_with_upsampling() -> None:
    geometry = Geometry(30, 47, patch=7, target=(30, 47))
    features, weight, bias = torch.randn(1, *geometry.grid, 6), torch.randn(4, 6), torch.randn(4)
    to_image = [side.to_image() for side in geometry.sides]
    late = F.linear(resize(features, *to_image), weight, bias)
    early = resize(F.linear(features, weight, bias), *to_image)
    torch.testing.assert_close(early, late, rtol=1e-4, atol=1e-5)


def test_image_crop_is_torchvisions() -> None:
    images = torch.randint(0, 256, (2, 3, 20, 40), dtype=torch.uint8)
    boxes = torch.tensor([[5 / 20, 8 / 40, 10 / 20, 30 / 40, 0.0], [0, 4 / 40, 15 / 20, 20 / 40, 1.0]])
    crops = crop_images(images, boxes)
    first = TF.resize(images[0, :, 5:15, 8:38].float(), [20, 40], antialias=False)
    second = TF.horizontal_flip(TF.resize(images[1, :, 0:15, 4:24].float(), [20, 40], antialias=False))
    edge = (slice(None), slice(1, -1), slice(1, -1))  # at the rim a crop of a picture sees its surroundings
    torch.testing.assert_close(crops[0][edge], first[edge], rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(crops[1][edge], second[edge], rtol=1e-4, atol=1e-2)


def test_images_and_targets_are_cropped_together() -> None:
    rows, columns = pixel_centres(32, 48)
    ramp = (200 * columns[None] + 40 * rows[:, None]).expand(16, 32, 48)
    boxes = draw_boxes(16, torch.Generator().manual_seed(3), (0.5, 1.0))
    assert boxes[:, 4].unique().tolist() == [0, 1] and (boxes[:, 2] * boxes[:, 3]).min() > 0.49
    pictures = crop_images(ramp[:, None].expand(16, 3, 32, 48), boxes)[:, 0]
    targets = crop_targets(ramp, boxes, rows, columns, 0.0)
    assert (pictures - targets).abs().max() < 200 / 48 + 40 / 32  # nearest is at most half a pixel off
    padded = crop_targets(ramp, boxes, torch.tensor([-0.1, 0.5, 1.01]), columns, -7.0)
    assert (padded[:, 0] == -7).all() and (padded[:, 2] == -7).all() and (padded[:, 1] > 0).all()
