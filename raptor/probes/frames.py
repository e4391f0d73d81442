"""The geometry of dense frames: cropped and flipped with their targets, padded to whole patches, and back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from raptor.data.augment import draw_crops

_CROP_UNITS = 2**16


class Side:
    """One side of an image, padded at both ends to whole patches; `target` is its length in the target frame.

    start: where the image begins in the padded side, because the padding is centred.
    """

    def __init__(self, length: int, patch: int, target: int) -> None:
        self.length = length
        self.patch = patch
        self.target = target
        self.num_patches = -(-length // patch)
        self.padded = self.num_patches * patch
        self.start = (self.padded - length) // 2

    def to_image(self, scale: int = 1) -> Tensor:
        """The matrix (length, scale x patches): upsample, then unpad."""
        return bilinear(self.num_patches * scale, self.padded)[self.start : self.start + self.length]

    def to_target(self, scale: int = 1) -> Tensor:
        """As `to_image`, then resized to the target frame."""
        to_image = self.to_image(scale)
        if self.target == self.length:
            return to_image
        return bilinear(self.length, self.target) @ to_image

    def cells(self) -> tuple[Tensor, Tensor]:
        """Where the pixels of the image lie between patch centres, as (starts, shares).

        Cell i has the pixels from `starts[i]` to `starts[i + 1]`, which blend patch i - 1 and i; the share of patch i
        is 1 before the first centre and 0 after the last, so that no patch outside the grid has a share.
        """
        pixels = torch.arange(self.start, self.start + self.length, dtype=torch.float64)
        places = (pixels + 0.5) / self.patch + 0.5
        cells = places.floor()
        # Before the first centre and after the last one, bilinear resizing repeats the patch at the edge.
        shares = torch.where(cells == 0, 1.0, torch.where(cells == self.num_patches, 0.0, places - cells))
        starts = torch.searchsorted(cells, torch.arange(self.num_patches + 2, dtype=torch.float64))
        return starts.int(), shares.float()

    def cell_centres(self, scale: int) -> Tensor:
        """Where the cells of a grid `scale` times as fine lie, as shares of the image; outside 0..1 in the padding."""
        centres = (torch.arange(self.num_patches * scale) + 0.5) * self.patch / scale
        return (centres - self.start) / self.length


class Geometry:
    """From an image of (height, width), padded on all sides to whole patches, to a grid and back to a target frame.

    sides: rows and columns. grid: patches along height and width. padded: the padded frame. start: row and column in
    the padded frame at which the image begins.
    """

    def __init__(self, height: int, width: int, patch: int, target: tuple[int, int]) -> None:
        rows = Side(height, patch, target[0])
        columns = Side(width, patch, target[1])
        self.patch = patch
        self.sides = (rows, columns)
        self.grid = (rows.num_patches, columns.num_patches)
        self.padded = (rows.padded, columns.padded)
        self.start = (rows.start, columns.start)

    def pad(self, images: Tensor) -> Tensor:
        """(B, 3, height, width) to (B, 3, *padded) with zeros."""
        rows, columns = self.sides
        bottom = rows.padded - rows.length - rows.start
        right = columns.padded - columns.length - columns.start
        return F.pad(images, (columns.start, right, rows.start, bottom))


def bilinear(num_in: int, num_out: int) -> Tensor:
    """The matrix (num_out, num_in) of bilinear resizing along one side, half-pixel centres."""
    # Of torch itself, so that the matrix has its rule at the edges.
    return F.interpolate(torch.eye(num_in)[None], size=num_out, mode="linear", align_corners=False)[0].T.contiguous()


def resize(x_bhwc: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """(B, h, w, C) to (B, H, W, C) by two matrix products; equal to bilinear resizing, and so is its gradient."""
    num, height, width, channels = x_bhwc.shape
    # The gradient is the same two products with both matrices transposed.
    tall = (rows @ x_bhwc.reshape(num, height, -1)).view(num, -1, width, channels)
    return columns @ tall


def draw_boxes(num_images: int, generator: torch.Generator, scale: tuple[float, float]) -> Tensor:
    """Random resized crops as shares of the frame: (B, 5) of top, left, height, width, flip."""
    # `draw_crops` draws whole pixels; of a frame this large they are shares.
    boxes = draw_crops(num_images, _CROP_UNITS, generator, scale).float()
    return torch.cat([boxes[:, :4] / _CROP_UNITS, boxes[:, 4:]], dim=1)


def pixel_centres(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Centres of rows and columns as shares of a frame."""
    return (torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width


def on_device(pair: Iterable[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = pair
    return rows.to(device), columns.to(device)


def crop_images(images_u8: Tensor, boxes: Tensor) -> Tensor:
    """Each image's box resized to the image's own size: (B, 3, H, W) to float32 in 0..255."""
    height, width = images_u8.shape[-2:]
    rows_bh, columns_bw = _sources(boxes, *on_device(pixel_centres(height, width), boxes.device))
    y_bhw = (2 * rows_bh - 1)[:, :, None].expand(-1, -1, width)
    x_bhw = (2 * columns_bw - 1)[:, None, :].expand(-1, height, -1)
    # `grid_sample` wants x before y, both in -1..1.
    places = torch.stack([x_bhw, y_bhw], dim=-1)
    # Half a pixel of a box at the edge lies outside the frame, where zeros would darken it.
    return F.grid_sample(images_u8.float(), places, mode="bilinear", padding_mode="border", align_corners=False)


def crop_targets(targets: Tensor, boxes: Tensor, rows: Tensor, columns: Tensor, outside: float) -> Tensor:
    """Targets (B, H, W) of each box at places (shares of the box), by nearest neighbour: (B, rows, columns).

    Places out of 0..1 lie in the padding and give `outside`.
    """
    num, height, width = targets.shape
    rows_bh, columns_bw = _sources(boxes, rows, columns)
    y_bh = (rows_bh * height).floor().clamp(0, height - 1).long()
    x_bw = (columns_bw * width).floor().clamp(0, width - 1).long()
    # Labels and depths are never blended: between two classes there is no third one.
    images_b = torch.arange(num, device=targets.device)
    taken = targets[images_b[:, None, None], y_bh[:, :, None], x_bw[:, None, :]]
    inside = ((rows >= 0) & (rows < 1))[:, None] & ((columns >= 0) & (columns < 1))[None, :]
    return taken.masked_fill(~inside, outside)


def _sources(boxes: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns in the frame, as shares of it, of places that are shares of each box."""
    top, left, height, width, flip = boxes.unbind(dim=1)
    columns_bw = torch.where(flip[:, None] > 0, 1 - columns[None], columns[None])
    return top[:, None] + height[:, None] * rows[None], left[:, None] + width[:, None] * columns_bw
