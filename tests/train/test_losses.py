"""Token weights, the weighted error and the variance against direct numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_models import on_ranks

from raptor.train.losses import StateVariance, token_weights
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


def test_each_groups_own_mean_is_weighted():
    s, t = pair()
    squared = (s.numpy() - t.numpy()) ** 2
    expected = 0.45 * squared[:, 0].mean() + 0.10 * squared[:, 1:4].mean() + 0.45 * squared[:, 4:].mean()
    assert weighted_error(s, t, token_weights(FULL, WEIGHTS)).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("groups", "parts"),
    [
        (TokenGroups(1, 0, 5), [(0.5, slice(0, 1)), (0.5, slice(1, 6))]),
        (TokenGroups(0, 0, 4), [(1.0, slice(0, 4))]),
        (TokenGroups(0, 2, 4), [(0.10 / 0.55, slice(0, 2)), (0.45 / 0.55, slice(2, 6))]),
    ],
)
def test_a_missing_group_is_dropped_and_the_rest_renormalised(groups, parts):
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


def test_the_cosine_term_is_weighted_by_tokens_alone_whatever_the_variance():
    s, t = pair()
    a, b = s.double().numpy(), t.double().numpy()
    cos = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    variance = np.linspace(0.1, 5, FULL.num_tokens)
    w = token_weights(FULL, WEIGHTS).double().numpy()
    expected = (((a - b) ** 2).mean(-1) * w / variance).sum(-1).mean() + 0.3 * ((1 - cos) * w).sum(-1).mean()
    w_t = token_weights(FULL, WEIGHTS)
    loss = weighted_error(s, t, w_t / torch.tensor(variance).float(), 0.3 * w_t)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_half_precision_states_are_compared_in_float32():
    s, t = pair(dim=64)
    s16, t16 = (1000 + s).bfloat16(), (1000 + t).bfloat16()
    expected = ((s16.float().numpy() - t16.float().numpy()) ** 2).mean()
    assert weighted_error(s16, t16, token_weights(FULL, None)).item() == pytest.approx(expected, rel=1e-5)


def test_variance_over_batches_equals_numpy_over_everything():
    rng = np.random.default_rng(0)
    scales, offset = np.array([0.1, 3.0]), rng.normal(size=6) * 50
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


def test_a_coordinate_that_hardly_varies_counts_as_a_hundredth_of_the_median_one():
    states = torch.randn(50, 9, 5, generator=torch.Generator().manual_seed(1)) * torch.tensor([100.0, 2, 1, 1, 1e-4])
    variance = StateVariance(1, FULL)
    variance.update([states])
    v_td = variance.divisors("coordinate")[0]
    for where in (slice(0, 1), slice(1, 4), slice(4, 9)):
        own = states[:, where].reshape(-1, 5).double().numpy().var(axis=0)
        own[-1] = np.median(own) / 100
        assert v_td[where][0].numpy() == pytest.approx(own, rel=1e-5)


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


def test_an_outlier_coordinate_decides_the_error_unless_each_has_its_own_variance():
    s, t = pair()
    s[..., 0] += 100  # a thousand times the other errors
    v_td = torch.ones(FULL.num_tokens, t.shape[-1])
    v_td[:, 0] = 1e8
    w_td = token_weights(FULL, None)[:, None] / v_td
    expected = ((s - t)[..., 1:].double() ** 2).sum(-1).mean().item() / t.shape[-1]
    assert weighted_error(s, t, w_td).item() == pytest.approx(expected, rel=1e-3)
    assert weighted_error(s, t, token_weights(FULL, None)).item() > 100 * expected


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
    s, t = torch.zeros(1, 4096, 1).bfloat16(), torch.full((1, 4096, 1), 2.0**-6).bfloat16()
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
