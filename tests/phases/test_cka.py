"""Linear CKA against the sum over quadruples of images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_states import DIM, GROUPS, NUM_LAYERS, direct_cka, make_states, split

from raptor.phases.cka import LinearCKA
from raptor.phases.similarity import measure_similarity
from raptor.vit.groups import TokenGroups
from raptor.vit.trajectory import pool_layers


@pytest.mark.parametrize("features", ["cls", "patches", "both"])
def test_cka_equals_the_sum_over_quadruples(features: str) -> None:
    batches = [*split(make_states(11), [6, 5]), make_states(4)]
    result = measure_similarity(batches, NUM_LAYERS, GROUPS, cka_features=features)
    np.testing.assert_allclose(result.cka, direct_cka(batches, features), atol=1e-6)


def test_cka_does_not_change_under_rotation_scale_and_shift() -> None:
    base = make_states(20)[1].double()
    rotation, _ = torch.linalg.qr(
        torch.randn(DIM, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    )
    states = [base, base, 5 * base @ rotation + 300]
    cka = measure_similarity([states], 2, GROUPS, cka_features="cls").cka
    np.testing.assert_allclose(cka, np.ones((2, 2)), atol=1e-9)


def test_the_size_of_features_does_not_matter() -> None:
    """HSIC is of the fourth power of the features: 1e-12 here."""
    states = make_states(6)
    small = [1e-3 * s for s in states]
    found = measure_similarity([small], NUM_LAYERS, GROUPS).cka
    np.testing.assert_allclose(found, direct_cka([states], "both"), atol=1e-6)


def test_cka_of_independent_features_is_near_zero() -> None:
    """The biased estimator would give about .5 here, with as many coordinates as images."""
    generator = torch.Generator().manual_seed(0)
    groups = TokenGroups(1, 0, 0)
    batches = [[torch.randn(32, 1, 32, generator=generator) for _ in range(3)] for _ in range(40)]
    cka = measure_similarity(batches, 2, groups).cka
    assert cka is not None and abs(cka[0, 1]) < 0.05


def test_a_last_batch_of_4_does_not_weigh_like_one_of_256() -> None:
    """Two layers that are equal in 256 images and unrelated in 4 are nearly equal."""
    generator = torch.Generator().manual_seed(3)
    same = torch.randn(256, 1, 8, generator=generator)
    last = [torch.randn(4, 1, 8, generator=generator) for _ in range(3)]
    cka = measure_similarity([[same] * 3, last], 2, TokenGroups(1, 0, 0)).cka
    assert cka is not None and 0.9 < cka[0, 1] < 1


def test_small_batches_are_skipped_by_cka_alone() -> None:
    states = make_states(10)
    batches = split(states, [7, 3])
    cka = LinearCKA(GROUPS)
    for batch in batches:
        cka.update(pool_layers(batch, GROUPS))
    assert cka.num_images == 7
    np.testing.assert_allclose(cka.result(), direct_cka(batches[:1], "both"), atol=1e-6)
    result = measure_similarity(split(states, [3, 3, 3, 1]), NUM_LAYERS, GROUPS)
    assert result.cka is None and result.num_images == 10
    with pytest.raises(ValueError, match="batch of 4 images"):
        LinearCKA(GROUPS).result()


def test_cka_errors() -> None:
    with pytest.raises(ValueError, match="no tokens for CKA features 'cls'"):
        LinearCKA(TokenGroups(0, 2, 4), "cls")
    with pytest.raises(ValueError, match="unknown CKA features"):
        LinearCKA(GROUPS, "registers")
    constant = LinearCKA(TokenGroups(0, 0, 3))
    constant.update({"patches": torch.ones(5, 2, 4)})
    with pytest.raises(ValueError, match="layer 1 are the same"):
        constant.result()
    second = LinearCKA(TokenGroups(0, 0, 3))
    varying = 0.01 * torch.randn(5, 1, 4, generator=torch.Generator().manual_seed(0))
    second.update({"patches": torch.cat([varying, torch.ones(5, 1, 4)], dim=1)})
    with pytest.raises(ValueError, match="layer 2 are the same"):
        second.result()
