"""Colours and pasted rectangles, against torchvision and against counts by hand."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from tiny_images import picture
from torchvision.transforms.v2 import functional as F

from raptor.data.augment import change_colours, draw_boxes, draw_colours, draw_crops, paste, random_resized_crop


def drawn(draw, num: int, *args: float) -> torch.Tensor:
    return draw(num, torch.Generator().manual_seed(0), *args)


def test_colours_change_as_torchvision_changes_them() -> None:
    images = torch.rand(4, 3, 6, 6) * 255
    factors_b3 = drawn(draw_colours, 4, 0.4, 0.0)
    changed = change_colours(images, factors_b3)
    for image, ours, (brightness, contrast, saturation) in zip(images / 255, changed / 255, factors_b3.tolist()):
        expected = F.adjust_contrast(F.adjust_brightness(image, brightness), contrast)
        torch.testing.assert_close(ours, F.adjust_saturation(expected, saturation), rtol=1e-5, atol=1e-6)


def test_factors_are_uniform_and_a_share_of_the_images_is_grey() -> None:
    factors_b3 = drawn(draw_colours, 4000, 0.4, 0.2)
    is_grey_b = factors_b3[:, 2] == 0
    assert is_grey_b.float().mean() == pytest.approx(0.2, abs=0.03)
    for factor in (factors_b3[:, 0], factors_b3[:, 1], factors_b3[~is_grey_b, 2]):
        assert scipy.stats.kstest(factor.numpy(), scipy.stats.uniform(0.6, 0.8).cdf).pvalue > 0.01


def test_without_saturation_all_channels_are_the_grey_of_the_image() -> None:
    image = torch.tensor([100.0, 200.0, 50.0]).view(1, 3, 1, 1)
    changed = change_colours(image, torch.tensor([[1.0, 1.0, 0.0]]))
    grey = 0.2989 * 100 + 0.587 * 200 + 0.114 * 50
    torch.testing.assert_close(changed.flatten(), torch.full((3,), grey))


def test_the_pixels_inside_a_box_come_from_the_other_image() -> None:
    """On four pixels a side their centres are .125, .375, .625 and .875."""
    images = torch.zeros(2, 1, 4, 4)
    others = torch.ones(2, 1, 4, 4)
    boxes_b4 = torch.tensor([[0.3, -0.2, 0.7, 0.4], [0.5, 0.5, 0.5, 0.9]])
    pasted = paste(images, others, boxes_b4)
    assert pasted[0, 0].tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert not pasted[1].any()


def test_boxes_have_a_uniform_area_around_a_uniform_centre() -> None:
    top_b, left_b, bottom_b, right_b = drawn(draw_boxes, 4000).unbind(1)
    torch.testing.assert_close(bottom_b - top_b, right_b - left_b)
    uniform = scipy.stats.uniform().cdf
    for values in ((bottom_b - top_b).square(), (top_b + bottom_b) / 2, (left_b + right_b) / 2):
        assert scipy.stats.kstest(values.numpy(), uniform).pvalue > 0.01


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
