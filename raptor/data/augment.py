"""What a training batch changes in its images beside their crops: colours, and rectangles of another image.

Numbers are drawn first, for the whole batch and on the CPU, so that every number of ranks sees the same images.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
