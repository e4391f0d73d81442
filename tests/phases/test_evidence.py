"""Evidence for cuts of matrices whose phases are known."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from known_matrices import striped

from raptor.phases.cut import (
    Phases,
    choose_k,
    find_phases,
    within_and_across,
)
from raptor.phases.evidence import CutEvidence, Evidence, boundary_intervals, no_structure, smooth_matrix
from raptor.phases.similarity import Blocks


def blocky(lengths: list[int], noise: float, num_images: int, seed: int = 0) -> Blocks:
    """Matrices of images, each a block matrix and noise of its own."""
    rng = np.random.default_rng(seed)
    same = Phases.from_lengths(lengths).same_phase()
    matrices = []
    for _ in range(num_images):
        error = rng.normal(0, noise, same.shape)
        matrices.append(np.where(same, 0.9, 0.5) + (error + error.T) / 2)
    return Blocks(np.stack(matrices), np.ones(num_images, dtype=np.int64))


def test_sharp_boundaries_are_certain_and_beat_every_null() -> None:
    blocks = blocky([4, 3, 5], 0.02, 32)
    matrix = blocks.resampled(1)[0]
    evidence = Evidence(matrix, blocks)
    cut = evidence.of(find_phases(matrix, 3))
    assert cut.boundaries == [(4, 4), (7, 7)] and cut.stability == [1.0, 1.0]
    assert cut.contrast == pytest.approx(0.4, abs=0.02) and cut.interval[0] > max(cut.shuffled_upper, cut.smooth)
    assert no_structure(3, cut, matrix) == "" and evidence.k_shares() == {3: 1.0}


def test_noise_gives_wide_boundaries_and_no_structure() -> None:
    blocks = blocky([12], 0.5, 16)
    matrix = blocks.resampled(1)[0]
    cut = Evidence(matrix, blocks).of(find_phases(matrix, 3))
    assert any(upper > lower for lower, upper in cut.boundaries) and min(cut.stability) < 1
    shuffled = Evidence(matrix).of(find_phases(matrix, 3))
    told = no_structure(3, shuffled, matrix)
    assert told.startswith("at k=3 no more phase structure than a shuffled matrix (contrast at least ")
    assert told.endswith(f"; 95 % of shuffled ones are below {shuffled.shuffled_upper:.3f})")


def test_distances_of_rounding_are_no_phases() -> None:
    blocks = blocky([4, 3, 5], 0.0, 8)
    matrix = blocks.resampled(1)[0]
    cut = Evidence(matrix, blocks).of(find_phases(matrix, 3))
    assert no_structure(3, cut, 1 - 1e-7 * (1 - matrix)) == (
        "all layers are alike up to rounding (the largest distance is 5e-08)"
    )
    each = Evidence(matrix, blocks).of(find_phases(matrix, 12))
    assert "do not level off before k=12, where every layer is a phase" in no_structure(12, each, matrix)


def test_small_distances_may_be_phases() -> None:
    matrix = 1 - 2e-6 * (1 - striped(0, 0, 1, 1))
    assert no_structure(2, CutEvidence(contrast=2e-6, shuffled_upper=1e-6), matrix) == ""


def test_a_smooth_matrix_is_called_gradual() -> None:
    distance = np.abs(np.arange(12)[:, None] - np.arange(12))
    cut = Evidence(1 - 0.05 * distance).of(find_phases(1 - 0.05 * distance, 4))
    assert cut.contrast == pytest.approx(cut.smooth) and cut.contrast > cut.shuffled_upper


def test_the_limit_of_shuffled_matrices_is_their_95th_percentile() -> None:
    """Of the 24 orders of a a b b, 8 keep both groups together and have the contrast 1; half have much less."""
    matrix = striped(0, 0, 1, 1)
    found = Evidence(matrix).of(find_phases(matrix, 2))
    contrasts = []
    for order in permutations(range(4)):
        shuffled = matrix[np.ix_(order, order)]
        within, across = within_and_across(shuffled, find_phases(shuffled, 2))
        contrasts.append(within - across)
    assert sum(c == 1 for c in contrasts) == 8 and np.median(contrasts) < 0.5
    assert found.contrast == found.shuffled_upper == 1
    assert found.shuffled == pytest.approx(np.mean(contrasts), abs=0.1)  # 200 orders were drawn


def test_the_interval_of_a_contrast_holds_95_per_cent_of_resamples() -> None:
    """18 blocks of images have the contrast 1 and 2 have 0, so a resample with m of those has 1 - m / 20.

    m is binomial: 4.3 % of resamples have 5 or more, 13.3 % have 4 or more. An interval of 90 % would end at .80.
    """
    cut = Phases((2, 2), method="maxcut")
    matrices = np.stack([striped(0, 0, 1, 1)] * 18 + [np.ones((4, 4))] * 2)
    blocks = Blocks(matrices, np.full(20, 8))
    found = Evidence(matrices.mean(0), blocks).of(cut)
    assert found.interval == pytest.approx((0.75, 1.0)) and found.contrast == pytest.approx(0.9)


def test_one_block_of_images_has_no_resamples() -> None:
    """All of them would be the same: an interval of width 0 would say that other images are like these."""
    matrix = striped(0, 0, 1, 1)
    found = Evidence(matrix, Blocks(matrix[None], np.array([8]))).of(Phases((2, 2), method="maxcut"))
    assert found.interval is None and found.boundaries == [] and found.lowest == found.contrast == 1


def test_two_blocks_of_images_have_resamples() -> None:
    """A resample has the first block 0, 1 or 2 times, so its contrast is 1, .5 or 0; both ends are a quarter each."""
    blocks = Blocks(np.stack([striped(0, 0, 1, 1), np.ones((4, 4))]), np.array([8, 8]))
    found = Evidence(blocks.matrix_nll.mean(0), blocks).of(Phases((2, 2), method="maxcut"))
    assert found.interval == (0.0, 1.0)


def test_orders_of_the_layers_are_the_same_in_every_run() -> None:
    matrix = 1 - 0.05 * np.abs(np.arange(12)[:, None] - np.arange(12))
    orders = np.random.default_rng(0)
    shuffled = Evidence(matrix).nulls["shuffled"]
    assert len(shuffled) == 200
    for one in shuffled[:3]:
        order = orders.permutation(12)
        np.testing.assert_array_equal(one, matrix[order][:, order])


def test_boundaries_and_their_intervals_by_hand() -> None:
    """Two of 40 cuts move the first boundary down, two move both up; the ends are the 2nd and the 39th in order."""
    recut = [Phases((4, 3, 5))] * 36 + [Phases((3, 4, 5))] * 2 + [Phases((5, 3, 4))] * 2
    assert boundary_intervals(Phases((4, 3, 5)), recut) == ([(3, 5), (7, 8)], [0.9, 0.95])


def test_gains_of_matrices_without_phases_are_means_over_them() -> None:
    matrix = blocky([4, 3, 5], 0.05, 8).resampled(1)[0]
    twin = blocky([6, 6], 0.05, 8, seed=1).resampled(1)[0]
    evidence = Evidence(matrix, None, twin)
    found = evidence.null_gains()
    assert found["smooth"] == pytest.approx(list(choose_k(smooth_matrix(matrix)).gains))
    assert found["twin"] == pytest.approx(list(choose_k(twin).gains))
    totals = np.zeros(11)
    for shuffled in evidence.nulls["shuffled"][:20]:
        totals += choose_k(shuffled).gains
    assert found["shuffled"] == pytest.approx((totals / 20).tolist())


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        # The lower end of the interval decides, not the contrast itself.
        (
            CutEvidence(contrast=0.2, interval=(0.05, 0.3), shuffled_upper=0.1),
            "a shuffled matrix (contrast at least 0.050",
        ),
        (CutEvidence(contrast=0.2, interval=(0.11, 0.3), shuffled_upper=0.1), ""),
        # 1.25 times the contrast of the untrained twin.
        (CutEvidence(contrast=0.12, interval=(0.12, 0.13), twin=0.1), "its untrained twin"),
        (CutEvidence(contrast=0.126, interval=(0.126, 0.13), twin=0.1), ""),
        (CutEvidence(contrast=0.12, twin=0.1), "its untrained twin"),
        (CutEvidence(contrast=0.126, twin=0.1), ""),
        (CutEvidence(contrast=0.12, twin=0.1), "1.25 times the twin's is 0.125"),
        # As much as a null is not above it.
        (CutEvidence(contrast=0.5, shuffled_upper=0.5), "a shuffled matrix"),
        (CutEvidence(contrast=0.625, twin=0.5), "its untrained twin"),
    ],
)
def test_a_cut_is_no_finding_unless_its_lower_end_is_above_every_null(evidence: CutEvidence, words: str) -> None:
    found = no_structure(2, evidence, striped(0, 0, 1, 1))
    assert words in found and bool(words) == bool(found)
