from __future__ import annotations

import json
from collections import Counter
from itertools import combinations, pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from earlier_files import kept
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from raptor.data import iterate, open_data
from raptor.phases import (
    CutEvidence,
    Phases,
    PhasesFile,
    _Evidence,
    choose_k,
    find_phases,
    no_structure,
    num_partitions,
    random_phases,
    sample_partitions,
    study_phases,
    within_and_across,
)
from raptor.similarity.cosine import Blocks
from raptor.vit.open import open_vit

RESULTS = Path(__file__).parents[1] / "docs" / "results"

# Mean cosine distance between the outputs of blocks 1..12 of DINOv2 ViT-B/14 with registers, as published.
DISTANCE = np.array(
    [
        [0.00, 0.08, 0.20, 0.26, 0.32, 0.37, 0.45, 0.63, 0.70, 0.81, 0.82, 1.08],
        [0.08, 0.00, 0.11, 0.16, 0.21, 0.27, 0.36, 0.54, 0.64, 0.75, 0.75, 1.09],
        [0.20, 0.11, 0.00, 0.05, 0.15, 0.19, 0.32, 0.56, 0.70, 0.81, 0.79, 1.11],
        [0.26, 0.16, 0.05, 0.00, 0.09, 0.15, 0.28, 0.52, 0.67, 0.78, 0.76, 1.11],
        [0.32, 0.21, 0.15, 0.09, 0.00, 0.09, 0.20, 0.39, 0.53, 0.65, 0.69, 1.07],
        [0.37, 0.27, 0.19, 0.15, 0.09, 0.00, 0.10, 0.30, 0.45, 0.58, 0.62, 1.06],
        [0.45, 0.36, 0.32, 0.28, 0.20, 0.10, 0.00, 0.17, 0.30, 0.45, 0.54, 1.04],
        [0.63, 0.54, 0.56, 0.52, 0.39, 0.30, 0.17, 0.00, 0.14, 0.30, 0.45, 0.94],
        [0.70, 0.64, 0.70, 0.67, 0.53, 0.45, 0.30, 0.14, 0.00, 0.16, 0.35, 0.86],
        [0.81, 0.75, 0.81, 0.78, 0.65, 0.58, 0.45, 0.30, 0.16, 0.00, 0.25, 0.81],
        [0.82, 0.75, 0.79, 0.76, 0.69, 0.62, 0.54, 0.45, 0.35, 0.25, 0.00, 0.75],
        [1.08, 1.09, 1.11, 1.11, 1.07, 1.06, 1.04, 0.94, 0.86, 0.81, 0.75, 0.00],
    ]
)
TABLE_3 = {2: (7, 5), 3: (7, 3, 2), 4: (4, 3, 3, 2)}


def random_similarity(num_layers: int, seed: int) -> np.ndarray:
    half = np.random.default_rng(seed).random((num_layers, num_layers))
    return (half + half.T) / 2


def all_partitions(num_layers: int, k: int, min_length: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, num_layers), k - 1)
    lengths = [tuple(np.diff([0, *cut, num_layers]).tolist()) for cut in cuts]
    return [p for p in lengths if min(p) >= min_length]


def score_by_hand(similarity: np.ndarray, lengths: tuple[int, ...], score: str) -> list[float]:
    scores, start = [], 0
    for n in lengths:
        total = similarity[start : start + n, start : start + n].sum()
        scores.append({"weighted": total / n, "mean": total / n**2, "cut": total - n**2}[score])
        start += n
    return scores


@pytest.mark.parametrize("min_length", [1, 2])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_maxcut_gives_table_3(k: int, min_length: int) -> None:
    assert find_phases(1 - DISTANCE, k, min_length=min_length).lengths == TABLE_3[k]


