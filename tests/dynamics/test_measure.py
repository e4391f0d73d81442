from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from earlier_files import kept
from tiny_models import noise_images

from raptor.data.stream import Batch
from raptor.dynamics import Basins, Direction, Modes, Rank, Stability
from raptor.dynamics.measure import DynamicsFile, DynamicsResult, measure_dynamics
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.view import ViT

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "dynamics"


def batches_of(vit: ViT, sizes: tuple[int, ...] = (5, 4, 3), labelled: bool = True) -> list[Batch]:
    images = noise_images(vit, sum(sizes))
    labels = torch.arange(len(images)) % 3
    parts = zip(images.split(sizes), labels.split(sizes), torch.arange(len(images)).split(sizes))
    return [Batch(x, y if labelled else None, i) for x, y, i in parts]


def test_one_pass_equals_each_measure_on_its_own(teacher: ViT) -> None:
    batches = batches_of(teacher)
    result = measure_dynamics(teacher, batches, num_images=12, classes=[0, 1, 2], stability_images=0, rank_images=12)
    direction, rank, modes = Direction(teacher.groups), Rank(teacher.groups, 12), Modes(teacher.groups)
    basins = Basins(teacher.groups, [0, 1, 2])
    with torch.no_grad():
        states, _ = teacher.record(torch.cat([b.images for b in batches]))
    for measure in (direction, rank, modes):
        measure.update(states)
    basins.update(states, [i % 3 for i in range(12)])
    for name in ("all", "cls", "registers", "patches"):
        for quantity in ("norm", "gamma", "speed"):
            one, own = (getattr(r, quantity)[name] for r in (result.direction, direction.result()))
            np.testing.assert_allclose(one.mean, own.mean, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(one.quantiles, own.quantiles, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(result.rank.stable_rank[name].mean, rank.result().stable_rank[name].mean, rtol=1e-4)
        ours, theirs = result.modes.groups[name], modes.result().groups[name]
        np.testing.assert_allclose(ours.singular_values.mean, theirs.singular_values.mean, rtol=1e-4)
    assert result.basins is not None and result.num_images == 12
    np.testing.assert_allclose(
        result.basins.groups["patches"].accuracy, basins.result().groups["patches"].accuracy, atol=1e-6
    )
    assert result.stability is None and result.perturbation_passes == 0
    saved = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert DynamicsResult.from_dict(saved).to_dict() == saved


def test_perturbed_images_are_spread_and_their_passes_counted(teacher: ViT) -> None:
    """Blocks run in all: one pass over 12 images in 3 batches, then 4 images: clean, noise floor, perturbations."""
    calls: list[int] = []
    handles = [b.register_forward_hook(lambda _m, args, _o: calls.append(len(args[0]))) for b in teacher.blocks]
    told: list[tuple[int, int]] = []
    result = measure_dynamics(
        teacher,
        batches_of(teacher),
        num_images=12,
        stability_images=4,
        eps=(1e-2,),
        progress=lambda *done: told.append(done),
    )
    for handle in handles:
        handle.remove()
    num_layers = teacher.num_layers
    # four targets, one size, injection at 0..3: 4 + 3 + 2 + 1 blocks each
    assert result.perturbation_passes == pytest.approx(4 * (4 + 3 + 2 + 1) / num_layers)
    image_blocks = 12 * num_layers + 4 * num_layers * (1 + 1 + result.perturbation_passes)
    assert sum(calls) == image_blocks
    assert told[-1] == (round(image_blocks / num_layers),) * 2
    assert result.num_stability_images == 4 and result.stability is not None
    by_hand = Stability(teacher.groups, (1e-2,))
    images = noise_images(teacher, 12)[[2, 5, 8, 11]]  # one of every three
    with torch.no_grad():
        a_0, context = teacher.embed(images)
        by_hand.update(teacher.unroll(a_0, context), lambda l, x: teacher.unroll(x, context, start=l))
    np.testing.assert_allclose(
        result.stability.angle_per_eps.mean, by_hand.result().angle_per_eps.mean, rtol=1e-3, atol=1e-4
    )


def test_a_surrogate_is_measured_alike(teacher: ViT) -> None:
    surrogate = make_surrogate(teacher, (1, 1, 1, 1))  # each block a copy: the same dynamics
    found = [
        measure_dynamics(vit, batches_of(vit), num_images=12, stability_images=2, eps=(1e-2,))
        for vit in (teacher, surrogate)
    ]
    for name in ("cls", "patches"):
        np.testing.assert_allclose(found[0].direction.speed[name].mean, found[1].direction.speed[name].mean, rtol=1e-4)
    assert found[0].stability is not None and found[1].stability is not None
    np.testing.assert_allclose(found[0].stability.path, found[1].stability.path, rtol=1e-2, atol=1e-5)


def test_states_that_are_not_finite_are_refused(teacher: ViT) -> None:
    with torch.no_grad():
        next(teacher.blocks[1].parameters()).fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        measure_dynamics(teacher, batches_of(teacher), num_images=12, stability_images=0, rank_images=12)


def test_perturbations_in_half_precision_are_refused(teacher: ViT) -> None:
    teacher.model.bfloat16()
    with pytest.raises(ValueError, match="is opened in bfloat16: perturbations are followed in fp32"):
        measure_dynamics(teacher, batches_of(teacher), num_images=12)


def test_missing_classes_are_a_note_and_missing_labels_an_error(teacher: ViT) -> None:
    result = measure_dynamics(teacher, batches_of(teacher), num_images=12, classes=[0, 7], stability_images=0)
    assert result.basins is None and "fewer than two" in result.notes[0]
    unlabelled = batches_of(teacher, labelled=False)
    with pytest.raises(ValueError, match="basins need labels"):
        measure_dynamics(teacher, unlabelled, num_images=12, classes=[0, 1], stability_images=0)
    with pytest.raises(ValueError, match="no images"):
        measure_dynamics(teacher, [], num_images=0, stability_images=0)


@pytest.mark.parametrize("name", ["scenes", "untrained", "dinov2s-k3"])
def test_committed_results_are_read_and_written_unchanged(name: str) -> None:
    saved = json.loads((RESULTS / f"{name}.json").read_text())
    again = DynamicsFile.read_file(RESULTS / f"{name}.json").to_dict()
    for side in ("teacher", "surrogate"):
        slopes = [(found[side] or {}).get("stability", {}).pop("log_slope", 0.0) for found in (saved, again)]
        np.testing.assert_allclose(*(np.array(slope, dtype=float) for slope in slopes), rtol=1e-12)
    assert kept(again, saved) == saved
