"""Error curves against torchmetrics, scikit-learn and scipy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import linregress
from sklearn.metrics import r2_score
from torch import Tensor
from torchmetrics.functional import r2_score as torchmetrics_r2

from raptor.certificate import error_curves as curves_module
from raptor.certificate.error_curves import METRICS, Curves, ErrorCurves
from raptor.vit.groups import TokenGroups

GROUPS = TokenGroups(1, 2, 6)
NUM_LAYERS = 3


def states_pair(num_images: int = 23, dim: int = 10, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Teacher and student states with an offset that differs by group and coordinate, and grows with depth."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    offset = 5 * draw(GROUPS.num_tokens, dim)
    offset[3:] = offset[3]
    teacher = [2.0**layer * (draw(num_images, GROUPS.num_tokens, dim) + offset) for layer in range(NUM_LAYERS + 1)]
    student = [0.9 * t + 0.3 * t.std() * draw(*t.shape) for t in teacher]
    return teacher, student


def measured(teacher: list[Tensor], student: list[Tensor], splits: tuple[int, ...] = (), **kwargs):
    curves = ErrorCurves(NUM_LAYERS, GROUPS, **kwargs)
    for t, s in zip(zip(*(x.tensor_split(splits) for x in teacher)), zip(*(x.tensor_split(splits) for x in student))):
        curves.update(t, s)
    return curves.result()


@pytest.mark.parametrize("group", ["all", "cls", "registers", "patches"])
def test_r2_is_sklearns_over_the_whole_set(group: str) -> None:
    teacher, student = states_pair()
    curves = measured(teacher, student, (7, 9))
    for layer in range(1, NUM_LAYERS + 1):
        t, s = (x[layer][:, GROUPS.slice(group)].reshape(-1, 10).double() for x in (teacher, student))
        assert curves.r2_uniform[group][layer - 1] == pytest.approx(r2_score(t, s), abs=1e-5)
        assert curves.r2_uniform[group][layer - 1] == pytest.approx(float(torchmetrics_r2(s, t)), abs=1e-5)
        expected = 1 - (s - t).square().sum() / (t - t.mean(0)).square().sum()
        assert curves.r2[group][layer - 1] == pytest.approx(float(expected), abs=1e-5)
        weighted = r2_score(t, s, multioutput="variance_weighted")
        assert curves.r2[group][layer - 1] == pytest.approx(weighted, abs=1e-5)


def test_bounded_r2_is_the_regression_of_each_token() -> None:
    teacher, student = states_pair(num_images=6)
    curves = measured(teacher, student, (2,))
    for group in ("all", "cls", "registers", "patches"):
        t, s = (x[2][:, GROUPS.slice(group)].reshape(-1, 10).double().numpy() for x in (teacher, student))
        correlations = np.array([linregress(a, b).rvalue for a, b in zip(t, s)])
        assert curves.pearson[group][1] == pytest.approx(correlations.mean(), abs=1e-6)
        assert curves.bounded_r2[group][1] == pytest.approx((correlations**2).mean(), abs=1e-6)


def test_bounded_r2_is_blind_to_sign_and_the_correlation_is_not() -> None:
    teacher, _ = states_pair()
    curves = measured(teacher, [3 - 2 * t for t in teacher])
    assert np.allclose(curves.bounded_r2["patches"], 1, atol=1e-5)
    assert np.allclose(curves.pearson["patches"], -1, atol=1e-5)


def test_errors_and_cosine_by_brute_force() -> None:
    teacher, student = states_pair()
    curves = measured(teacher, student, (4,))
    for g, group in enumerate(curves.groups):
        t, s = (x[3][:, GROUPS.slice(group)].double() for x in (teacher, student))
        error = torch.linalg.matrix_norm(t - s)
        norm = torch.linalg.matrix_norm(t)
        assert curves.absolute[group][2] == pytest.approx(float(error.mean()), rel=1e-6)
        assert curves.relative[group][2] == pytest.approx(float(error.mean() / norm.mean()), rel=1e-6)
        cosine = torch.nn.functional.cosine_similarity(t, s, dim=-1)
        assert curves.cosine[group][2] == pytest.approx(float(cosine.mean()), abs=1e-6)
        np.testing.assert_allclose(curves.image_error[:, 2, g], error, rtol=1e-5)
        np.testing.assert_allclose(curves.image_relative[:, 2, g], error / norm, rtol=1e-5)
        np.testing.assert_allclose(curves.image_cosine[:, 2, g], cosine.mean(1), rtol=1e-5)
        total = (t - t.mean((0, 1))).square().sum()
        assert curves.image_deviation[:, 2, g].sum() == pytest.approx(float(total), rel=1e-5)


@pytest.mark.parametrize("splits", [(1,), (5, 6, 20), tuple(range(1, 23))])
def test_how_the_set_is_cut_into_batches_does_not_matter(splits: tuple[int, ...]) -> None:
    teacher, student = states_pair()
    whole, cut = measured(teacher, student), measured(teacher, student, splits)
    for metric in METRICS:
        for group in whole.groups:
            np.testing.assert_allclose(getattr(cut, metric)[group], getattr(whole, metric)[group], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("together", [2, 3])
def test_layers_measured_together_give_the_same(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student = states_pair()
    alone = measured(teacher, student).to_dict()
    monkeypatch.setitem(curves_module.STACKED_VALUES, "cpu", together * teacher[1].numel())
    for group, metrics in measured(teacher, student).to_dict().items():
        for metric, values in metrics.items():
            assert values == pytest.approx(alone[group][metric], rel=1e-5)


def test_a_mean_far_larger_than_the_spread_costs_no_digits() -> None:
    generator = torch.Generator().manual_seed(1)
    teacher = [1000 + torch.randn(40, GROUPS.num_tokens, 8, generator=generator) for _ in range(NUM_LAYERS + 1)]
    student = [t + 0.5 * torch.randn(t.shape, generator=generator) for t in teacher]
    curves = measured(teacher, student, (3, 10))
    t, s = teacher[1].double(), student[1].double()
    expected = 1 - (s - t).square().sum() / (t - t.mean((0, 1))).square().sum()
    assert curves.r2["all"][0] == pytest.approx(float(expected), abs=1e-6)


def test_the_size_of_the_states_does_not_matter() -> None:
    """Only the absolute error grows with them."""
    teacher, student = states_pair()
    whole = measured(teacher, student)
    small = measured([1e-5 * t for t in teacher], [1e-5 * s for s in student])
    for metric in METRICS:
        scale = 1e5 if metric == "absolute" else 1
        for group in whole.groups:
            found = scale * getattr(small, metric)[group]
            np.testing.assert_allclose(found, getattr(whole, metric)[group], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(small.image_relative, whole.image_relative, rtol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_deviations_of_single_images_by_brute_force(scale: float) -> None:
    """Of one batch the centre is the mean."""
    teacher, student = states_pair()
    curves = measured([scale * t for t in teacher], [scale * s for s in student])
    for g, group in enumerate(curves.groups):
        t = scale * teacher[1][:, GROUPS.slice(group)].double()
        expected = (t - t.mean((0, 1))).square().sum((1, 2))
        np.testing.assert_allclose(curves.image_deviation[:, 0, g], expected, rtol=1e-4)


def test_no_cosine_is_beyond_1() -> None:
    """Rounding takes some of these a little beyond, unless they are cut."""
    teacher, _ = states_pair(num_images=400)
    for sign in (1, -1):
        found = measured(teacher, [sign * 1.1 * t for t in teacher])
        cosine = found.image_cosine[..., found.groups.index("cls")]  # a mean over one token
        assert np.abs(cosine).max() == 1 and np.allclose(cosine, sign)


def test_bf16_states_are_measured_in_fp32() -> None:
    teacher, student = ([x.bfloat16() for x in states] for states in states_pair(dim=64))
    rounded = measured(teacher, student, (5,))
    exact = measured([t.float() for t in teacher], [s.float() for s in student], (9,))
    for metric in METRICS:
        np.testing.assert_allclose(getattr(rounded, metric)["all"], getattr(exact, metric)["all"], atol=1e-6, rtol=1e-6)


def test_identical_states_have_no_error_and_the_mean_has_r2_zero() -> None:
    teacher, _ = states_pair()
    same = measured(teacher, teacher, (5,))
    assert np.all(same.absolute["all"] == 0) and np.allclose(same.r2["cls"], 1)
    mean = [t[:, GROUPS.slice("patches")].mean((0, 1)).expand_as(t) for t in teacher]
    assert np.allclose(measured(teacher, mean, (5,)).r2["patches"], 0, atol=1e-6)


def test_a_constant_coordinate_counts_1_only_where_it_is_predicted_exactly() -> None:
    """As in scikit-learn: the teacher's second coordinate is 3 everywhere, so that its R2 would divide by 0."""
    groups = TokenGroups(0, 0, 2)
    state = torch.stack([torch.arange(6.0).view(3, 2), torch.full((3, 2), 3.0)], dim=2)
    for missed_by, expected in ((0.0, 1.0), (0.5, 0.5)):
        curves = ErrorCurves(1, groups)
        student = state + torch.tensor([0.0, missed_by])
        curves.update([state, state], [state, student])
        rows = (x.flatten(0, 1).numpy() for x in (state, student))
        assert r2_score(*rows) == expected
        assert curves.result().r2_uniform["all"][0] == pytest.approx(expected)