@pytest.mark.parametrize(
    ("score", "min_length", "expected"),
    [
        ("mean", 1, {2: (11, 1), 3: (10, 1, 1), 4: (9, 1, 1, 1)}),
        ("mean", 2, {2: (2, 10), 3: (2, 2, 8), 4: (2, 2, 2, 6)}),
        ("weighted", 2, {2: (7, 5), 4: (4, 3, 3, 2)}),  # k = 3 is an exact tie
        ("cut", 2, {2: (7, 5), 3: (5, 4, 3), 4: (4, 3, 3, 2)}),
    ],
)
def test_dp_on_the_published_matrix(score: str, min_length: int, expected: dict[int, tuple[int, ...]]) -> None:
    for k, lengths in expected.items():
        assert find_phases(1 - DISTANCE, k, "dp", score, min_length).lengths == lengths


def test_maxcut_scores_are_the_distances_across_each_cut() -> None:
    scores = find_phases(1 - DISTANCE, 3).scores
    assert scores == pytest.approx([DISTANCE[:7, 7:].sum(), DISTANCE[7:10, 10:].sum()])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**32 - 1), st.sampled_from(["weighted", "mean", "cut"]))
def test_dp_equals_brute_force(num_layers: int, seed: int, score: str) -> None:
    similarity = random_similarity(num_layers, seed)
    for min_length in range(1, num_layers + 1):
        for k in range(1, num_layers // min_length + 1):
            candidates = all_partitions(num_layers, k, min_length)
            totals = [sum(score_by_hand(similarity, p, score)) for p in candidates]
            found = find_phases(similarity, k, "dp", score, min_length)
            assert sum(found.scores) == pytest.approx(max(totals), abs=1e-9)
            assert found.scores == pytest.approx(score_by_hand(similarity, found.lengths, score), abs=1e-9)
            runner_up = sorted(totals)[-2] if len(totals) > 1 else -np.inf
            if max(totals) - runner_up > 1e-9:
                assert found.lengths == candidates[int(np.argmax(totals))]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 30), st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_maxcut_phases_nest_and_each_cut_is_the_best(num_layers: int, seed: int, min_length: int) -> None:
    similarity = random_similarity(num_layers, seed)
    gains = choose_k(similarity, min_length=min_length).gains if num_layers >= min_length else ()
    outer = find_phases(similarity, 1, min_length=min_length) if num_layers >= min_length else None
    for k in range(2, len(gains) + 2):
        assert outer is not None
        inner = find_phases(similarity, k, min_length=min_length)
        assert set(outer.boundaries) < set(inner.boundaries)
        edges = [0, *outer.boundaries, num_layers]
        across = [
            (1 - similarity[s:c, c:e]).sum()
            for s, e in pairwise(edges)
            for c in range(s + min_length, e - min_length + 1)
        ]
        assert inner.scores[-1] == pytest.approx(max(across), abs=1e-9)
        assert inner.scores == pytest.approx(gains[: k - 1])
        outer = inner


def test_block_matrix_is_cut_at_its_blocks() -> None:
    sizes = (4, 2, 6, 3)
    label = np.repeat(np.arange(4), sizes)
    depth = np.arange(15) * 1e-3
    similarity = np.where(label[:, None] == label, 0.9, 0.1 * label.max() - 0.05 * abs(label[:, None] - label))
    similarity = similarity - np.abs(depth[:, None] - depth)
    assert find_phases(similarity, 4).lengths == sizes
    assert find_phases(similarity, 4, "dp").lengths == sizes
    assert find_phases(similarity, 4, "dp", "cut").lengths == sizes
    assert choose_k(similarity, min_share=0.05).k == 4


def test_large_matrix_runs() -> None:
    similarity = random_similarity(1000, 0)
    for method in ("maxcut", "dp"):
        phases = find_phases(similarity, 20, method)
        assert phases.k == 20 and phases.num_layers == 1000 and min(phases.lengths) >= 2


def test_torch_input_is_accepted() -> None:
    assert find_phases(torch.tensor(1 - DISTANCE, dtype=torch.float32), 4).lengths == (4, 3, 3, 2)


