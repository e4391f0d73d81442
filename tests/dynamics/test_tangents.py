"""Stability of the sides beside each other: their findings by hand, the twin, and what is left out and why."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import noise_images, tiny_timm
from tiny_tangents import in_batches

from raptor.dynamics.fixed_points import FixedPointsResult, PhaseContinuation
from raptor.dynamics.jacobian import JacobianResult
from raptor.dynamics.lyapunov import LyapunovResult
from raptor.dynamics.tangents import Tangents, compare_tangents, measure_tangents
from raptor.dynamics.transplants import TransplantResult
from raptor.streaming import Spread
from raptor.surrogate.surrogate import make_surrogate, shared_blocks
from raptor.vit.open import open_vit
from raptor.vit.origin import Origin
from raptor.vit.view import ViT


@pytest.fixture(scope="module")
def two_blocks() -> ViT:
    return tiny_timm("vit_small_patch14_reg4_dinov2", reg_tokens=0, embed_dim=12, depth=2, num_classes=5)


def spread(*values: float) -> Spread:
    return Spread(np.array(values))


def test_findings_by_hand(two_blocks: ViT) -> None:
    def by_all(values: Spread) -> dict[str, Spread]:
        return {"all": values}

    step = by_all(spread(1.5, 3.0))
    jacobians = JacobianResult([1, 1], step, step, by_all(spread(1.5, 3.0)), by_all(spread(0.5, 0.75)), 0.01, 2)
    exponents = Spread(np.array([[-0.1, -0.2], [0.3, 0.1]]))
    lyapunov = LyapunovResult([1, 1], by_all(exponents), by_all(exponents), 2)
    shares = {"settled": 0.25, "periodic": 0.0, "drifting": 0.75, "diverging": 0.0}
    continuation = PhaseContinuation(1, "held", spread(0.1), spread(1.0, 1.0), spread(0.5), shares)
    fixed = FixedPointsResult([1, 1], 32, False, [continuation], 2)
    donor = Spread(np.array([[0.5, 0.25], [1.0, 0.75]]))
    random = Spread(np.array([[0.0, 0.125], [0.0, 0.0]]))
    transplants = TransplantResult([("all", 0.5), ("all", 1.0)], [0, 2], donor, donor, random, random, 8)
    found = Tangents(two_blocks.facts(), jacobians, lyapunov, fixed, transplants)
    assert found.findings() == [
        "Jacobian: a small turn grows over a phase by 1.5 (0.50), 3 (0.75) in the worst (a random) direction",
        "Lyapunov: largest exponent of each phase -0.100, +0.300 nats per step; positive ones among 2: 0, 2",
        "fixed points, 32 steps past each phase, without a twin to judge by: phase 1 25% settled and 75% drifting",
        "transplants, donor's class comes out: 50% of the tokens 50% at layer 0 and 25% at layer 2 "
        "(random 0% and 12%); 100% of the tokens 100% at layer 0 and 75% at layer 2 (random 0% and 0%)",
    ]
    saved = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert Tangents.from_dict(saved).findings() == found.findings()


def test_one_image_has_no_transplants_and_a_teacher_no_fixed_points(
    two_blocks: ViT, monkeypatch: pytest.MonkeyPatch
) -> None:
    for measure in ("measure_jacobians", "measure_lyapunov"):
        monkeypatch.setattr(f"raptor.dynamics.tangents.{measure}", lambda *_, **__: None)
    found = measure_tangents(two_blocks, in_batches(noise_images(two_blocks, 1)), (1, 1))
    assert found.fixed_points is None and found.transplants is None
    assert found.notes == [
        "no transplants: no two images of a batch have different predictions: take more images, or larger batches"
    ]


def test_a_module_of_ones_own_has_no_twin(two_blocks: ViT, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raptor.dynamics.tangents.measure_tangents", lambda vit, *_, **__: vit)
    own = replace(two_blocks, origin=Origin())
    sides, notes = compare_tangents(own, None, [], (1, 1))
    assert sides == {"teacher": own}
    assert notes == ["no untrained twin: a module of your own cannot be built anew"]


def test_the_twin_is_the_same_surrogate_with_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raptor.dynamics.tangents.measure_tangents", lambda vit, *_, twin=None, **__: (vit, twin))
    teacher = open_vit("timm/test_vit", pretrained=False, size=32)
    lengths = (1, teacher.num_layers - 1)
    surrogate = make_surrogate(teacher, lengths, block="paper", conditioning="mlp")
    sides, _ = compare_tangents(teacher, surrogate, [], lengths, seed=3)
    again, _ = compare_tangents(teacher, surrogate, [], lengths, seed=3)
    (measured, control), (twin, none) = sides["surrogate"], sides["twin"]
    assert measured is surrogate and control[0] is twin and none is None
    assert twin.origin.surrogates == surrogate.origin.surrogates
    own, random, repeated = (shared_blocks(vit).state_dict() for vit in (surrogate, twin, again["twin"][0]))
    assert all(torch.equal(random[name], repeated[name]) for name in random)
    assert any(not torch.equal(own[name], random[name]) for name in own)
