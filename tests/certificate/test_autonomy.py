"""What a depth has of its own, counted by hand, and the price of doing without it."""

from __future__ import annotations

import pytest
import torch
from tiny_certified import PHASES, all_states, image_batches, tiny_vit

from raptor.certificate.autonomy import Autonomy, check_autonomous, count_conditioning, measure_autonomy
from raptor.certificate.heads import resolve_head
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.view import ViT

DIM = 24


def test_a_table_has_eight_factors_of_each_coordinate_per_depth(teacher: ViT) -> None:
    found = count_conditioning(make_surrogate(teacher, PHASES))
    assert (found.kind, found.per_depth, found.num_parameters) == ("table", 8 * DIM, 5 * 8 * DIM)
    assert not found.is_autonomous
    assert found.line().startswith(
        "not autonomous: each depth has a learned row of scales and shifts, 192 parameters; 960 in all, "
    )


def test_an_mlp_serves_all_depths_of_its_phase(teacher: ViT) -> None:
    found = count_conditioning(make_surrogate(teacher, PHASES, block="paper", conditioning="mlp"))
    mlp = 16 + 16 + 16 * 3 * DIM + 3 * DIM
    assert (found.kind, found.per_depth, found.num_parameters) == ("mlp", 0, 2 * mlp)
    assert "depth scaling by an MLP of the layer number; " in found.line()


def test_adapters_belong_to_a_depth(teacher: ViT) -> None:
    plain = make_surrogate(teacher, PHASES)
    found = count_conditioning(make_surrogate(teacher, PHASES, adapters=2))
    shapes = {"qkv": (3 * DIM, DIM), "proj": (DIM, DIM), "fc1": (4 * DIM, DIM), "fc2": (DIM, 4 * DIM)}
    own = sum(2 * (rows + columns) + rows for rows, columns in shapes.values())
    assert found.per_depth == count_conditioning(plain).per_depth + own
    assert "and adapters of rank 2" in found.line()


def test_without_conditioning_it_is_autonomous(surrogate: ViT) -> None:
    found = count_conditioning(surrogate)
    assert found.is_autonomous and found.line() == "autonomous: no depth has parameters of its own"


def test_the_price_by_brute_force() -> None:
    teacher = tiny_vit(num_classes=3)
    table = make_surrogate(teacher, PHASES)
    without = make_surrogate(teacher, PHASES, conditioning="none", copy="last")
    head, _ = resolve_head(teacher)
    found = measure_autonomy(table, without, teacher, image_batches(1), name="runs/plain", head=head, bootstrap=200)
    exact = all_states(teacher, image_batches(1))
    rows = exact[-1].flatten(0, 1)
    images = torch.cat([batch.images for batch in image_batches(1)])
    chosen = teacher(images).argmax(-1)
    for vit, side in ((table, "own"), (without, "autonomous")):
        own = all_states(vit, image_batches(1))
        relative = []
        for x, y in zip(exact[1:], own[1:]):
            relative.append(float(torch.linalg.matrix_norm(x - y).mean() / torch.linalg.matrix_norm(x).mean()))
        r2 = 1 - float((exact[-1] - own[-1]).square().sum() / (rows - rows.mean(0)).square().sum())
        agreement = (vit(images).argmax(-1) == chosen).double().mean().item()
        expected = {
            "relative_largest": max(relative),
            "relative_last": relative[-1],
            "r2_last": r2,
            "agreement": agreement,
        }
        assert {name: getattr(price, side) for name, price in found.prices.items()} == pytest.approx(expected, rel=1e-4)
    for name, price in found.prices.items():
        sign = 1 if name.startswith("relative") else -1
        assert price.loss.value == pytest.approx(sign * (price.autonomous - price.own))
        assert price.loss.lower <= price.loss.value <= price.loss.upper  # type: ignore[operator]
    assert "(runs/plain; how it was trained is not known)" in found.line()
    assert Autonomy.from_dict(found.to_dict()).to_dict() == found.to_dict()


def test_equal_surrogates_have_no_price(teacher: ViT, surrogate: ViT) -> None:
    found = measure_autonomy(surrogate, surrogate, teacher, image_batches(1), name="itself", bootstrap=50)
    for price in found.prices.values():
        assert (price.loss.value, price.loss.lower, price.loss.upper) == (0, 0, 0)


def test_only_an_autonomous_surrogate_of_the_same_phases_has_a_price(teacher: ViT, surrogate: ViT) -> None:
    with pytest.raises(ValueError, match=r"^runs/a is not autonomous: distil one with --conditioning none$"):
        check_autonomous(make_surrogate(teacher, PHASES), surrogate, "runs/a")
    other = make_surrogate(teacher, (3, 2), conditioning="none")
    with pytest.raises(ValueError, match=r"phases 3 \| 2, the surrogate 2 \| 3: distil it with --phases 2 3 --cond"):
        check_autonomous(other, surrogate, "runs/a")