def test_missing_groups_are_left_out() -> None:
    groups = TokenGroups(0, 0, 4)
    curves = ErrorCurves(1, groups)
    states = [torch.randn(3, 4, 5), torch.randn(3, 4, 5)]
    curves.update(states, [x + 1 for x in states])
    assert curves.result().groups == ("all", "patches")
    assert curves.result().absolute["patches"][0] == pytest.approx(np.sqrt(20), rel=1e-6)


def test_wrong_states_are_refused() -> None:
    teacher, student = states_pair()
    curves = ErrorCurves(NUM_LAYERS, GROUPS)
    with pytest.raises(ValueError, match="student gave 3 states"):
        curves.update(teacher, student[1:])
    with pytest.raises(ValueError, match=r"shapes \(23, 9, 8\) and \(23, 9, 10\)"):
        curves.update(teacher, [x[..., :8] for x in student])
    with pytest.raises(ValueError, match=r"shapes \(23, 8, 10\) and \(23, 8, 10\)"):
        curves.update([x[:, :8] for x in teacher], [x[:, :8] for x in student])
    with pytest.raises(ValueError, match="data is empty"):
        curves.result()


def test_the_first_layer_that_is_not_finite() -> None:
    teacher, student = states_pair(num_images=1)
    curves = ErrorCurves(NUM_LAYERS, GROUPS)
    assert curves.first_not_finite() is None
    curves.update(teacher, student)
    assert curves.first_not_finite() is None
    for layer, is_teachers in ((3, False), (2, True), (1, False)):
        broken = [x.clone() for x in (teacher if is_teachers else student)]
        broken[layer][0, 4, 1] = float("inf")
        curves = ErrorCurves(NUM_LAYERS, GROUPS)
        curves.update(broken if is_teachers else teacher, student if is_teachers else broken)
        assert curves.first_not_finite() == (layer, is_teachers)


