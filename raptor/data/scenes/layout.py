"""What stands where in each image of `scenes`: every number drawn by hashing (split, index, attribute).

All of it is computed on the CPU in float64 and rounded once to float32, so a layout is the same bit for bit on every
device and in every batch. World axes: x right, y up, z forward, the camera at the origin, the ground `height` below it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from raptor.data.scenes.solids import BOUNDING_RADIUS, CYLINDER_RADIUS, HALF_HEIGHT, RING_RADIUS, SHAPES, TUBE_RADIUS

MATERIALS = ("matte", "striped", "checkered", "metallic")
CLASSES = tuple(f"{material} {shape}" for shape in SHAPES for material in MATERIALS)
NUM_IMAGES = {"train": 50_000, "val": 5_000}
NUM_OBJECTS = 4
"""One main object and up to three smaller ones behind it."""
HALF_VIEW = 0.43
"""Tangent of half the camera's field of view."""
_CYLINDER = SHAPES.index("cylinder")
_TORUS = SHAPES.index("torus")


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


_GOLDEN, _MIX_1, _MIX_2 = (_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mix(x: Tensor) -> Tensor:
    """Scramble int64 values one to one (the finaliser of SplitMix64)."""
    # torch shifts signed numbers with their sign, so that the copies of the sign are masked out.
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_2
    return x ^ ((x >> 31) & (2**33 - 1))


class Dice:
    """Hashed numbers for a tensor of int64 keys: the n-th call gives every key its n-th attribute."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self.attribute = 0

    def bits(self) -> Tensor:
        self.attribute += 1
        return mix(self.keys + _signed(_GOLDEN * self.attribute))

    def uniform(self, low: float | Tensor = 0.0, high: float | Tensor = 1.0) -> Tensor:
        # 53 bits are what a float64 holds exactly, so that 1 is never reached.
        return low + ((self.bits() >> 11) & (2**53 - 1)).double() * 2.0**-53 * (high - low)

    def choice(self, num_choices: int) -> Tensor:
        return (self.uniform() * num_choices).long()


@dataclass
class Layout:
    """Images come last: (..., B) per image, (..., NUM_OBJECTS, B) per object, the main object first."""

    label: Tensor
    height: Tensor
    pitch: Tensor
    wall: Tensor
    light: Tensor
    ground_colour: Tensor
    wall_colour: Tensor
    texture: Tensor
    noise_start: Tensor
    present: Tensor
    shape: Tensor
    material: Tensor
    radius: Tensor
    centre: Tensor
    axes: Tensor
    colour: Tensor
    stripe: Tensor


def _colour_of(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """HSV to linear RGB (display gamma 2), stacked on a new first dimension."""
    channels = []
    for n in (5, 3, 1):
        k = (n + 6 * hue) % 6
        channels.append((value - value * saturation * k.minimum(4 - k).clamp(0, 1)).square())
    return torch.stack(channels)


def label_images(indices: Tensor, split: str) -> Tensor:
    """Class of the images `indices` (B,) int64 of a split: each run of 20 holds each class once, in its own order."""
    stream, indices = _stream(indices, split)
    run_key = mix(stream ^ mix(indices // len(CLASSES)))
    # Odd multipliers that 5 does not divide permute the 20 classes.
    multiplier = torch.tensor([1, 3, 7, 9, 11, 13, 17, 19])[(run_key >> 8) & 7]
    return (indices * multiplier + (run_key & 0xFFFF)) % len(CLASSES)


def _stream(indices: Tensor, split: str) -> tuple[Tensor, Tensor]:
    """The hash that all numbers of a split start from, and the places of the images in it. `all` is train, then val."""
    number = torch.tensor(int(split == "val"))
    if split == "all":
        number = (indices >= NUM_IMAGES["train"]).long()
        indices = indices - number * NUM_IMAGES["train"]
    return mix(mix(torch.tensor(_GOLDEN)) + number), indices


def lay_out(indices: Tensor, split: str) -> Layout:
    """Lay out the images `indices` (B,) int64 of a split."""
    label = label_images(indices, split)
    stream, indices = _stream(indices, split)
    dice = Dice(mix(stream + indices))
    height = dice.uniform(2.2, 3.2)
    look_at = dice.uniform(4.5, 5.3)
    azimuth = dice.uniform(0.5, 1.9)
    elevation = dice.uniform(0.65, 1.0)
    azimuth = torch.where(dice.uniform() < 0.5, azimuth, -azimuth)
    flat = elevation.cos()
    light = torch.stack([flat * azimuth.sin(), elevation.sin(), -flat * azimuth.cos()])
    ground_hue = dice.uniform()
    ground = _colour_of(ground_hue, dice.uniform(0.05, 0.42), dice.uniform(0.55, 0.9))
    wall_colour = _colour_of(ground_hue + dice.uniform(-0.3, 0.3), dice.uniform(0.05, 0.4), dice.uniform(0.55, 0.95))
    return Layout(
        label=label,
        height=height,
        pitch=torch.atan(height / look_at),
        wall=dice.uniform(8.0, 9.5),
        light=light,
        ground_colour=ground,
        wall_colour=wall_colour,
        texture=_texture(dice),
        noise_start=dice.choice(2**16),
        **_objects(dice, label, height),
    )


def _texture(dice: Dice) -> Tensor:
    """Rows: x and z steps of both texture axes, both offsets, grain, tile contrast, tile size: (9, B)."""
    turn = dice.uniform(0, math.pi)
    fine = dice.uniform(14, 40)
    stretch = dice.uniform(0, 1)
    coarse = fine / torch.where(stretch < 0.35, 9.0, 1.0)
    tiles = torch.where(dice.uniform() < 0.4, dice.uniform(0.1, 0.3), 0.0)
    return torch.stack(
        [
            fine * turn.cos(),
            fine * turn.sin(),
            -coarse * turn.sin(),
            coarse * turn.cos(),
            dice.uniform(0, 256),
            dice.uniform(0, 256),
            dice.uniform(0.15, 0.55),
            tiles,
            dice.uniform(0.7, 1.4),
        ]
    )


def _objects(image_dice: Dice, label: Tensor, height: Tensor) -> dict[str, Tensor]:
    """Draw shape, material, place and look of the main object (column 0) and of the others (NUM_OBJECTS, B)."""
    order = torch.arange(NUM_OBJECTS)[:, None]
    main = order == 0
    dice = Dice(mix(image_dice.bits() + order))
    shape = torch.where(main, label // len(MATERIALS), dice.choice(len(SHAPES)))
    material = torch.where(main, label % len(MATERIALS), dice.choice(len(MATERIALS)))
    radius = torch.where(main, dice.uniform(0.7, 1.05), dice.uniform(0.32, 0.56))
    # Every number is drawn for all objects, whether it is used or not: the n-th draw is then the same attribute.
    z = torch.where(main, dice.uniform(3.7, 4.6), 0.0)
    behind = z[:1] + radius[:1] * 1.1 + radius + dice.uniform(0.0, 1.6)
    z = torch.where(main, z, behind)
    side = dice.uniform(-1, 1)
    # The others stand in thirds of the view's width, so that they cannot meet.
    third = (order - 2 + side * 0.28) * 0.62 * HALF_VIEW * z
    x = torch.where(main, side * (HALF_VIEW * z - 0.85 * radius), third)

    lying = (shape == _CYLINDER) & (dice.uniform() < 0.4)
    torus = shape == _TORUS
    tilt = torch.where(torus, dice.uniform(0.45, 1.25), torch.where(lying, math.pi / 2, 0.0))
    turn = dice.uniform()
    yaw = torch.where(torus, (turn - 0.5) * 1.6, torch.where(lying, 0.6 + turn * (math.pi - 1.2), turn * 2 * math.pi))
    base = torch.where(torus, RING_RADIUS * tilt.sin() + TUBE_RADIUS, torch.tensor(HALF_HEIGHT).double()[shape])
    base = torch.where(lying, CYLINDER_RADIUS, base)
    c = yaw.cos()
    s = yaw.sin()
    ct = tilt.cos()
    st = tilt.sin()
    axes = torch.stack([c, 0 * c, -s, -s * st, ct, -c * st, s * ct, st, c * ct]).unflatten(0, (3, 3))

    hue = dice.uniform()
    first = _colour_of(hue, dice.uniform(0.55, 0.95), dice.uniform(0.7, 1.0))
    pale = dice.uniform() < 0.5
    second = _colour_of(
        hue + dice.uniform(0.25, 0.75), dice.uniform(0.1, 0.6), torch.where(pale, 1.0, dice.uniform(0.12, 0.3))
    )
    angle = dice.uniform(0, math.pi)
    frequency = dice.uniform(2.6, 3.4)
    across = torch.stack([angle.cos(), angle.sin(), dice.uniform(-0.35, 0.35)]) * frequency
    stripe = torch.stack([(axes[i] * across).sum(0) for i in range(3)] + [dice.uniform(0, 2), dice.uniform(1.8, 2.25)])
    return {
        "present": main | (dice.uniform() < 0.65),
        "shape": shape,
        "material": material,
        "radius": radius,
        "centre": torch.stack([x, base * radius - height, z]),
        "axes": axes,
        "colour": torch.cat([first, second]),
        "stripe": stripe,
    }


def bounding_balls(layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Right, up, depth (camera axes) and radius of a ball around each object, each (NUM_OBJECTS, B)."""
    x, y, z = layout.centre
    sin = layout.pitch.sin()
    cos = layout.pitch.cos()
    reach = torch.tensor(BOUNDING_RADIUS).double()[layout.shape] * layout.radius
    return x, y * cos + z * sin, z * cos - y * sin, reach


def bounding_box(right: Tensor, up: Tensor, depth: Tensor, reach: Tensor, size: int) -> tuple[Tensor, ...]:
    """First column, end column, first row, end row of the pixels that can show each ball, cut to the image."""
    box = []
    for offset, sign in ((right, 1), (up, -1)):
        centre = offset / depth
        # The tangents from the camera to the ball: a ball off the axis looks longer than it is.
        spread = reach / (offset.square() + depth.square() - reach.square()).sqrt()
        ends = (centre - spread) / (1 + centre * spread), (centre + spread) / (1 - centre * spread)
        first, last = ((1 + sign * end / HALF_VIEW) * size / 2 for end in ends[::sign])
        box += [first.floor().clamp(0, size).long(), last.ceil().clamp(0, size).long()]
    return tuple(box)
