"""What a training batch changes in its images: crops, colours, and rectangles of another image.

Numbers are drawn first, for the whole batch and on the CPU, so that every number of ranks sees the same images.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_NUM_TRIES = 10


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
    # All tries are drawn at once, so that the next image's draws do not depend on how many tries this one took.
    draws_bt3 = torch.rand(num_images, _NUM_TRIES, 2, generator=generator, dtype=torch.float64)
    place_b3 = torch.rand(num_images, 3, generator=generator, dtype=torch.float64)
    area_bt = side**2 * (scale[0] + (scale[1] - scale[0]) * draws_bt3[..., 0])
    # In logarithms, so that 3:4 is as likely as 4:3.
    low = math.log(ratio[0])
    high = math.log(ratio[1])
    aspect_bt = (low + (high - low) * draws_bt3[..., 1]).exp()
    width_bt = (area_bt * aspect_bt).sqrt().round()
    height_bt = (area_bt / aspect_bt).sqrt().round()
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
    # In bf16, which autocast may choose, values above 128 would be rounded to whole numbers.
    with torch.autocast(images_u8.device.type, enabled=False):
        pixels_bhcw = images_u8.permute(0, 2, 1, 3).to(torch.float32)
        tall = torch.bmm(rows_bsh, pixels_bhcw.reshape(num_images, height, -1))
        both = torch.bmm(tall.view(num_images, size * num_channels, width), columns_bsw.mT)
    return both.view(num_images, size, num_channels, size).permute(0, 2, 1, 3).contiguous()


def _resize_matrices(start_b: Tensor, length_b: Tensor, side: int, size: int) -> Tensor:
    """Triangle-filter weights (B, size, side): pixels start .. start + length of a line to `size` pixels."""
    start_b11 = start_b.view(-1, 1, 1)
    length_b11 = length_b.view(-1, 1, 1)
    step_b11 = length_b11 / size
    centre_s1 = torch.arange(size, device=start_b.device).view(1, -1, 1) + 0.5
    pixel_1p = torch.arange(side, device=start_b.device).view(1, 1, -1) + 0.5
    distance_bsp = (pixel_1p - start_b11 - centre_s1 * step_b11).abs()
    # The filter is wider than a pixel only where an image shrinks: that is antialiasing.
    weights_bsp = (1 - distance_bsp / step_b11.clamp(min=1)).clamp(min=0)
    inside_b1p = (pixel_1p > start_b11) & (pixel_1p < start_b11 + length_b11)
    # Pixels outside the crop take no part, as if it had been cut out first: the rest is scaled up to a sum of 1.
    weights_bsp = weights_bsp * inside_b1p
    return weights_bsp / weights_bsp.sum(dim=-1, keepdim=True)


def draw_colours(num_images: int, generator: torch.Generator, jitter: float, grey: float) -> Tensor:
    """Factors of brightness, contrast and saturation, float32 (B, 3), uniform within `jitter` of 1.

    The share `grey` of the images has saturation 0.
    """
    factors_b3 = 1 + jitter * (2 * torch.rand(num_images, 3, generator=generator) - 1)
    is_grey_b = torch.rand(num_images, generator=generator) < grey
    factors_b3[is_grey_b, 2] = 0
    return factors_b3


def change_colours(images: Tensor, factors_b3: Tensor) -> Tensor:
    """Images (B, 3, H, W) in 0..255 with their brightness, contrast and saturation multiplied, in this order."""
    brightness, contrast, saturation = factors_b3.T[..., None, None, None]
    changed = (images / 255 * brightness).clamp(0, 1)
    changed = torch.lerp(luma(changed).mean((1, 2, 3), keepdim=True), changed, contrast).clamp(0, 1)
    return torch.lerp(luma(changed), changed, saturation).clamp(0, 1) * 255


def luma(images: Tensor) -> Tensor:
    """The grey of images (B, 3, H, W), with torchvision's weights: (B, 1, H, W)."""
    red, green, blue = images.unbind(1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue)[:, None]


def draw_boxes(num_images: int, generator: torch.Generator) -> Tensor:
    """Rectangles of CutMix, float32 (B, 4) of top, left, bottom, right as shares of the side.

    They have the shape of the image. The area is uniform in 0..1, which is CutMix's Beta(1, 1), and so is the centre;
    what lies outside the image is cut off.
    """
    draws_b3 = torch.rand(num_images, 3, generator=generator)
    # The root, because the area is uniform and not the side.
    half_b1 = draws_b3[:, :1].sqrt() / 2
    centre_b2 = draws_b3[:, 1:]
    return torch.cat([centre_b2 - half_b1, centre_b2 + half_b1], dim=1)


def paste(images: Tensor, others: Tensor, boxes_b4: Tensor) -> Tensor:
    """`images` (B, 3, S, S) with the pixels of `others` whose centres lie in each image's box."""
    side = images.shape[-1]
    centres_s = (torch.arange(side, device=images.device) + 0.5) / side
    top_b1, left_b1, bottom_b1, right_b1 = boxes_b4[..., None].unbind(1)
    rows_bs = (centres_s >= top_b1) & (centres_s < bottom_b1)
    columns_bs = (centres_s >= left_b1) & (centres_s < right_b1)
    inside_b1ss = (rows_bs[:, :, None] & columns_bs[:, None, :])[:, None]
    return torch.where(inside_b1ss, others, images)
