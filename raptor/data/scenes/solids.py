"""Solids for `scenes`: where a ray meets a unit solid, and the normal there.

Every solid lies within [-1, 1]^3 of its own frame, axis along y. A ray is origin + t * direction. A vector is a tensor
(3, ...). Only exactly rounded operations are used, so that no result depends on the rest of a batch.
"""

from __future__ import annotations

import math

from torch import Tensor, full_like, stack, where, zeros_like

SHAPES = ("sphere", "cube", "cylinder", "cone", "torus")
CUBE_HALF = 0.8
CYLINDER_RADIUS = 0.7
CONE_SLOPE = 0.48
RING_RADIUS = 0.7
TUBE_RADIUS = 0.3
BOUNDING_RADIUS = (
    1.0,
    CUBE_HALF * math.sqrt(3),
    math.hypot(1, CYLINDER_RADIUS),
    math.hypot(1, 2 * CONE_SLOPE),
    RING_RADIUS + TUBE_RADIUS,
)
"""Radius of the sphere around the frame's origin that holds each solid, in the order of SHAPES."""
HALF_HEIGHT = (1.0, CUBE_HALF, 1.0, 1.0, TUBE_RADIUS)
"""How far each upright solid reaches below its origin."""
_NUM_TORUS_STEPS = 14
_MISS = float("inf")


def dot(a: Tensor, b: Tensor) -> Tensor:
    x, y, z = a * b
    return x + y + z


def _meet_sphere(origin: Tensor, direction: Tensor) -> Tensor:
    a = dot(direction, direction)
    b = dot(origin, direction)
    c = dot(origin, origin) - 1
    root = b * b - a * c  # a quarter of the discriminant of |origin + t direction|^2 = 1
    return where(root > 0, (-b - root.clamp_min(0).sqrt()) / a, _MISS)


def _meet_cube(origin: Tensor, direction: Tensor) -> Tensor:
    inverse = 1 / where(direction.abs() < 1e-6, 1e-6, direction)  # a ray along a face has a slope all the same
    middle = -origin * inverse
    half = CUBE_HALF * inverse.abs()
    t_near = (middle - half).amax(0)
    t_far = (middle + half).amin(0)
    return where(t_near < t_far, t_near, _MISS)


def _meet_cylinder(origin: Tensor, direction: Tensor) -> Tensor:
    ox, oy, oz = origin
    dx, dy, dz = direction
    a = (dx * dx + dz * dz).clamp_min(1e-8)
    b = ox * dx + oz * dz
    c = ox * ox + oz * oz - CYLINDER_RADIUS**2
    root = b * b - a * c  # a quarter of the discriminant, as of the sphere
    # A ray past the cylinder has a negative one: it is cut to 0 here, and left out by `on_side`.
    t_side = (-b - root.clamp_min(0).sqrt()) / a
    on_side = (root > 0) & ((oy + t_side * dy).abs() <= 1)
    # Of the two caps only the one that faces the ray can be seen.
    t_cap = (where(dy > 0, -1.0, 1.0) - oy) / where(dy.abs() < 1e-6, 1e-6, dy)
    cap_x = ox + t_cap * dx
    cap_z = oz + t_cap * dz
    on_cap = cap_x * cap_x + cap_z * cap_z <= CYLINDER_RADIUS**2
    return where(on_side, t_side, _MISS).minimum(where(on_cap, t_cap, _MISS))


def _meet_cone(origin: Tensor, direction: Tensor) -> Tensor:
    """The mantle only: a cone stands on its base and is seen from above."""
    ox, oy, oz = origin
    dx, dy, dz = direction
    # x^2 + z^2 = slope * (1 - y)^2, a double cone with its tip at y = 1: only the part with |y| <= 1 is ours.
    slope = CONE_SLOPE**2
    below = 1 - oy
    a = dx * dx + dz * dz - slope * dy * dy
    a = where(a.abs() < 1e-6, 1e-6, a)
    b = ox * dx + oz * dz + slope * below * dy
    c = ox * ox + oz * oz - slope * below * below
    root = b * b - a * c
    spread = root.clamp_min(0).sqrt()
    best = full_like(a, _MISS)
    for t in ((-b - spread) / a, (-b + spread) / a):
        best = best.minimum(where((root > 0) & ((oy + t * dy).abs() <= 1), t, _MISS))
    return best


def _meet_torus(origin: Tensor, direction: Tensor) -> Tensor:
    """Walk along the ray by the distance to the torus, from its bounding sphere on."""
    speed = dot(direction, direction).sqrt()
    t = -dot(origin, direction) / (speed * speed) - 1 / speed
    gap = zeros_like(t)
    for _ in range(_NUM_TORUS_STEPS):
        x, y, z = origin + t * direction
        ring = (x * x + z * z).sqrt() - RING_RADIUS
        gap = (ring * ring + y * y).sqrt() - TUBE_RADIUS
        t = t + gap / speed  # the gap is never more than the way to the torus, so no step goes through it
    return where(gap < 0.02, t, _MISS)


def _normal_sphere(p: Tensor) -> Tensor:
    return p


def _normal_cube(p: Tensor) -> Tensor:
    x, y, z = p.abs()
    face_x = (x >= y) & (x >= z)
    face_y = ~face_x & (y >= z)
    return p.sign() * stack([face_x, face_y, ~(face_x | face_y)])


def _normal_cylinder(p: Tensor) -> Tensor:
    x, y, z = p
    cap = y.abs() > 0.9999  # points on a cap are at 1 only up to rounding
    return stack([where(cap, 0.0, x), where(cap, y, 0.0), where(cap, 0.0, z)])


def _normal_cone(p: Tensor) -> Tensor:
    x, y, z = p
    return stack([x, CONE_SLOPE**2 * (1 - y), z])


def _normal_torus(p: Tensor) -> Tensor:
    x, y, z = p
    pull = 1 - RING_RADIUS / (x * x + z * z).sqrt().clamp_min(1e-6)
    return stack([x * pull, y, z * pull])


MEET = (_meet_sphere, _meet_cube, _meet_cylinder, _meet_cone, _meet_torus)
NORMAL = (_normal_sphere, _normal_cube, _normal_cylinder, _normal_cone, _normal_torus)
