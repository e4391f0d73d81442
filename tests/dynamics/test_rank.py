from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from raptor.dynamics.rank import Rank, coherence, ranks_from_squares, small_gram
from raptor.dynamics.states import EvenSubset
from raptor.vit.groups import TokenGroups

GROUPS = TokenGroups(cls=1, registers=2, patches=12)


def brute_force(u: np.ndarray) -> tuple[float, float, float]:
    s = np.linalg.svd(u, compute_uv=False)
    p = s / s.sum()
    p = p[p > 1e-12]
    mean = u.mean(0)
    cosines = u @ mean / (np.linalg.norm(u, axis=1) * np.linalg.norm(mean))
    return float((s**2).sum() / s[0] ** 2), float(np.exp(-(p * np.log(p)).sum())), float(cosines.mean())


@pytest.mark.parametrize("shape", [(20, 64), (64, 20)])
def test_known_rank(shape: tuple[int, int]) -> None:
    """Equal singular values on r directions: both ranks are r."""
    for r in (1, 3, 7):
        q1 = torch.linalg.qr(torch.randn(2, shape[0], r, dtype=torch.float64)).Q
        q2 = torch.linalg.qr(torch.randn(2, shape[1], r, dtype=torch.float64)).Q
        stable, effective = ranks_from_squares(torch.linalg.eigvalsh(small_gram(0.3 * q1 @ q2.mT)))
        torch.testing.assert_close(stable, torch.full((2,), float(r), dtype=torch.float64))
        torch.testing.assert_close(effective, torch.full((2,), float(r), dtype=torch.float64), rtol=1e-6, atol=0)


def test_ranks_do_not_depend_on_the_scale() -> None:
    """A square that is only rounding, 1e-16 of the largest one, is no direction at any scale."""
    for scale in (1e-6, 1.0, 1e6):
        stable, effective = ranks_from_squares(scale * torch.tensor([1.0, 1e-16], dtype=torch.float64))
        assert float(stable) == pytest.approx(1, abs=1e-12) and float(effective) == 1


def test_the_gram_matrix_is_the_smaller_one() -> None:
    for shape in ((2, 20, 64), (2, 64, 20)):
        updates = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        gram = small_gram(updates)
        assert gram.shape == (2, 20, 20)
        squares = torch.linalg.svdvals(updates).square().flip(-1)
        torch.testing.assert_close(torch.linalg.eigvalsh(gram), squares)


def test_zero_updates_have_rank_zero() -> None:
    stable, effective = ranks_from_squares(torch.linalg.eigvalsh(small_gram(torch.zeros(2, 4, 8))))
    assert stable.tolist() == [0, 0] and effective.tolist() == [0, 0]


def test_identical_updates_are_coherent() -> None:
    row = torch.randn(1, 1, 16, dtype=torch.float64)
    assert coherence(row.expand(1, 9, 16)).item() == pytest.approx(1, abs=1e-12)
    opposite = torch.cat([row.expand(1, 6, 16), -row.expand(1, 3, 16)], 1)
    assert coherence(opposite).item() == pytest.approx((6 - 3) / 9, abs=1e-12)


def test_rank_by_group_matches_brute_force() -> None:
    states = [torch.randn(19, GROUPS.num_tokens, 24, generator=torch.Generator().manual_seed(l)) for l in range(4)]
    measure = Rank(GROUPS, num_rank_images=100)
    measure.update([a[:5] for a in states])
    measure.update([a[5:] for a in states])
    result = measure.result()
    x = torch.stack(states, 1).double().numpy()
    x = x / np.linalg.norm(x, axis=-1, keepdims=True)
    update = x[:, 1:] - x[:, :-1]
    for name in ("all", "registers", "patches"):
        part = update[:, :, GROUPS.slice(name)]
        expected = np.array([[brute_force(part[b, l]) for l in range(3)] for b in range(19)])  # (B, L, 3)
        np.testing.assert_allclose(result.stable_rank[name].mean, expected[..., 0].mean(0), rtol=1e-5)
        np.testing.assert_allclose(result.effective_rank[name].mean, expected[..., 1].mean(0), rtol=1e-5)
        np.testing.assert_allclose(result.coherence[name].mean, expected[..., 2].mean(0), rtol=1e-5)
        np.testing.assert_allclose(result.stable_rank[name].std, expected[..., 0].std(0), rtol=1e-4)
    over_images = np.array([brute_force(update[:, l, 0]) for l in range(3)])
    np.testing.assert_allclose(result.stable_rank["cls"].mean, over_images[:, 0], rtol=1e-5)
    np.testing.assert_allclose(result.effective_rank["cls"].mean, over_images[:, 1], rtol=1e-4)
    np.testing.assert_allclose(result.coherence["cls"].mean, over_images[:, 2], rtol=1e-5)
    assert result.stable_rank["cls"].std is None
    assert result.num_rank_images == 19
    json.dumps(result.to_dict(), allow_nan=False)


def test_a_single_register_is_measured_over_images() -> None:
    """One token is of rank 1 and agrees with itself: its coherence would be a peak of rounding."""
    states = [torch.randn(9, 6, 8, generator=torch.Generator().manual_seed(l)) for l in range(4)]
    measure = Rank(TokenGroups(cls=0, registers=1, patches=5))
    measure.update(states)
    result = measure.result()
    x = torch.stack(states, 1)[:, :, 0].double().numpy()
    x = x / np.linalg.norm(x, axis=-1, keepdims=True)
    expected = np.array([brute_force(x[:, l + 1] - x[:, l]) for l in range(3)])
    np.testing.assert_allclose(result.stable_rank["registers"].mean, expected[:, 0], rtol=1e-5)
    np.testing.assert_allclose(result.coherence["registers"].mean, expected[:, 2], rtol=1e-5)
    assert result.values is not None and result.values.shape == (9, 3, 2, 3)
    assert list(result.stable_rank) == ["all", "patches", "registers"]


def test_without_cls_or_registers() -> None:
    groups = TokenGroups(cls=0, registers=0, patches=5)
    measure = Rank(groups)
    measure.update([torch.randn(2, 5, 8) for _ in range(3)])
    assert set(measure.result().coherence) == {"all", "patches"}


def test_even_subset() -> None:
    subset = EvenSubset(num_keep=10, num_images=100)
    kept = [place for _ in range(0, 120, 8) for place in subset.pick(8)[1]]
    assert kept == list(range(9, 100, 10))
    first = EvenSubset(num_keep=5)
    assert [first.pick(3)[0], first.pick(3)[0], first.pick(3)[0]] == [[0, 1, 2], [0, 1], []]
    assert EvenSubset(num_keep=2, num_images=4).pick(8)[0] == [1, 3]  # more images came than were told of
    assert EvenSubset(num_keep=5).pick(2, places=[4, 5]) == ([0], [4])  # of a rank that has the fifth and sixth image
    assert EvenSubset(num_keep=0, num_images=4).pick(4) == ([], [])


def test_ranks_use_only_the_stated_images() -> None:
    groups = TokenGroups(cls=1, registers=0, patches=4)
    measure = Rank(groups, num_rank_images=4, num_images=16)
    for _ in range(4):
        measure.update([torch.randn(4, 5, 8) for _ in range(3)])
    result = measure.result()
    assert result.num_rank_images == 4
    assert result.stable_rank["cls"].num_images == 16