def test_phases_object() -> None:
    phases = find_phases(1 - DISTANCE, 3)
    assert str(phases) == "7 | 3 | 2"
    assert phases.boundaries == (7, 10)
    assert phases.spans == [(1, 7), (8, 10), (11, 12)]
    assert [phases.start(j) for j in range(3)] == [0, 7, 10]
    assert [phases.phase_of(layer) for layer in (1, 7, 8, 10, 11, 12)] == [0, 0, 1, 1, 2, 2]
    assert (phases.k, phases.num_layers, phases.method) == (3, 12, "maxcut")
    again = Phases.from_dict(phases.to_dict())
    assert (again, again.scores, again.method) == (phases, phases.scores, "maxcut")
    assert Phases.from_lengths([7, 3, 2]) == phases
    for wrong in (0, 13):
        with pytest.raises(ValueError, match="layer must be 1 to 12"):
            phases.phase_of(wrong)
    with pytest.raises(ValueError, match="phase must be 0 to 2"):
        phases.start(3)
    with pytest.raises(ValueError, match="positive"):
        Phases.from_lengths([3, 0])


def test_choose_k_on_the_published_matrix() -> None:
    chosen = choose_k(1 - DISTANCE)
    cuts = [DISTANCE[:7, 7:], DISTANCE[7:10, 10:], DISTANCE[:4, 4:7]]
    assert chosen.gains[:3] == pytest.approx([cut.sum() for cut in cuts])
    assert chosen.k == 4  # the fourth cut gains 3 % of the first
    assert choose_k(1 - DISTANCE, max_k=3).k == 3
    assert choose_k(1 - DISTANCE, min_share=0.2).k == 2
    assert choose_k(np.ones((6, 6))).k == 1


def test_a_layer_alone_is_a_phase_for_maxcut_but_not_by_default_for_dp() -> None:
    similarity = np.eye(6)
    similarity[:5, :5] = 1.0  # the last layer is like no other
    assert find_phases(similarity, 2).lengths == (5, 1) and choose_k(similarity).k == 2
    assert find_phases(similarity, 2, min_length=2).lengths == (4, 2)
    assert find_phases(similarity, 2, "dp").lengths == (4, 2)
    assert find_phases(similarity, 2, "dp", min_length=1).lengths == (5, 1)


@pytest.mark.parametrize(("num_layers", "k", "min_length"), [(8, 3, 1), (12, 3, 2), (7, 2, 1), (10, 4, 2)])
def test_random_phases_are_uniform(num_layers: int, k: int, min_length: int) -> None:
    every = all_partitions(num_layers, k, min_length)
    assert num_partitions(num_layers, k, min_length) == len(every)
    counts = Counter(random_phases(num_layers, k, min_length, seed).lengths for seed in range(100 * len(every)))
    assert set(counts) <= set(every)
    assert chisquare([counts[p] for p in every]).pvalue > 1e-4


def test_random_phases_edge_cases() -> None:
    assert random_phases(5, 1).lengths == (5,)
    assert random_phases(5, 5).lengths == (1, 1, 1, 1, 1)
    assert random_phases(12, 4, seed=3) == random_phases(12, 4, seed=3)


def test_sample_partitions_without_replacement() -> None:
    best = find_phases(1 - DISTANCE, 2)
    others = sample_partitions(12, 2, 10, exclude=[best])
    assert {p.lengths for p in others} == {(n, 12 - n) for n in range(1, 12)} - {(7, 5)}
    assert [p.lengths for p in others] == [p.lengths for p in sample_partitions(12, 2, 10, exclude=[(7, 5)])]
    with pytest.raises(ValueError, match="count must be 0 to 10"):
        sample_partitions(12, 2, 11, exclude=[best])
    many = sample_partitions(60, 8, 500, seed=1)
    assert len(set(many)) == 500
    assert all(p.num_layers == 60 and p.k == 8 for p in many)


def test_sample_partitions_first_draw_is_uniform() -> None:
    every = [p for p in all_partitions(8, 3, 1) if p != (2, 3, 3)]
    counts = Counter(sample_partitions(8, 3, 4, seed=s, exclude=[(2, 3, 3)])[0].lengths for s in range(1500))
    assert set(counts) <= set(every)
    assert chisquare([counts[p] for p in every]).pvalue > 1e-4


