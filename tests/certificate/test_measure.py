"""What a certificate measures: curves, eps, null models, bootstrap intervals, predictions."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_certified import all_states, image_batches, tiny_vit
from tiny_images import save_array
from torch import Tensor

from raptor.certificate.certificate import Certificate
from raptor.certificate.error_curves import ErrorCurves
from raptor.certificate.heads import resolve_head
from raptor.certificate.measure import certify
from raptor.certificate.ridge import collect_features
from raptor.data import iterate, open_data
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.view import ViT


def frobenius(x: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(x)


def test_curves_and_eps_by_brute_force(teacher: ViT, surrogate: ViT, certificate: Certificate) -> None:
    t, s = all_states(teacher, image_batches(1)), all_states(surrogate, image_batches(1))
    absolute = [float(frobenius(a - b).mean()) for a, b in zip(t[1:], s[1:])]
    relative = [e / float(frobenius(a).mean()) for e, a in zip(absolute, t[1:])]
    np.testing.assert_allclose(certificate.curves.absolute["all"], absolute, rtol=1e-4)
    np.testing.assert_allclose(certificate.curves.relative["all"], relative, rtol=1e-4)
    eps = certificate.eps["relative"]["all"]
    assert eps.value == pytest.approx(max(relative), rel=1e-4) and eps.layer == int(np.argmax(relative)) + 1
    assert eps.upper is not None and eps.upper > eps.value
    assert certificate.eps["absolute"]["all"].value == pytest.approx(max(absolute), rel=1e-4)
    assert certificate.curves.num_images == 21


def test_a_model_certifies_itself(teacher: ViT) -> None:
    certificate = certify(teacher, teacher, image_batches(1), null_models=False, bootstrap=50)
    assert certificate.eps["absolute"]["all"].value == 0
    assert np.allclose(certificate.curves.r2["cls"], 1)
    assert certificate.nulls == {}


def test_predictions(teacher: ViT, surrogate: ViT, certificate: Certificate) -> None:
    head, _ = resolve_head(teacher, image_batches(0))
    assert head is not None and head.linear is not None
    chosen = {}
    for side, vit in (("teacher", teacher), ("surrogate", surrogate)):
        features, labels = collect_features(vit, image_batches(1))
        chosen[side] = head.linear(features).argmax(1)
        expected = (chosen[side] == labels).double().mean().item()
        assert certificate.predictions[f"{side}_accuracy"].value == pytest.approx(expected)
    same = (chosen["teacher"] == chosen["surrogate"]).double().mean().item()
    entry = certificate.predictions["agreement"]
    assert entry.value == pytest.approx(same) and entry.lower <= same <= entry.upper  # type: ignore[operator]


def test_a_note_says_where_a_few_large_coordinates_decide_r2(certificate: Certificate) -> None:
    assert not any("large coordinates" in note for note in certificate.notes)
    teacher = tiny_vit()
    with torch.no_grad():
        teacher.model.patch_embed.proj.weight[0] *= 1000  # the residual stream carries it to the last layer of both
    surrogate = make_surrogate(teacher, [teacher.num_layers], conditioning="none", copy="last")
    found = certify(surrogate, teacher, image_batches(1), null_models=False, bootstrap=20)
    pooled, single = (values["all"][-1] for values in (found.curves.r2, found.curves.r2_uniform))
    assert pooled > 0.99 and single < 0.8
    [note] = [note for note in found.notes if "large coordinates" in note]
    assert f"({pooled:.2f}; the mean of single coordinates is {single:.2f})" in note


def test_own_head_and_no_labels() -> None:
    teacher = tiny_vit(num_classes=4, depth=2)
    head, _ = resolve_head(teacher)
    certificate = certify(teacher, teacher, image_batches(1, labels=False), head=head, null_models=False, bootstrap=20)
    assert set(certificate.predictions) == {"agreement"} and certificate.predictions["agreement"].value == 1


def test_costs(teacher: ViT, surrogate: ViT, certificate: Certificate) -> None:
    ours, theirs = certificate.costs["surrogate"], certificate.costs["teacher"]
    assert theirs.num_parameters == sum(p.numel() for p in teacher.model.parameters())
    assert ours.block_parameters * 5 == theirs.block_parameters * 2
    assert theirs.num_parameters - ours.num_parameters == theirs.block_parameters - ours.block_parameters
    assert ours.flops == theirs.flops and ours.seconds_per_image > 0


def test_intervals_hold_the_estimate(certificate: Certificate) -> None:
    for metric in ("absolute", "relative", "cosine", "r2"):
        ends = certificate.intervals[metric]
        lower, upper = np.stack([ends[g] for g in certificate.curves.groups], axis=-1)
        value = np.stack([getattr(certificate.curves, metric)[g] for g in certificate.curves.groups], axis=1)
        inside = (lower <= value + 1e-6) & (value <= upper + 1e-6)
        assert inside.mean() > 0.9, metric
        assert (upper > lower).all()


def test_the_interval_of_r2_is_that_of_a_plain_bootstrap(teacher: ViT, surrogate: ViT) -> None:
    """Which resamples images and computes R2 anew, mean included."""
    batches = image_batches(3, sizes=(16, 16, 16))
    found = certify(surrogate, teacher, batches, null_models=False, bootstrap=2000)
    where = teacher.groups.slice("patches")
    theirs, ours = (all_states(vit, batches)[-1][:, where].numpy() for vit in (teacher, surrogate))
    draws = np.random.default_rng(0).integers(len(theirs), size=(2000, len(theirs)))
    missed = ((ours - theirs) ** 2).sum((1, 2))[draws].sum(1)
    sums, squares = theirs.sum(1)[draws].sum(1), (theirs**2).sum((1, 2))[draws].sum(1)
    total = squares - (sums**2).sum(1) / (len(theirs) * theirs.shape[1])
    lower, upper = np.quantile(1 - missed / total, (0.025, 0.975))
    ends = found.intervals["r2"]["patches"][:, -1]
    assert ends == pytest.approx([lower, upper], abs=0.15 * (upper - lower))


def test_bf16_is_close_to_fp32(teacher: ViT, surrogate: ViT, certificate: Certificate) -> None:
    rounded = certify(surrogate, teacher, image_batches(1), precision="bf16", null_models=False, bootstrap=0)
    np.testing.assert_allclose(rounded.curves.relative["all"], certificate.curves.relative["all"], atol=0.02)


def r2_ends(certificate: Certificate) -> np.ndarray:
    return np.stack(list(certificate.intervals["r2"].values()))


def test_intervals_do_not_depend_on_how_images_are_batched(teacher: ViT, surrogate: ViT, tmp_path: Path) -> None:
    """A folder is read class by class: deviations from the mean of a first batch of one class made them too wide."""
    for i in range(24):
        shade = 20 + i if i < 12 else 220 + i
        save_array(tmp_path / "ab"[i // 12] / f"{i:02d}.png", np.full((32, 32, 3), shade, dtype=np.uint8))
    data = open_data(str(tmp_path), "all")
    found = [
        r2_ends(certify(surrogate, teacher, iterate(data, teacher.preprocess, size), null_models=False))
        for size in (4, 24)
    ]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-3, atol=1e-5)
    done: list[int] = []
    stream = iterate(data, teacher.preprocess, 8, progress=lambda num, _total: done.append(num))
    certify(surrogate, teacher, stream, null_models=False, bootstrap=0)
    assert done == [8, 16, 24]  # images that are looked at for the mean are not counted twice
    listed = r2_ends(certify(surrogate, teacher, list(iterate(data, teacher.preprocess, 4)), null_models=False))
    np.testing.assert_allclose(listed, found[0], rtol=1e-3, atol=1e-5)


def test_batches_that_cannot_be_gone_through_twice_are_refused(teacher: ViT, surrogate: ViT) -> None:
    with pytest.raises(ValueError, match="not an iterator"):
        certify(surrogate, teacher, iter(image_batches(1)))


def test_batches_that_say_they_overlap_are_refused(teacher: ViT, surrogate: ViT) -> None:
    batches = [replace(batch, start=0) for batch in image_batches(2)]
    with pytest.raises(ValueError, match="batches overlap"):
        certify(surrogate, teacher, batches, null_models=False)


def test_models_that_do_not_fit_are_refused(teacher: ViT) -> None:
    with pytest.raises(ValueError, match="layers 3, not 5"):
        certify(tiny_vit(depth=3), teacher, image_batches(1))
    with pytest.raises(ValueError, match="empty"):
        certify(teacher, teacher, [], null_models=False)


@pytest.mark.parametrize("side", ["teacher", "surrogate"])
def test_states_that_are_not_finite_are_refused(teacher: ViT, surrogate: ViT, side: str) -> None:
    """Otherwise a prediction of NaN would count as one of class 0."""
    sides = {"teacher": teacher, "surrogate": surrogate}
    name = sides[side].name
    sides[side] = spoilt = replace(sides[side], model=copy.deepcopy(sides[side].model))
    spoilt.blocks[2].register_forward_hook(lambda _block, _args, x_btd: x_btd.index_fill(0, torch.tensor(1), torch.nan))
    with pytest.raises(ValueError, match=f"the states of {re.escape(name)} are not finite from layer 3 on"):
        certify(sides["surrogate"], sides["teacher"], image_batches(1), null_models=False, bootstrap=0)


@pytest.mark.parametrize("side", ["teacher", "surrogate"])
def test_the_model_that_is_not_finite_is_known_of_images_whose_values_are_not_kept(side: str, monkeypatch) -> None:
    monkeypatch.setattr("raptor.certificate.error_curves._RESERVOIR_IMAGES", 1)
    groups = tiny_vit().groups
    states = torch.randn(2, 6, groups.num_tokens, 8).unbind()  # a_0 and a_1 of six images
    spoilt = [states[0], states[1].clone()]
    spoilt[1][4] = torch.nan  # one of the five images that are not kept
    curves, fine = ErrorCurves(1, groups), ErrorCurves(1, groups)
    both = (spoilt, states) if side == "teacher" else (states, spoilt)
    curves.update(*both)
    assert curves.first_not_finite() == (1, side == "teacher")
    fine.update(states, states)
    assert fine.first_not_finite() is None
