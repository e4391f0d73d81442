"""Token weights, the weighted error and the variance against direct numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_models import on_ranks
from tiny_run import tiny_teacher

from raptor.phases.cut import Phases
from raptor.train.losses import StateVariance, at_groups, state_variance, targets_of, token_weights
from raptor.train.step import weighted_error
from raptor.vit.groups import TokenGroups

FULL = TokenGroups(cls=1, registers=3, patches=5)
WEIGHTS = {"cls": 0.45, "registers": 0.10, "patches": 0.45}


def pair(batch: int = 4, dim: int = 6, groups: TokenGroups = FULL) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(batch, groups.num_tokens, dim, generator=generator) for _ in range(2))  # type: ignore


def test_no_weights_is_the_plain_mean_over_images_tokens_and_coordinates():
    s, t = pair()
    expected = ((s.numpy() - t.numpy()) ** 2).mean()
    assert weighted_error(s, t, token_weights(FULL, None)).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("groups", "parts"),
    [
        (FULL, [(0.45, slice(0, 1)), (0.10, slice(1, 4)), (0.45, slice(4, 9))]),
        (TokenGroups(1, 0, 5), [(0.5, slice(0, 1)), (0.5, slice(1, 6))]),
        (TokenGroups(0, 0, 4), [(1.0, slice(0, 4))]),
        (TokenGroups(0, 2, 4), [(0.10 / 0.55, slice(0, 2)), (0.45 / 0.55, slice(2, 6))]),
    ],
)
def test_each_groups_own_mean_is_weighted_and_a_missing_group_is_dropped(groups, parts):
    s, t = pair(groups=groups)
    squared = (s.numpy() - t.numpy()) ** 2
    expected = sum(weight * squared[:, where].mean() for weight, where in parts)
    w_t = token_weights(groups, WEIGHTS)
    assert w_t.sum().item() == pytest.approx(1)
    assert weighted_error(s, t, w_t).item() == pytest.approx(expected, rel=1e-6)


def test_weights_that_leave_nothing_are_refused():
    with pytest.raises(ValueError, match="no positive weight to patches"):
        token_weights(TokenGroups(0, 0, 4), {"cls": 1.0})
    with pytest.raises(ValueError, match="no positive weight"):
        token_weights(FULL, {"cls": -1.0, "patches": 2.0})
    with pytest.raises(ValueError, match="unknown token group 'patch'"):
        token_weights(FULL, {"cls": 0.5, "patch": 0.5})
    assert token_weights(FULL, {"cls": 2.0}).tolist() == [1.0] + [0.0] * 8  # a group that is not named has no weight


@pytest.mark.parametrize("cosine", [0.0, 0.5])
def test_the_targets_of_each_layer_by_hand(cosine):
    """Three layers in phases 2 | 1, a cls token and two patches. Layer l has variance l, its cls token 10 l."""
    groups = TokenGroups(1, 0, 2)
    variance_lt = torch.tensor([[10.0, 1, 1], [20.0, 2, 2], [30.0, 3, 3]])
    weights = None, {"cls": 0.4, "patches": 0.6}, {"cls": 1.0}
    stage1, stage2 = targets_of(groups, Phases((2, 1)), variance_lt, *weights, cosine)
    third = [1 / 3] * 3  # the plain mean of all tokens, before the last phase
    by_stage = {"stage1": [third, third, [0.4, 0.3, 0.3]], "stage2": [[1.0, 0.0, 0.0]] * 3}
    for found, expected in ((stage1, by_stage["stage1"]), (stage2, by_stage["stage2"])):
        assert len(found) == 3
        for layer, (target, own) in enumerate(zip(found, expected), start=1):
            cls, first, second = own
            divided = [cls / (10 * layer), first / layer, second / layer]
            assert target.weights.tolist() == pytest.approx(divided, rel=1e-6)
            if cosine:
                assert target.cosine_t.tolist() == pytest.approx([cosine * weight for weight in own], rel=1e-6)
            else:
                assert target.cosine_t is None


def test_with_a_variance_per_coordinate_all_coordinates_of_a_token_have_one_weight():
    variance_ltd = torch.tensor([[[1.0, 2.0], [4.0, 8.0]]])
    plain = None, None, {"cls": 0.25, "patches": 0.75}
    stage1, stage2 = targets_of(TokenGroups(1, 0, 1), Phases((1,)), variance_ltd, *plain, 0.0)
    assert stage1[0].weights.tolist() == [[0.5, 0.25], [0.125, 0.0625]]
    assert stage2[0].weights.tolist() == [[0.25, 0.125], [0.1875, 0.09375]]


def test_values_of_groups_are_carried_to_another_number_of_patches():
    old = TokenGroups(1, 1, 2)
    new = TokenGroups(1, 1, 3)
    v_lt = torch.tensor([[1.0, 2, 3, 3], [4.0, 5, 6, 6]])
    assert at_groups(v_lt, old, new).tolist() == [[1, 2, 3, 3, 3], [4, 5, 6, 6, 6]]
    v_ltd = torch.stack([v_lt, -v_lt], dim=-1)
    assert torch.equal(at_groups(v_ltd, old, new)[..., 1], -at_groups(v_lt, old, new))
    assert at_groups(v_lt, old, old) is v_lt


@pytest.mark.parametrize(("normalise", "num_batches"), [("none", 1), ("layer", 8), ("group", 8), ("coordinate", 8)])
def test_the_variance_is_of_eight_batches_of_a_stage_of_its_own(normalise, num_batches):
    teacher = tiny_teacher()
    asked = []

    class Batches:
        def batch(self, step, stage, size):
            asked.append((step, stage, size))
            return torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(step))

    variance = state_variance(teacher, Batches(), normalise, "fp32")
    assert asked == [(step, "variance", 24) for step in range(num_batches)]
    images = torch.cat([torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(s)) for s, _, _ in asked])
    with torch.no_grad():
        states = teacher.unroll(*teacher.embed(images))[1:]
    for layer, x_btd in enumerate(states, start=1):
        expected = x_btd.flatten(0, 1).double().var(dim=0, correction=0).mean().item()
        assert variance.variance(layer, "all") == pytest.approx(expected, rel=1e-5)


def test_the_cosine_term_is_weighted_by_tokens_alone_whatever_the_variance():
    s, t = pair()
    a = s.double().numpy()
    b = t.double().numpy()
    cos = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    variance = np.linspace(0.1, 5, FULL.num_tokens)
    w = token_weights(FULL, WEIGHTS).double().numpy()
    expected = (((a - b) ** 2).mean(-1) * w / variance).sum(-1).mean() + 0.3 * ((1 - cos) * w).sum(-1).mean()
    w_t = token_weights(FULL, WEIGHTS)
    loss = weighted_error(s, t, w_t / torch.tensor(variance).float(), 0.3 * w_t)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_variance_over_batches_equals_numpy_over_everything():
    rng = np.random.default_rng(0)
    scales = np.array([0.1, 3.0])
    offset = rng.normal(size=6) * 50
    batches = [[scales[layer] * rng.normal(size=(n, 9, 6)) + offset for layer in (0, 1)] for n in (4, 4, 3)]
    variance = StateVariance(2, FULL)
    for states in batches:
        variance.update([torch.tensor(state, dtype=torch.float32) for state in states])
    layer_lt, group_lt, own_ltd = (variance.divisors(name) for name in ("layer", "group", "coordinate"))
    for layer in (0, 1):
        whole = np.concatenate([states[layer] for states in batches])

        def expected(tokens: slice, whole: np.ndarray = whole) -> float:
            return whole[:, tokens].reshape(-1, 6).var(axis=0).mean()

        assert layer_lt[layer].numpy() == pytest.approx(np.full(9, expected(slice(None))), rel=1e-5)
        for where in (slice(0, 1), slice(1, 4), slice(4, 9)):
            assert group_lt[layer, where].numpy() == pytest.approx(expected(where), rel=1e-5)
            coordinates = whole[:, where].reshape(-1, 6).var(axis=0)
            assert own_ltd[layer, where].numpy() == pytest.approx(
                np.broadcast_to(coordinates, (where.stop - where.start, 6)), rel=1e-5
            )
    assert torch.equal(variance.divisors("none"), torch.ones(2, 9))
    with pytest.raises(ValueError, match="unknown normalise"):
        variance.divisors("token")


def test_the_share_of_the_largest_coordinates_is_of_the_group_where_it_is_largest():
    states = torch.randn(80, 9, 200, generator=torch.Generator().manual_seed(1))
    large = states.clone()
    large[:, 4:, 7] *= 100  # one of 200 coordinates of the patches; 1 % are two
    variance = StateVariance(2, FULL)
    variance.update([states, large])
    own = large[:, 4:].reshape(-1, 200).double().numpy().var(axis=0)
    share, layer, group = variance.concentration()
    assert (layer, group) == (2, "patches")
    assert share == pytest.approx(np.sort(own)[-2:].sum() / own.sum(), rel=1e-5) and share > 0.97


def test_a_hundredth_of_the_coordinates_is_rounded_and_at_least_one():
    """States at +-sqrt(v) have the variances v. Of 150 coordinates 1.5 round to 2, of 4 to none, so 1 is taken."""
    for num, num_top in ((150, 2), (4, 1)):
        v_d = torch.ones(num) * 1e-8
        v_d[:3] = torch.tensor([5e-6, 3e-6, 2e-6])
        variance = StateVariance(1, TokenGroups(0, 0, 1))
        variance.update([torch.stack([v_d.sqrt(), -v_d.sqrt()])[:, None]])
        share, layer, group = variance.concentration()
        assert (layer, group) == (1, "patches")
        assert share == pytest.approx(float(v_d[:num_top].sum() / v_d.sum()), rel=1e-5)


def test_ranks_add_up_to_one_process():
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(6, 9, 4, generator=generator) for _ in range(2)]
    whole, half, other = (StateVariance(2, FULL) for _ in range(3))
    whole.update(states)
    half.update([x[:2] for x in states])
    other.update([x[2:] for x in states])
    on_ranks(2, lambda ranks: (half, other)[ranks.rank].reduce(ranks))
    assert torch.equal(half.divisors("group"), other.divisors("group"))
    assert torch.allclose(half.divisors("group"), whole.divisors("group"), rtol=1e-6)


def test_the_error_of_bf16_states_is_taken_in_fp32() -> None:
    """One image, one token: (1, 1) against (1, 1 + 1/128), neighbours in bf16. The squared difference is 2^-14 over two
    coordinates, and `1 - cos` is about 2^-17, where the products of bf16 numbers know no step below 2^-8.
    """
    s = torch.tensor([[[1.0, 1.0]]]).bfloat16()
    t = torch.tensor([[[1.0, 1.0 + 1 / 128]]]).bfloat16()
    one = torch.ones(1)
    squared = weighted_error(s, t, one)
    assert squared.dtype == torch.float32
    assert squared.item() == pytest.approx((1 / 128) ** 2 / 2, rel=1e-6)
    cosine = weighted_error(s, t, torch.zeros(1), one).item()
    length = math.sqrt(1 + (1 + 1 / 128) ** 2)
    assert cosine == pytest.approx(1 - (2 + 1 / 128) / (math.sqrt(2) * length), abs=2e-7) and cosine > 5e-6


def test_many_small_errors_do_not_vanish_in_a_sum_of_bf16() -> None:
    """4,096 tokens with a squared error of 2^-12 each sum to 1. A running sum in bf16 stops growing at 2^-4."""
    s = torch.zeros(1, 4096, 1).bfloat16()
    t = torch.full((1, 4096, 1), 2.0**-6).bfloat16()
    assert weighted_error(s, t, torch.ones(4096)).item() == pytest.approx(1.0, rel=1e-6)


def test_states_that_do_not_vary_are_divided_by_the_floor() -> None:
    """Equal states have variance zero: the layer's and each group's is 1e-12, and so is each coordinate's."""
    variance = StateVariance(1, FULL)
    variance.update([torch.full((3, 9, 4), 5.0)])
    floor = torch.full((1, 9), 1e-12)
    assert torch.equal(variance.divisors("layer"), floor) and torch.equal(variance.divisors("group"), floor)
    assert torch.equal(variance.divisors("coordinate"), floor[..., None].expand(1, 9, 4))


def test_the_floor_of_a_coordinate_is_a_hundredth_of_the_median_exactly_there() -> None:
    """Two states at +-sqrt(v) have variance v: of 4, 1, .04, .005 and 0 the median is .04, so the last is 4e-4."""
    values = torch.tensor([4.0, 1.0, 0.04, 0.005, 0.0]).sqrt()
    variance = StateVariance(1, TokenGroups(0, 0, 1))
    variance.update([torch.stack([values, -values])[:, None]])
    expected = [4.0, 1.0, 0.04, 0.005, 0.0004]
    assert variance.divisors("coordinate")[0, 0].tolist() == pytest.approx(expected, rel=1e-6)
