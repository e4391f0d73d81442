"""Kinds of paths against maps whose behaviour is known, and a surrogate's blocks iterated by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from tiny_models import noise_images, shake
from tiny_tangents import in_batches
from torch import Tensor

from raptor.dynamics.fixed_points import KINDS, Continuation, FixedPointsResult, measure_fixed_points
from raptor.surrogate.surrogate import make_surrogate, shared_blocks
from raptor.vit.view import ViT

NUM_EXTRA = 32


def plane(theta: Tensor) -> Tensor:
    """Unit vectors `(B, 1, 2)` at the angles `(B,)`."""
    return torch.stack([torch.cos(theta), torch.sin(theta)], -1)[:, None]


def angle_of(x: Tensor) -> Tensor:
    return torch.atan2(x[..., 1], x[..., 0])[:, 0]


def turned(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: plane(angle_of(x) + by)


def kinds_of(advance: Callable[[Tensor], Tensor], start: Tensor, twin_decay: float | None = None) -> dict[str, float]:
    def path(x: Tensor) -> Iterator[Tensor]:
        for _ in range(NUM_EXTRA):
            x = advance(x)
            yield x

    continuation = Continuation(NUM_EXTRA, twin_decay)
    continuation.update(start, path(start), lambda x: x)
    found = continuation.result(1, "held")
    assert set(found.share) == set(KINDS) and sum(found.share.values()) == pytest.approx(1)
    return {kind: share for kind, share in found.share.items() if share}


START = plane(torch.tensor([0.3, 1.0], dtype=torch.float64))
CENTRE = plane(torch.tensor([2.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("kind", "advance"),
    [
        ("settled", lambda x: CENTRE + 0.5 * (x - CENTRE)),
        ("settled", lambda x: x),
        ("periodic", turned(2 * math.pi / 6)),
        ("periodic", turned(math.pi)),
        ("drifting", turned(0.1)),  # comes back after 63 steps, which are not seen
        ("drifting", turned(1.0 / math.e)),
        ("diverging", lambda x: plane(1.03 * angle_of(x))),  # the turn grows with the angle
        ("diverging", lambda x: x * 1e150),  # not a number after three steps
    ],
)
def test_known_maps_have_their_kind(kind: str, advance: Callable[[Tensor], Tensor]) -> None:
    assert kinds_of(advance, START) == {kind: 1.0}


def test_a_growing_norm_settles_only_without_its_twin() -> None:
    """A residual stream that adds the same vector at each step turns ever less, trained or not."""
    added = plane(torch.tensor([1.5], dtype=torch.float64))
    assert kinds_of(lambda x: x + added, START) == {"settled": 1.0}
    continuation = Continuation(NUM_EXTRA)
    continuation.update(START, (START + n * added for n in range(1, NUM_EXTRA + 1)), lambda x: x)
    decay = float(continuation.result(1, "held").decay.mean)
    assert kinds_of(lambda x: x + added, START, twin_decay=decay) == {"drifting": 1.0}
    assert kinds_of(lambda x: CENTRE + 0.5 * (x - CENTRE), START, twin_decay=decay) == {"settled": 1.0}


@pytest.mark.parametrize("conditioning", ["table", "mlp"])
def test_a_surrogate_is_iterated_past_its_phases(teacher: ViT, conditioning: str) -> None:
    surrogate = make_surrogate(teacher, (1, 3), conditioning=conditioning)
    shake(shared_blocks(surrogate), size=0.05)
    images = noise_images(surrogate, 3)
    found = measure_fixed_points(surrogate, in_batches(images), num_extra=8)
    assert [c.depth for c in found.continuations] == ["held", "continuing"][: 1 + (conditioning == "mlp")] * 2
    with torch.no_grad():
        states, _ = surrogate.record(images)
        for phase, last in ((1, 1), (2, 4)):
            for depth in ("held", "continuing") if conditioning == "mlp" else ("held",):
                x = states[last]
                for extra in range(8):
                    layer = last + 1 + extra if depth == "continuing" else last
                    now = shared_blocks(surrogate)[phase - 1](x, torch.tensor(float(layer)))
                    cosine = torch.nn.functional.cosine_similarity(
                        surrogate.norm(now).double(), surrogate.norm(x).double(), dim=-1
                    )
                    expected = float(torch.arccos(cosine.clamp(-1, 1)).mean())
                    assert found.of(phase, depth).turn.mean[extra] == pytest.approx(expected, rel=1e-3, abs=1e-4)
                    norm = float(now.norm(dim=-1).mean())
                    assert found.of(phase, depth).norm.mean[extra + 1] == pytest.approx(norm, rel=1e-4)
                    x = now
    saved = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    np.testing.assert_allclose(FixedPointsResult.from_dict(saved).of(2).decay.mean, found.of(2).decay.mean)


def test_bad_input(teacher: ViT) -> None:
    surrogate = make_surrogate(teacher, (2, 2))
    batches = in_batches(noise_images(surrogate, 1))
    with pytest.raises(ValueError, match="not a surrogate"):
        measure_fixed_points(teacher, batches)
    with pytest.raises(ValueError, match="at least eight"):
        measure_fixed_points(surrogate, batches, num_extra=4)
    other = measure_fixed_points(make_surrogate(teacher, (1, 3)), batches, num_extra=8)
    with pytest.raises(ValueError, match="the untrained twin has the phases"):
        measure_fixed_points(surrogate, batches, twin=other)
    with_twin = measure_fixed_points(make_surrogate(teacher, (1, 3)), batches, num_extra=8, twin=other)
    assert with_twin.has_twin and not other.has_twin
