"""`scenes`: small drawn images, each with its class, its segmentation mask and its depth map.

A main object and up to three smaller ones stand on a textured ground before a wall. The class of an image is the
material and the shape of its main object, the nearest one. Image i of a split depends only on (split, i).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from raptor.data.scenes.layout import (
    HALF_VIEW,
    MATERIALS,
    NUM_OBJECTS,
    Dice,
    Layout,
    bounding_balls,
    bounding_box,
    lay_out,
)
from raptor.data.scenes.solids import MEET, NORMAL, SHAPES, dot

MASK_CLASSES = ("background", *SHAPES)
DEFAULT_SIZE = 48
_STRIPED, _CHECKERED, _METALLIC = (MATERIALS.index(name) for name in ("striped", "checkered", "metallic"))
TILE = 4
"""Objects are drawn in tiles of TILE x TILE pixels."""
_SAMPLES = ((0.25, 0.3), (0.75, 0.7))
"""Where in a pixel objects are sampled: (across, down)."""
CHUNK_PIXELS = {"cpu": 2**18, "cuda": 2**23}
_LIGHT_UNIT = 2**16


class SceneBatch(NamedTuple):
    """images uint8 (B, 3, S, S), labels int64 (B,), masks uint8 (B, S, S), depths float32 (B, S, S) in metres."""

    images: Tensor
    labels: Tensor
    masks: Tensor
    depths: Tensor


def draw_scenes(
    indices: Tensor, size: int = DEFAULT_SIZE, split: str = "train", device: str | torch.device = "cpu"
) -> SceneBatch:
    """Draw the images `indices` (B,) int64 of a split, in chunks that bound memory; see SceneBatch for the result."""
    if not 16 <= size <= 1024:
        raise ValueError(f"scenes are drawn at 16 to 1024 pixels, not {size}")
    device = torch.device(device)
    indices = torch.as_tensor(indices, dtype=torch.int64).cpu()
    chunk = max(1, CHUNK_PIXELS["cpu" if device.type == "cpu" else "cuda"] // size**2)
    with torch.no_grad():
        parts = [_draw(lay_out(group, split), size, device) for group in indices.split(chunk)]
    return SceneBatch(*(torch.cat(fields) for fields in zip(*parts)))


def _draw(layout: Layout, size: int, device: torch.device) -> SceneBatch:
    """Draw the background once per pixel, the objects at _SAMPLES."""
    grid = -(-size // TILE) * TILE
    background, distance = _draw_background(layout, size, device)
    depth, mask, num_covered, light = (field[..., :size, :size] for field in _draw_objects(layout, size, grid, device))

    # A pixel shows the background in the share of its samples that no object covers.
    images = background * (1 - num_covered / len(_SAMPLES)) + light
    solid = num_covered * 2 >= len(_SAMPLES)
    return SceneBatch(
        _expose(images, layout.noise_start.to(device)),
        layout.label.to(device),
        torch.where(solid, mask, 0),
        torch.where(solid, depth.minimum(distance), distance),
    )


def _expose(linear: Tensor, noise_start: Tensor) -> Tensor:
    """Linear light (3, B, S, S) to uint8 (B, 3, S, S): a little sensor noise, then gamma 2."""
    _, num_images, size, _ = linear.shape
    step = torch.arange(size * size, device=linear.device) * 3
    pixel = ((noise_start[:, None] + step) & 0xFFFF).view(num_images, size, size)
    grain = torch.stack([_noise_tiles(linear.device)[1].take((pixel + c) & 0xFFFF) for c in range(3)])
    shown = linear.clamp(0, 1).sqrt() + 0.03 * (grain - 0.5)
    return (shown.clamp(0, 1) * 255 + 0.5).to(torch.uint8).transpose(0, 1).contiguous()


@lru_cache
def _noise_tiles(device: torch.device) -> tuple[Tensor, Tensor]:
    """Two flat 256 x 256 tiles in [0, 1]: smooth periodic noise for surfaces, white noise for the sensor."""
    white = Dice(torch.arange(2**16)).uniform().view(256, 256)
    smooth = torch.zeros(256, 256, dtype=torch.float64)
    for octave, weight in ((4, 0.4), (8, 0.35), (32, 0.25)):
        smooth += weight * _interpolate(white[::octave, ::octave][: 256 // octave, : 256 // octave], octave)
    smooth = ((smooth - smooth.mean()) * 2 + 0.5).clamp(0, 1)
    return smooth.float().flatten().to(device), white.float().flatten().to(device)


def _interpolate(lattice: Tensor, step: int) -> Tensor:
    """Periodic bilinear interpolation of a square lattice to `step` times its size."""
    share = torch.arange(step, dtype=torch.float64) / step
    for _ in range(2):
        lattice = torch.lerp(lattice[:, None], lattice.roll(-1, 0)[:, None], share[:, None]).flatten(0, 1).T
    return lattice


def _per_pixel(values: Tensor, device: torch.device) -> Tensor:
    """Values (..., B), one per image, to be combined with those of pixels (..., B, S, S)."""
    return values.float().to(device)[..., None, None]


def _draw_background(layout: Layout, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ground and wall with the objects' shadows: linear light (3, B, S, S) and distance (B, S, S)."""
    u = ((2 * torch.arange(size, device=device) + 1) / size - 1) * HALF_VIEW
    v = -u[:, None]
    sin = _per_pixel(layout.pitch.sin(), device)
    cos = _per_pixel(layout.pitch.cos(), device)
    down = sin - v * cos
    forward = cos + v * sin
    t_ground = _per_pixel(layout.height, device) / down.clamp_min(1e-3)
    t_wall = _per_pixel(layout.wall, device) / forward
    on_wall = t_wall < t_ground
    t = t_wall.minimum(t_ground)
    x = t * u
    y = -t * down
    z = t * forward
    # Depth is the way to the point, not its z: as a range sensor measures it.
    distance = t * (1 + u * u + v * v).sqrt()

    xu, zu, xv, zv, u0, v0, grain, tiles, tile = _per_pixel(layout.texture, device)
    depth_axis = torch.where(on_wall, z + y, z)
    column = x * xu + (depth_axis * zu + u0)
    row = x * xv + (depth_axis * zv + v0)
    # The noise tile is 256 wide and periodic, so that its low byte is the place in it.
    cell = (column.floor().int() & 255) * 256 + (row.floor().int() & 255)
    fade = torch.where(on_wall, 0.25, (5 / z).clamp(0.3, 1))
    surface = 1 + (_noise_tiles(device)[0].take(cell.long()) - 0.5) * (2 * grain * fade)
    odd = ((x / tile).floor() + (depth_axis / tile).floor()) % 2
    surface = surface * (1 - odd * torch.where(on_wall, 0.0, tiles))

    haze = ((z / _per_pixel(layout.wall, device)) - 0.55).clamp(0, 1)
    on_the_wall = 0.75 + 0.2 * (y + _per_pixel(layout.height, device))
    on_the_ground = 0.55 + 0.45 * _per_pixel(layout.light[1], device)  # brighter the higher the sun stands
    glow = torch.where(on_wall, on_the_wall, on_the_ground)
    shade = surface * glow * _shadow(layout, x, y, z)
    ground = _per_pixel(layout.ground_colour, device)
    wall = _per_pixel(layout.wall_colour, device)
    tint = torch.where(on_wall, wall, ground + (wall - ground) * haze)
    return tint * shade, distance


