from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import noise_images, shake
from torch import Tensor

from raptor.dynamics.interventions import InterventionsFile
from raptor.dynamics.repetition import (
    Extrapolation,
    Repetition,
    measure_extrapolation,
    measure_repetition,
    repetition_plan,
)
from raptor.dynamics.swaps import Swaps, measure_swaps, swap_plan
from raptor.streaming import Spread
from raptor.surrogate.surrogate import make_surrogate, shared_blocks
from raptor.vit.trajectory import swap_blocks
from raptor.vit.view import ViT

NUM = 6
RESULTS = Path(__file__).parents[2] / "docs" / "results" / "dynamics"


def angle_by_hand(x: Tensor, y: Tensor) -> Tensor:
    """Mean angle over tokens and images, in float64."""
    return torch.arccos(torch.nn.functional.cosine_similarity(x.double(), y.double(), dim=-1).clamp(-1, 1)).mean()


def chained(vit: ViT, images: Tensor, layers: list[int]) -> Tensor:
    """The last state when the blocks `layers` run one after the other."""
    with torch.no_grad():
        x, context = vit.embed(images)
        for layer in layers:
            x = vit.step(layer, x, context)
    return x


@pytest.mark.parametrize("name", ["teacher", "rotary"])
def test_swaps_equal_the_model_with_its_blocks_exchanged(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raptor.dynamics.effects.HARDLY_VARIED", 1.0)  # a random head may always say the same
    vit: ViT = request.getfixturevalue(name)
    images = noise_images(vit, NUM)
    swaps = measure_swaps(vit, images, (2, 2))
    assert swaps.pairs == [(1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4)]
    each = []
    with torch.no_grad():
        states, logits = vit.record(images)
        for p, (i, j) in enumerate(swaps.pairs):
            with swap_blocks(vit, i, j):
                swapped, changed = vit.record(images)
            expected = angle_by_hand(swapped[-1], states[-1])
            each.append([angle_by_hand(a, b) for a, b in zip(swapped[-1], states[-1])])
            np.testing.assert_allclose(swaps.angle["all"].mean[p], expected, rtol=1e-4)
            kept = (changed.argmax(-1) == logits.argmax(-1)).float().mean()
            assert swaps.agreement is not None and swaps.agreement.mean[p] == pytest.approx(kept.item())
    # At distance 1 the pairs (1, 2) and (3, 4) are within, (2, 3) across; without block 1 only (3, 4) is within.
    turn = np.array(each)
    by_hand = [turn[3] - (turn[0] + turn[5]) / 2, turn[3] - turn[5]]
    np.testing.assert_allclose(swaps.matched_std["turn"], [d.std(ddof=1) for d in by_hand], rtol=1e-3)
    saved = json.loads(json.dumps(swaps.to_dict(), allow_nan=False))
    assert Swaps.from_dict(saved).to_dict() == saved


def test_autonomous_surrogate_bears_swaps_within_a_phase(teacher: ViT) -> None:
    surrogate = make_surrogate(teacher, (2, 2), conditioning="none")
    swaps = measure_swaps(surrogate, noise_images(teacher, NUM), (2, 2))
    turn = swaps.compare(swaps.angle["all"].mean)
    assert turn["within"] == 0 and turn["across"] > 0.01
    assert "0.00 rad within a phase" in swaps.finding()


@pytest.mark.parametrize(("lengths", "said"), [((3,), "within a phase"), ((1, 1, 1), "across phases")])
def test_a_kind_of_swap_that_does_not_exist_is_left_out(lengths: tuple[int, ...], said: str) -> None:
    values = np.array([0.1, 0.2, 0.3])
    spread = Spread(values, values, None, 1)
    swaps = Swaps([(1, 2), (1, 3), (2, 3)], list(lengths), {"all": spread}, spread, 1)
    assert swaps.finding() == f"Swapping two blocks turns the last state by 0.20 rad {said}; 20% of predictions stay."


def test_within_and_across_by_hand() -> None:
    """Blocks 1 2 | 3 4 5: pairs within are 12, 34, 45, 35; both kinds exist at distances 1 and 2."""
    pairs = [(i, j) for i in range(1, 6) for j in range(i + 1, 6)]
    values = np.array([10 * i + j for i, j in pairs], dtype=float)
    swaps = Swaps(pairs, [2, 3], {"all": Spread(values, values, None, 1)}, None, 1)
    compared = swaps.compare(values)
    assert compared["within"] == pytest.approx((12 + 34 + 45 + 35) / 4)
    assert compared["across"] == pytest.approx((13 + 14 + 15 + 23 + 24 + 25) / 6)
    assert compared["within_matched"] == pytest.approx(((12 + 34 + 45) / 3 + 35) / 2)
    assert compared["across_matched"] == pytest.approx((23 + (13 + 24) / 2) / 2)
    matrix = swaps.matrix(values)
    assert matrix[1, 3] == matrix[3, 1] == 24 and np.isnan(matrix[2, 2])


def test_plans(teacher: ViT) -> None:
    assert swap_plan(2, 4, 5) == [(4, 2), (3, 3), (2, 4), (5, 5)]
    blocks = {count: [b for b, _ in repetition_plan(teacher, (2, 4), count)] for count in (2, 3, 4, 6)}
    assert blocks == {2: [2, 3], 3: [2, 3, 4], 4: [2, 3, 4, 4], 6: [2, 3, 4, 2, 3, 4]}
    surrogate = make_surrogate(teacher, (1, 3))
    assert [b for b, _ in repetition_plan(surrogate, (2, 4), 6)] == [2, 3, 4, 4, 4, 4]


def test_repetition_equals_blocks_run_by_hand(teacher: ViT) -> None:
    images = noise_images(teacher, NUM)
    found = measure_repetition(teacher, images, (1, 3))
    assert found.counts == [[0, 1, 2], [2, 3, 4, 6]]
    clean = chained(teacher, images, [1, 2, 3, 4])
    by_hand = {
        (0, 0): [2, 3, 4],
        (0, 2): [1, 1, 2, 3, 4],
        (1, 2): [1, 2, 3],
        (1, 4): [1, 2, 3, 4, 4],
        (1, 6): [1, 2, 3, 4, 2, 3, 4],
    }
    for (phase, count), layers in by_hand.items():
        expected = angle_by_hand(chained(teacher, images, layers), clean)
        assert found.turn(phase, count) == pytest.approx(expected.item(), rel=1e-4)
    assert found.turn(0, 1) < 1e-5 and found.turn(1, 3) < 1e-5
    exit_turn = angle_by_hand(chained(teacher, images, [1, 1]), chained(teacher, images, [1]))
    assert found.exit_angle[0]["all"].mean[2] == pytest.approx(exit_turn.item(), rel=1e-4)
    saved = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert Repetition.from_dict(saved).to_dict() == saved


@pytest.mark.parametrize("conditioning", ["table", "mlp", "none"])
def test_extrapolation_runs_the_last_tied_block_at_deeper_depths(teacher: ViT, conditioning: str) -> None:
    surrogate = make_surrogate(teacher, (2, 2), conditioning=conditioning)
    shake(shared_blocks(surrogate), size=0.05)
    images = noise_images(teacher, NUM)
    found = measure_extrapolation(surrogate, images, num_extra=3)
    tied = shared_blocks(surrogate)[-1]
    with torch.no_grad():
        states, _ = surrogate.record(images)
        x = states[-1]
        for m in range(1, 4):
            # a table of the layers 3..4 has no row 5: it holds the row of 4
            depth = 4 if conditioning == "table" else 4 + m
            now = tied(x, torch.tensor(float(depth)))
            expected = angle_by_hand(now, x)
            assert found.speed["all"].mean[m - 1] == pytest.approx(expected.item(), rel=1e-3)
            assert found.angle["all"].mean[m] == pytest.approx(angle_by_hand(now, states[-1]).item(), rel=1e-3)
            assert found.norm["all"].mean[m] == pytest.approx(now.norm(dim=-1).mean().item(), rel=1e-5)
            x = now
    assert found.layers == [4, 5, 6, 7] and "extrapolation" in found.finding()
    saved = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert Extrapolation.from_dict(saved).to_dict() == saved


def test_a_given_head_decides_and_none_leaves_agreement_out(teacher: ViT) -> None:
    images = noise_images(teacher, NUM)
    varied = measure_swaps(teacher, images, (2, 2), predict=lambda x: torch.eye(3)[torch.arange(len(x)) % 2])
    assert varied.agreement is not None and (varied.agreement.mean == 1).all() and "predictions" in varied.finding()
    constant = measure_swaps(teacher, images, (2, 2), predict=lambda x: torch.eye(3)[torch.zeros(len(x)).long()])
    assert constant.agreement is None and "predictions" not in constant.finding()  # they stay because they never vary
    teacher.num_classes = 0
    without = measure_repetition(teacher, images, (2, 2))
    assert without.agreement is None and "predictions" not in without.finding()
    assert measure_swaps(teacher, images, (2, 2)).agreement is None


def test_bad_input(teacher: ViT) -> None:
    images = noise_images(teacher, 2)
    with pytest.raises(ValueError, match="do not sum to the 4 blocks"):
        measure_swaps(teacher, images, (2, 3))
    with pytest.raises(ValueError, match="not a surrogate"):
        measure_extrapolation(teacher, images)
    with pytest.raises(ValueError, match="at least one extra step"):
        measure_extrapolation(make_surrogate(teacher, (2, 2)), images, num_extra=0)


def test_committed_results_are_read_and_written_unchanged() -> None:
    path = RESULTS / "dinov2s-k3-interventions.json"
    found = InterventionsFile.read_file(path)
    saved, written = json.loads(path.read_text()), found.to_dict()
    for side in ("teacher", "surrogate"):
        assert written[side] == saved[side]
    assert found.findings == [f"{side}: {line}" for side, parts in found.sides().items() for line in parts.findings()]
