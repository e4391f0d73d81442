"""Shares of the largest coordinates and tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_states import in_float64, split

from raptor.phases.outliers import OutlierShares
from raptor.phases.similarity import measure_similarity
from raptor.vit.groups import TokenGroups


def test_outlier_shares() -> None:
    groups = TokenGroups(1, 0, 119)  # the top 1 % of 120 tokens is 2
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(6, 120, 250, generator=generator) for _ in range(3)]  # and of 250 coordinates 3
    states[2][:, :, 17] *= 30
    states[2][2, 44] *= 9
    result = measure_similarity(split(states, [4, 2]), 2, groups).outliers
    energy_lbtd = in_float64(states) ** 2
    for layer, energy_btd in enumerate(energy_lbtd):
        coordinates = np.sort(energy_btd.sum(axis=(0, 1)))[-3:].sum() / energy_btd.sum()
        tokens = np.sort(energy_btd.sum(axis=2), axis=1)[:, -2:].sum() / energy_btd.sum()
        assert result.coordinates[layer] == pytest.approx(coordinates, rel=1e-5)
        assert result.tokens[layer] == pytest.approx(tokens, rel=1e-5)
    assert (result.even_coordinates, result.even_tokens) == (3 / 250, 2 / 120)
    alone = OutlierShares()
    alone.update(states)
    np.testing.assert_allclose(alone.result().tokens, result.tokens, rtol=1e-5)


def test_states_of_equal_size_have_even_shares() -> None:
    states = [torch.ones(4, 200, 100) for _ in range(2)]
    outliers = measure_similarity([states], 1, TokenGroups(0, 0, 200), cka_features=None).outliers
    assert outliers.coordinates == pytest.approx([0.01]) and outliers.tokens == pytest.approx([0.01])


def test_one_per_cent_is_rounded_up() -> None:
    """Of 101 tokens two are counted, of a hundred coordinates one, and of a single token that one."""
    for num_tokens, share in ((101, 2 / 101), (1, 1.0)):
        alone = OutlierShares()
        alone.update([torch.ones(4, num_tokens, 100) for _ in range(2)])
        found = alone.result()
        assert (found.even_coordinates, found.even_tokens) == (0.01, share)
        assert found.tokens == pytest.approx([share])


def test_no_images_have_no_shares() -> None:
    with pytest.raises(ValueError, match="no images were measured"):
        OutlierShares().result()