@pytest.mark.parametrize(
    ("similarity", "options", "message"),
    [
        (np.ones((3, 4)), {"k": 1}, "square"),
        (np.ones(4), {"k": 1}, "square"),
        (np.zeros((0, 0)), {"k": 1}, "square"),
        (np.triu(np.ones((4, 4))), {"k": 2}, "symmetric"),
        (np.full((4, 4), np.nan), {"k": 2}, "NaN"),
        (np.full((4, 4), np.inf), {"k": 2}, "NaN"),
        (np.eye(5), {"k": 3, "method": "dp"}, "need 6 layers, but there are 5"),
        (np.eye(5), {"k": 6, "min_length": 1}, "need 6 layers"),
        (np.eye(5), {"k": 0}, "k must be at least 1"),
        (np.eye(5), {"k": 2, "min_length": 0}, "min_length must be at least 1"),
        (np.eye(5), {"k": 2, "method": "greedy"}, "unknown method 'greedy'"),
        (np.eye(5), {"k": 2, "method": "dp", "score": "sum"}, "unknown score 'sum'"),
    ],
)
def test_bad_input_is_one_clear_line(similarity: np.ndarray, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        find_phases(similarity, **options)
    assert "\n" not in str(error.value)


def test_maxcut_that_cannot_go_on_says_so() -> None:
    similarity = np.kron(np.eye(2), np.ones((3, 3)))  # the first cut leaves 3 | 3, which min_length 2 cannot cut
    with pytest.raises(ValueError, match=r"max-cut stops at 3 \| 3"):
        find_phases(similarity, 3, min_length=2)
    assert find_phases(similarity, 3, "dp").k == 3
    for bad in ({"k": 4, "min_length": 2}, {"k": 0}):
        with pytest.raises(ValueError):
            random_phases(7, **bad)


def test_within_and_across_by_hand():
    matrix = [[1, 0.9, 0.1, 0.2], [0.9, 1, 0.3, 0.4], [0.1, 0.3, 1, 0.7], [0.2, 0.4, 0.7, 1]]
    within, across = within_and_across(matrix, [2, 2])
    assert within == pytest.approx((0.9 + 0.7) / 2) and across == pytest.approx((0.1 + 0.2 + 0.3 + 0.4) / 4)
    assert within_and_across(np.eye(3), [1, 1, 1])[0] is None
    assert within_and_across(np.eye(3), [3])[1] is None


@pytest.mark.parametrize("path", sorted(RESULTS.glob("phases-*.json")), ids=lambda path: path.stem)
def test_committed_results_are_read_and_written_unchanged(path):
    found = PhasesFile.read_file(path)
    saved = json.loads(path.read_text())
    assert kept(found.to_dict(), saved) == saved
    entry = found.models[0]
    assert entry.chosen is not None and entry.chosen.num_layers == entry.model.num_layers == len(
        entry.similarity["all"]
    )


def test_phases_are_the_sequence_of_their_lengths() -> None:
    phases = Phases.from_lengths([3, 1, 2])
    assert list(phases) == [3, 1, 2] and len(phases) == phases.k == 3 and phases[-1] == 2 and phases[1:] == (1, 2)
    assert Phases.from_lengths(phases) is phases
    expected = [[phases.phase_of(i) == phases.phase_of(j) for j in range(1, 7)] for i in range(1, 7)]
    np.testing.assert_array_equal(phases.same_phase(), expected)


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
    evidence = _Evidence(matrix, blocks, None, 1)
    cut = evidence.of(find_phases(matrix, 3))
    assert cut.boundaries == [(4, 4), (7, 7)] and cut.stability == [1.0, 1.0]
    assert cut.contrast == pytest.approx(0.4, abs=0.02) and cut.interval[0] > max(cut.shuffled_upper, cut.smooth)
    assert no_structure(3, cut, matrix) == "" and evidence.k_shares() == {3: 1.0}


def test_noise_gives_wide_boundaries_and_no_structure() -> None:
    blocks = blocky([12], 0.5, 16)
    matrix = blocks.resampled(1)[0]
    cut = _Evidence(matrix, blocks, None, 1).of(find_phases(matrix, 3))
    assert any(upper > lower for lower, upper in cut.boundaries) and min(cut.stability) < 1
    shuffled = _Evidence(matrix, None, None, 1).of(find_phases(matrix, 3))
    told = no_structure(3, shuffled, matrix)
    assert told.startswith("at k=3 no more phase structure than a shuffled matrix (contrast at least ")
    assert told.endswith(f"; 95 % of shuffled ones are below {shuffled.shuffled_upper:.3f})")


def test_distances_of_rounding_are_no_phases() -> None:
    blocks = blocky([4, 3, 5], 0.0, 8)
    matrix = blocks.resampled(1)[0]
    cut = _Evidence(matrix, blocks, None, 1).of(find_phases(matrix, 3))
    assert no_structure(3, cut, 1 - 1e-7 * (1 - matrix)) == (
        "all layers are alike up to rounding (the largest distance is 5e-08)"
    )
    each = _Evidence(matrix, blocks, None, 1).of(find_phases(matrix, 12))
    assert "do not level off before k=12, where every layer is a phase" in no_structure(12, each, matrix)


def test_a_smooth_matrix_is_called_gradual() -> None:
    distance = np.abs(np.arange(12)[:, None] - np.arange(12))
    cut = _Evidence(1 - 0.05 * distance, None, None, 1).of(find_phases(1 - 0.05 * distance, 4))
    assert cut.contrast == pytest.approx(cut.smooth) and cut.contrast > cut.shuffled_upper


def test_the_evidence_of_the_suggested_cut_keeps_to_min_length() -> None:
    """Also where its k was not asked for."""
    teacher = open_vit("scenes")
    images = iterate(open_data("scenes", "val", limit=16, size=48), teacher.preprocess, 8)
    asked = study_phases(teacher, images, k=[2, 3, 4], min_length=2, twin=False)
    found = study_phases(teacher, images, k=[2], min_length=2, twin=False)
    assert found.chosen_k == asked.chosen_k and found.evidence[found.chosen_k] == asked.evidence[found.chosen_k]


def striped(*groups: int) -> np.ndarray:
    """(L, L) similarity: 1 between layers of one group, 0 between others."""
    return (np.array(groups)[:, None] == np.array(groups)).astype(float)


@pytest.mark.parametrize(
    ("similarity", "k", "lengths"),
    [
        # a b a b: the distance across a cut after layer 1, 2 or 3 is 2 each.
        (striped(0, 1, 0, 1), 2, (3, 1)),
        # Four different layers: the middle cut has 4 across, then both halves gain 1.
        (striped(0, 1, 2, 3), 3, (2, 1, 1)),
    ],
)
def test_ties_of_max_cut_go_to_the_later_boundary(similarity: np.ndarray, k: int, lengths: tuple[int, ...]) -> None:
    assert find_phases(similarity, k).lengths == lengths


def test_ties_of_the_dynamic_programme_go_to_the_later_boundary() -> None:
    """Of four different layers each phase scores its own diagonal over its length: 1 whatever the length."""
    assert find_phases(striped(0, 1, 2, 3), 2, "dp", min_length=1).lengths == (3, 1)
    assert find_phases(striped(0, 1, 2, 3), 3, "dp", min_length=1).lengths == (2, 1, 1)


def test_the_limit_of_shuffled_matrices_is_their_95th_percentile() -> None:
    """Of the 24 orders of a a b b, 8 keep both groups together and have the contrast 1; half have much less."""
    matrix = striped(0, 0, 1, 1)
    found = _Evidence(matrix, None, None, 1).of(find_phases(matrix, 2))
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
    cut = Phases((2, 2))
    matrices = np.stack([striped(0, 0, 1, 1)] * 18 + [np.ones((4, 4))] * 2)
    blocks = Blocks(matrices, np.full(20, 8))
    found = _Evidence(matrices.mean(0), blocks, None, 1).of(cut)
    assert found.interval == pytest.approx((0.75, 1.0)) and found.contrast == pytest.approx(0.9)


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
    ],
)
def test_a_cut_is_no_finding_unless_its_lower_end_is_above_every_null(evidence: CutEvidence, words: str) -> None:
    found = no_structure(2, evidence, striped(0, 0, 1, 1))
    assert words in found and bool(words) == bool(found)