def test_curves_that_were_read_have_no_images() -> None:
    teacher, student = states_pair()
    found = measured(teacher, student)
    again = Curves.from_dict(found.to_dict())
    assert again.groups == found.groups and again.image_error.shape == (0, NUM_LAYERS, 4)
    assert again.image_places.shape == (0,)
    for metric in METRICS:
        np.testing.assert_array_equal(getattr(again, metric)["cls"], getattr(found, metric)["cls"])
    one_layer = {"all": {metric: [0.5] for metric in METRICS[1:]}}
    with pytest.raises(ValueError, match=r"all\.r2: Input should be a number for each of 1 layers"):
        Curves.from_dict(one_layer | {"cls": {metric: [0.5] for metric in METRICS}})


def test_reservoir_bounds_what_is_kept_of_the_images() -> None:
    teacher, student = states_pair()
    curves = measured(teacher, student, (5, 12), reservoir=8)
    assert curves.num_images == 23 and curves.image_error.shape == (8, NUM_LAYERS, 4)


def test_ten_thousand_images_keep_their_own_values() -> None:
    states = [torch.arange(10_001.0).view(-1, 1, 1)] * 2
    curves = ErrorCurves(1, TokenGroups(1, 0, 0))
    curves.update(states, states)
    assert len(curves.result().image_error) == len(curves.result().image_places) == 10_000
