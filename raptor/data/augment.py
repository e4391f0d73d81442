"""Random resized crops and flips, drawn on the CPU for a whole batch and applied on any device at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

NUM_TRIES = 10


def draw_crops(
    num_images: int,
    side: int,
    generator: torch.Generator,
    scale: tuple[float, float] = (0.35, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float = 0.5,
) -> Tensor:
    """Crops of square images of side `side`: int64 (B, 5) of top, left, height, width, flip (0 or 1).

    Area uniform in `scale`, log aspect ratio uniform in `ratio`; of ten tries the first that fits is taken, else the
    whole image, as in torchvision's RandomResizedCrop.
    """
    draws_bt3 = torch.rand(num_images, NUM_TRIES, 2, generator=generator, dtype=torch.float64)
    place_b3 = torch.rand(num_images, 3, generator=generator, dtype=torch.float64)
    area_bt = side**2 * (scale[0] + (scale[1] - scale[0]) * draws_bt3[..., 0])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect_bt = (low + (high - low) * draws_bt3[..., 1]).exp()
    width_bt, height_bt = (area_bt * aspect_bt).sqrt().round(), (area_bt / aspect_bt).sqrt().round()
    fits_bt = (width_bt.clamp(min=1) == width_bt) & (width_bt <= side) & (height_bt >= 1) & (height_bt <= side)
    first_b1 = fits_bt.int().argmax(dim=1, keepdim=True)
    found_b = fits_bt.any(dim=1)
    width_b = torch.where(found_b, width_bt.gather(1, first_b1)[:, 0], side)
    height_b = torch.where(found_b, height_bt.gather(1, first_b1)[:, 0], side)
    top_b = (place_b3[:, 0] * (side - height_b + 1)).floor()
    left_b = (place_b3[:, 1] * (side - width_b + 1)).floor()
    return torch.stack([top_b, left_b, height_b, width_b, place_b3[:, 2] < flip], dim=1).long()


def random_resized_crop(images_u8: Tensor, params: Tensor, size: int) -> Tensor:
    """Cut each image's crop and resize it to `size`: (B, 3, S, S) and (B, 5) to float32 (B, 3, size, size) in 0..255.

    Antialiased bilinear, equal to torchvision's `resized_crop` before rounding: a resize is linear and separable, so
    each image is multiplied by one matrix for its rows and one for its columns, and the batch is two matrix products.
    """
    num_images, num_channels, height, width = images_u8.shape
    top_b, left_b, height_b, width_b, flip_b = params.to(torch.float32).unbind(dim=1)
    rows_bsh = _resize_matrices(top_b, height_b, height, size)
    columns_bsw = _resize_matrices(left_b, width_b, width, size)
    columns_bsw = torch.where(flip_b.view(-1, 1, 1) > 0, columns_bsw.flip(1), columns_bsw)
    with torch.autocast(images_u8.device.type, enabled=False):
        pixels_bhcw = images_u8.permute(0, 2, 1, 3).to(torch.float32)
        tall = torch.bmm(rows_bsh, pixels_bhcw.reshape(num_images, height, -1))
        both = torch.bmm(tall.view(num_images, size * num_channels, width), columns_bsw.mT)
    return both.view(num_images, size, num_channels, size).permute(0, 2, 1, 3).contiguous()


def _resize_matrices(start_b: Tensor, length_b: Tensor, side: int, size: int) -> Tensor:
    """Triangle-filter weights (B, size, side): pixels start .. start + length of a line to `size` pixels."""
    start_b11, length_b11 = start_b.view(-1, 1, 1), length_b.view(-1, 1, 1)
    step_b11 = length_b11 / size
    centre_s1 = torch.arange(size, device=start_b.device).view(1, -1, 1) + 0.5
    pixel_1p = torch.arange(side, device=start_b.device).view(1, 1, -1) + 0.5
    distance_bsp = (pixel_1p - start_b11 - centre_s1 * step_b11).abs()
    weights_bsp = (1 - distance_bsp / step_b11.clamp(min=1)).clamp(min=0)
    inside_b1p = (pixel_1p > start_b11) & (pixel_1p < start_b11 + length_b11)
    weights_bsp = weights_bsp * inside_b1p
    return weights_bsp / weights_bsp.sum(dim=-1, keepdim=True)