def _shadow(layout: Layout, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Share of light left at points of the background (B, S, S): objects cast soft shadows and darken their foot."""
    device = x.device
    lx, ly, lz = _per_pixel(layout.light, device)
    light = torch.ones_like(x)
    for k in range(NUM_OBJECTS):
        cx, cy, cz = _per_pixel(layout.centre[:, k], device)
        present = _per_pixel(layout.present[k], device)
        radius = _per_pixel(layout.radius[k], device) * 0.92
        px = x - cx
        py = y - cy
        pz = z - cz
        away = px * px + (py * py + pz * pz)
        toward = px * lx + (py * ly + pz * lz)
        # Squared distance of the point from the line through the centre towards the light, in radii of the ball.
        inverse = 1 / (radius * radius)
        dark = ((1.45 - (away - toward * toward) * inverse) * 0.9).clamp(0, 1) * (toward * -4).clamp(0, 1)
        foot = (radius * radius * 1.1 / away).clamp(0, 1)
        light = light * (1 - present * (0.62 * dark)) * (1 - present * (0.5 * foot * foot))
    return light


def _draw_objects(layout: Layout, size: int, grid: int, device: torch.device) -> tuple[Tensor, ...]:
    """The objects: distance, mask, number of samples covered (B, grid, grid) and linear light (3, B, grid, grid)."""
    num_images = len(layout.label)
    # Objects in order of shape: the tiles of a shape are then one slice, which one formula serves.
    chosen = layout.present.flatten().nonzero()[:, 0]
    chosen = chosen[layout.shape.flatten()[chosen].argsort(stable=True)]
    owner, tile_column, tile_row = _tiles(layout, size, chosen)
    shape_of_tile = layout.shape.flatten()[chosen][owner]
    num_tiles = torch.bincount(shape_of_tile, minlength=len(SHAPES)).cumsum(0).tolist()
    slices = [slice(start, end) for start, end in zip([0, *num_tiles], num_tiles)]
    first_pixel = ((chosen % num_images)[owner] * grid + tile_row) * grid + tile_column

    # From here on with one row per tile: all tiles of a chunk are drawn by the same few operations.
    table = _object_table(layout, chosen)[:, owner, None].to(device)
    cells = torch.arange(TILE, device=device)
    row = cells.repeat_interleave(TILE)
    column = cells.repeat(TILE)
    layers = torch.arange(len(_SAMPLES), device=device)[:, None] * (num_images * grid * grid)
    sample = first_pixel.to(device)[:, None] + (layers + (row * grid + column)).flatten()
    pixel = 2 * HALF_VIEW / size
    du = torch.cat([(column + across) * pixel for across, _ in _SAMPLES])
    dv = torch.cat([(row + down) * -pixel for _, down in _SAMPLES])
    u0 = (tile_column * pixel - HALF_VIEW).to(device, torch.float32)[:, None]
    v0 = (HALF_VIEW - tile_row * pixel).to(device, torch.float32)[:, None]
    u = u0 + du
    v = v0 + dv

    origin = table[:3]
    right = table[6:9]
    up = table[9:12]
    ray = table[3:6] + u0 * right + v0 * up + du * right + dv * up
    t = torch.cat([meet(origin[:, part], ray[:, part]) for meet, part in zip(MEET, slices)])
    distance = t * (1 + u * u + v * v).sqrt()
    # The nearest object at each sample, whatever the order of the tiles.
    nearest = torch.full((len(_SAMPLES) * num_images * grid * grid,), torch.inf, device=device)
    nearest.scatter_reduce_(0, sample.flatten(), distance.flatten(), "amin")

    seen = ((distance < torch.inf) & (distance == nearest[sample])).float()
    at = origin + torch.where(t < torch.inf, t, 0) * ray
    normal = torch.cat([normal(at[:, part]) for normal, part in zip(NORMAL, slices)], dim=1)

    # From here on per pixel. Sums are of integers, so that their order does not matter.
    place = sample[:, : TILE * TILE]
    depth = nearest.view(len(_SAMPLES), -1).amin(0)
    own = distance.unflatten(1, (len(_SAMPLES), -1)).amin(1)
    front = (own < torch.inf) & (own == depth[place])
    mask = torch.zeros_like(depth, dtype=torch.uint8)
    mask[place[front]] = (shape_of_tile + 1).to(device, torch.uint8)[:, None].expand_as(front)[front]
    num_covered = torch.zeros_like(depth, dtype=torch.int32)
    num_covered.index_add_(0, place.flatten(), _sum_samples(seen).int().flatten())
    light = torch.zeros(3, len(depth), dtype=torch.int32, device=device)
    metallic = (layout.material.flatten()[chosen][owner] == _METALLIC).to(device)
    for shade, tiles in ((_shade_metal, metallic), (_shade_matte, ~metallic)):
        tile = (seen.amax(1) * tiles).nonzero()[:, 0]
        share = seen[tile] * (_LIGHT_UNIT / len(_SAMPLES))
        values = shade(table[12:, tile], at[:, tile], _unit(normal[:, tile]), ray[:, tile])
        for channel, value in zip(light, values):
            channel.index_add_(0, place[tile].flatten(), _sum_samples(value * share).int().flatten())
    shape = (num_images, grid, grid)
    return depth.view(shape), mask.view(shape), num_covered.view(shape), light.view(3, *shape) * (1 / _LIGHT_UNIT)


def _sum_samples(values: Tensor) -> Tensor:
    """Add the samples of each pixel: (T, len(_SAMPLES) * TILE * TILE) to (T, TILE * TILE)."""
    first, *others = values.unflatten(1, (len(_SAMPLES), -1)).unbind(1)
    for other in others:
        first = first + other
    return first


def _tiles(layout: Layout, size: int, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tiles that can show each chosen object: its place in `chosen`, first column and first row, each (T,)."""
    ball = [values.flatten()[chosen] for values in bounding_balls(layout)]
    left, right, top, bottom = bounding_box(ball[0], ball[1], ball[2], ball[3], size)
    left = left // TILE
    top = top // TILE
    across = (right + TILE - 1) // TILE - left
    down = (bottom + TILE - 1) // TILE - top
    num_tiles = across * down
    owner = torch.repeat_interleave(num_tiles)
    local = torch.arange(len(owner)) - (num_tiles.cumsum(0) - num_tiles)[owner]
    column = (left[owner] + local % across[owner]) * TILE
    row = (top[owner] + local // across[owner]) * TILE

    # Leave out corners of the box: the ray through a tile's centre must pass the ball within reach and half a diagonal.
    x, y, z, reach = (values[owner] for values in ball)
    pixel = 2 * HALF_VIEW / size
    u = (column + TILE / 2) * pixel - HALF_VIEW
    v = HALF_VIEW - (row + TILE / 2) * pixel
    squared = x * x + y * y + z * z
    off_axis = squared - (x * u + y * v + z).square() / (1 + u * u + v * v)
    near = off_axis < (reach + squared.sqrt() * (TILE * pixel * 0.5**0.5)).square()
    return owner[near], column[near], row[near]


def _unit(a: Tensor) -> Tensor:
    """A vector (3, ...) of length 1."""
    return a * (1 / dot(a, a).sqrt().clamp_min(1e-9))


def _object_table(layout: Layout, chosen: Tensor) -> Tensor:
    """Per object, in its own frame: ray origin, direction per camera axis, light, up, stripes, colours: (rows, N)."""
    image = chosen % len(layout.label)
    e = layout.axes.flatten(2)[:, :, chosen]
    centre = layout.centre.flatten(1)[:, chosen]
    radius = layout.radius.flatten()[chosen]
    sin = layout.pitch.sin()[image]
    cos = layout.pitch.cos()[image]
    material = layout.material.flatten()[chosen]
    rows = [
        -(e * centre).sum(1) / radius,
        (e[:, 2] * cos - e[:, 1] * sin) / radius,
        e[:, 0] / radius,
        (e[:, 1] * cos + e[:, 2] * sin) / radius,
        (e * layout.light[:, image]).sum(1),
        e[:, 1],
        layout.stripe.flatten(1)[:, chosen],
        layout.colour.flatten(1)[:, chosen],
        layout.ground_colour[:, image],
        torch.stack([material == m for m in (_STRIPED, _CHECKERED, _METALLIC)]).double(),
    ]
    return torch.cat(rows).float()


def _shade_matte(table: Tensor, at: Tensor, normal: Tensor, _view: Tensor) -> Tensor:
    """Linear light (3, T, samples) of points with a plain, striped or checkered coat under sun and sky."""
    light = table[:3]
    up = table[3:6]
    stripe = table[6:9]
    phase, checks = table[9:11]
    first, second, ground = table[11:20].unflatten(0, (3, 3))
    striped, checkered = table[20:22]
    band = (dot(at, stripe) + phase).floor()
    x, y, z = (at * checks + 0.5).floor()
    pattern = (striped * band + checkered * (x + y + z)) % 2

    # Half of the sky lights what stands upright, and the ground a little from below.
    sky = 0.5 + 0.5 * dot(normal, up)
    foot = (0.75 + 0.3 * dot(at, up)).clamp(0.4, 1)
    bright = (dot(normal, light) * 0.86 + 0.1).clamp_min(0) + 0.28 * sky * foot
    bounce = 0.12 * (1 - sky) * foot
    return (first + (second - first) * pattern) * bright + bounce * ground


def _shade_metal(table: Tensor, at: Tensor, normal: Tensor, view: Tensor) -> Tensor:
    """Linear light (3, T, samples) of metal: it mirrors the sky, a lamp and the ground."""
    light = table[:3]
    up = table[3:6]
    first, _, ground = table[11:20].unflatten(0, (3, 3))
    # A slightly hammered surface turns what flat faces mirror.
    dents = ((at * 1.3 + at.roll(-1, 0) * 0.9) % 1 - 0.5).abs() * 0.36 - 0.09
    view = _unit(view)
    bent = normal + dents
    mirror = view - dot(view, bent) * 2 * bent
    rise = dot(mirror, up)
    foot = (0.7 + 0.4 * dot(at, up)).clamp(0.25, 1)
    above = (rise * 8 + 0.5).clamp(0, 1)
    lamp = (1 - (rise - 0.45).abs() * 5).clamp(0, 1)
    heaven = above * (0.3 + 0.5 * (1 - rise).clamp(0, 1) + 0.9 * lamp)
    earth = (1 - above) * (0.08 + 1.1 * (1 + rise).clamp(0, 1).square()) * foot
    glint = 1.3 * dot(mirror, light).clamp(0, 1).square().square().square().square().square()
    return (0.45 + 0.55 * first) * (heaven + earth * (0.25 + 0.75 * ground)) + glint
