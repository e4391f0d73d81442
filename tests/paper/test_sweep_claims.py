"""Claims about teachers trained from scratch: each follows its bounds, needs its seeds, and leaves nothing out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from evidence import Claim, Verdict, over_seeds
from records import (
    GroupCurves,
    NullCurves,
    PartitionRow,
    Partitions,
    RaptorScores,
    SimilarityMeans,
    StochasticDepth,
    StochasticDepthRow,
    TeacherScores,
    TeacherSimilarity,
    Untrained,
    UntrainedRow,
    ZScore,
)
from stochastic_depth import statistics
from sweep_claims import (
    _accuracy_peak,
    _decoupled,
    claims_partitions,
    claims_stochastic_depth,
    claims_untrained,
)
from tiny_claims import of, verdicts

AGREES, DISAGREES, UNDETERMINED, NOT_TESTED = Verdict


def test_figure_4b_is_judged_over_all_layers() -> None:
    """The last layer is Figure 4D: one layer that rises is not enough where the others fall."""
    rows = []
    for i in range(6):
        row = sweep_row(i / 10, 0.4 + i / 20, 0.3 + i / 20, 0.5, 0.4)
        curve = GroupCurves(r2=[0.5] * 3, bounded_r2=[0.9 - i / 10, 0.9 - i / 10, 0.5 + i / 20], pearson=[0.5] * 3)
        rows.append(replace(row, raptor=replace(row.raptor, curves={"cls": curve, "patches": curve})))
    found = of(claims_stochastic_depth(sweep_file(rows)), "mean over layers) of cls")
    assert found.verdict is DISAGREES and found.measured.endswith("it rises at 1 of 3 layers")


def sweep_row(p: float, similarity: float, r2: float | None, teacher: float, raptor: float) -> StochasticDepthRow:
    curve = GroupCurves(r2=[r2], bounded_r2=[r2], pearson=[r2])
    return StochasticDepthRow(
        cell=f"p{p:g}-s0",
        p=p,
        seed=0,
        teacher=TeacherScores(accuracy=teacher, train_accuracy=1.0),
        similarity=TeacherSimilarity(off_diagonal=similarity, within_phases=similarity),
        raptor=RaptorScores(
            accuracy=raptor,
            num_images=5000,
            bounded_r2_last=r2,
            r2_last=r2,
            probe=raptor,
            phases=[4, 4, 4],
            curves={"all": curve, "cls": curve, "patches": curve},
        ),
    )


def sweep_file(rows: list[StochasticDepthRow]) -> StochasticDepth:
    return StochasticDepth(rows=rows, statistics=statistics(rows))


def test_a_sweep_that_does_all_the_paper_says_agrees_and_its_mirror_does_not() -> None:
    points = [i / 10 for i in range(10)]
    up = [
        sweep_row(p, 0.4 + 0.5 * p, 0.3 + 0.6 * p, 0.5 - (p - 0.4) ** 2, 0.4 - (p - 0.4) ** 2 + 0.1 * p) for p in points
    ]
    whole = sweep_file(up)
    claims = claims_stochastic_depth(whole)
    peak = of(claims, "peaks at a middle p")
    assert peak.verdict is UNDETERMINED and peak.evidence.num == 1  # one seed at each p
    rest = [claim for claim in claims if claim is not peak and "decoupled" not in claim.says]
    assert set(verdicts(rest)) == {AGREES}
    down = [sweep_row(p, 0.9 - 0.5 * p, 0.9 - 0.6 * p, 0.5 - 0.4 * p, 0.5 - 0.5 * p) for p in points]
    mirrored = claims_stochastic_depth(sweep_file(down))
    assert {c.verdict for c in mirrored if " rises with " in c.says or "narrows" in c.says} == {DISAGREES}
    assert of(mirrored, "strongly associated").verdict is AGREES  # similarity and R2 still go together
    assert of(mirrored, "decoupled").verdict is DISAGREES  # both fall


def test_decoupled_is_neither_a_direct_nor_an_inverse_association() -> None:
    r2 = np.linspace(0.3, 0.9, 60)
    wave = np.tile([0.02, -0.02], 30)

    def decoupled(accuracy: np.ndarray) -> Claim:
        rows = [sweep_row(0.1, 0.5, float(x), 0.5, float(y)) for x, y in zip(r2, accuracy)]
        return _decoupled(rows, Claim(place="Figure 4C", says="decoupled"))

    for accuracy, verdict in (
        (0.5 + wave, AGREES),
        (r2 + wave, DISAGREES),
        (1 - r2 + wave, DISAGREES),
        (0.5 + 0.06 * r2 + wave, UNDETERMINED),
        (0.5 - 0.06 * r2 + wave, UNDETERMINED),
    ):
        claim = decoupled(accuracy)
        assert claim.verdict is verdict
        assert claim.evidence.value == pytest.approx(np.corrcoef(r2, accuracy)[0, 1])
        assert claim.evidence.bounds() == "> -0.5 and < 0.5"
    brief = sweep_row(0.1, 0.5, 0.3, 0.5, 0.7)
    brief = replace(brief, teacher=replace(brief.teacher, train_accuracy=0.55))
    rows = [replace(brief, raptor=sweep_row(0.1, 0.5, float(x), 0.5, float(1 - x)).raptor) for x in r2]
    assert _decoupled(rows, Claim(place="Figure 4C", says="decoupled")).verdict is NOT_TESTED


def test_a_peak_needs_three_seeds_and_teachers_that_overfit() -> None:
    def rows(gain: float, train: float, spread: float) -> list[StochasticDepthRow]:
        found = []
        for p, accuracy in ((0.0, 0.5), (0.4, 0.5 + gain), (0.9, 0.3)):
            for seed in range(3):
                row = sweep_row(p, 0.5 + p / 2 + seed / 100, 0.5 + p / 3, accuracy, 0.4)
                own = accuracy + spread * (seed - 1) * (p == 0.4)
                found.append(replace(row, seed=seed, teacher=TeacherScores(accuracy=own, train_accuracy=train)))
        return found

    trends = sweep_file([sweep_row(i / 10, i / 10, i / 10, 0.5, 0.4) for i in range(4)]).statistics

    def verdict(gain: float, train: float, spread: float = 0.0) -> Verdict:
        found = StochasticDepth(rows=rows(gain, train, spread), statistics=trends)
        return of(claims_stochastic_depth(found), "peaks at a middle p").verdict

    assert verdict(0.05, 0.9) is AGREES
    assert verdict(-0.05, 0.9) is DISAGREES
    assert verdict(0.001, 0.9) is UNDETERMINED  # 0.1 points on 5,000 images are no peak
    assert verdict(0.05, 0.9, spread=0.05) is UNDETERMINED  # seeds that differ so much are no peak either
    assert verdict(-0.05, 0.52) is NOT_TESTED  # there was nothing to regularise


def test_teachers_that_overfit_ask_for_more_seeds_and_others_for_longer_training() -> None:
    rows = [sweep_row(i / 10, 0.5 + i / 20, 0.3 + i / 20, 0.5, 0.4) for i in range(3)]
    made = replace(sweep_file(rows), command="raptor reproduce stochastic-depth --config recipes/own.yaml --data d")
    assert {claim.recipe for claim in claims_stochastic_depth(made)} == {"own"}
    assert {claim.recipe for claim in claims_stochastic_depth(replace(made, command="raptor reproduce"))} == {""}
    fit = [replace(row, teacher=TeacherScores(accuracy=0.5, train_accuracy=0.55)) for row in rows]
    assert {claim.recipe for claim in claims_stochastic_depth(replace(made, rows=fit))} == {""}


def peak_of(accuracy_ps: np.ndarray) -> Claim:
    """The claim about the peak in a sweep with these accuracies, by p and seed; NaN where there is no run."""
    rows = []
    for i, accuracies in enumerate(accuracy_ps):
        for seed, accuracy in enumerate(accuracies):
            if not np.isnan(accuracy):
                row = sweep_row(i / 10, 0.5, 0.5, float(accuracy), 0.4)
                rows.append(replace(row, seed=seed))
    return _accuracy_peak(rows, Claim(place="Figure 4C", says="peak"))


def test_the_p_of_a_peak_is_chosen_on_the_other_seeds() -> None:
    """Worked by hand. Seed 0 is judged at the p that seeds 1 and 2 choose, and so on."""
    accuracy_ps = np.array([[50, 50, 50], [60, 54, 53], [52, 58, 51], [40, 40, 62]]) / 100
    gains = [0.52 - 0.40, 0.54 - 0.40, 0.53 - 0.50]  # p = .2 and .3, .1 and .3, .1 and 0
    claim = peak_of(accuracy_ps)
    assert claim.evidence.value == pytest.approx(0.29 / 3) and claim.evidence.num == 3
    half = 4.302653 * (np.var(gains, ddof=1) / 3) ** 0.5  # t with two degrees of freedom
    assert claim.evidence.lower == pytest.approx(0.29 / 3 - half)
    assert claim.evidence.upper == pytest.approx(0.29 / 3 + half)
    assert claim.measured.startswith("55.7% at p = 0.1, 50.0% at 0, 47.3% at 0.3")  # means over all seeds
    assert claim.measured.endswith("; p chosen on the other seeds")
    # A further seed without the largest p changes what the text says of the means, and not the gain.
    more = peak_of(np.concatenate([accuracy_ps, [[0.1], [0.9], [0.9], [np.nan]]], axis=1))
    assert more.evidence.num == 3 and more.evidence.value == pytest.approx(claim.evidence.value)
    assert more.measured.endswith("; p chosen on the other seeds; 3 of 4 seeds have every p")


def test_seeds_that_are_alike_have_the_interval_over_images() -> None:
    alike = peak_of(np.array([[0.5] * 4, [0.6] * 4, [0.3] * 4])).evidence
    half = 2 * (2 * 0.6 * 0.4 / (4 * 5000)) ** 0.5
    assert [alike.value, alike.lower, alike.upper] == pytest.approx([0.1, 0.1 - half, 0.1 + half])


def test_one_seed_with_every_p_is_no_verdict_however_many_others_there_are() -> None:
    accuracy_ps = np.array([[0.5] * 4, [0.6] * 4, [0.55, np.nan, np.nan, np.nan], [0.3] * 4])
    claim = peak_of(accuracy_ps)
    assert claim.verdict is UNDETERMINED and claim.evidence.num == 1
    assert claim.evidence.value == pytest.approx(0.1) and "other seeds" not in claim.measured


def test_many_p_of_equal_accuracy_give_no_gain_on_average() -> None:
    """The gain at the p that is best on the same seeds is above 0 on average, though no p is better than another."""
    random, num_sweeps = np.random.default_rng(0), 400
    ours, same_seeds = [], []
    for _ in range(num_sweeps):
        accuracy_ps = random.normal(0.5, 0.02, size=(10, 3))
        gains = []
        for seed in range(3):
            means = np.delete(accuracy_ps, seed, axis=1).mean(axis=1)
            best, end = 1 + means[1:-1].argmax(), -int(means[-1] > means[0])
            gains.append(accuracy_ps[best, seed] - accuracy_ps[end, seed])
        ours.append(peak_of(accuracy_ps).evidence.value)
        assert ours[-1] == pytest.approx(np.mean(gains))
        means = accuracy_ps.mean(axis=1)
        same_seeds.append(means[1:-1].max() - max(means[0], means[-1]))
    errors = [float(np.std(found, ddof=1)) / num_sweeps**0.5 for found in (ours, same_seeds)]
    assert abs(np.mean(ours)) < 3 * errors[0]
    assert np.mean(same_seeds) > 10 * errors[1]


def test_a_trend_over_fewer_than_five_teachers_has_no_interval() -> None:
    """Three values of p are in order by chance in one draw of six; resampling them then gives [1, 1]."""
    rows = [sweep_row(p, 0.5 + p / 2, 0.5 + p / 3, 0.5, 0.4) for p in (0.0, 0.2, 0.4, 0.6, 0.8)]
    few = of(claims_stochastic_depth(sweep_file(rows[:4])), "similarity within phases")
    assert few.verdict is UNDETERMINED and (few.evidence.value, few.evidence.lower) == (pytest.approx(1), None)
    assert of(claims_stochastic_depth(sweep_file(rows)), "similarity within phases").verdict is AGREES


def test_seeds_at_one_p_test_only_the_association() -> None:
    """The paper's claims are about what changes with p, and its association is over p."""
    sizes = (0.2, 0.5, 0.3, 0.6, 0.4, 0.7)
    rows = [replace(sweep_row(0.3, x, 0.2 + x / 2, 0.5, x), seed=seed) for seed, x in enumerate(sizes)]
    *others, claim = claims_stochastic_depth(sweep_file(rows))
    assert "at one p as well (p = 0.3)" in claim.says and claim.verdict is AGREES
    # The page still names every claim of Figure 4, as one without a run does.
    assert [c.says for c in others] == [c.says for c in claims_stochastic_depth(None)]
    assert set(verdicts(others)) == {NOT_TESTED}
    mixed = [*rows, replace(rows[0], p=0.6)]
    assert "at one p" not in " ".join(claim.says for claim in claims_stochastic_depth(sweep_file(mixed)))


def test_a_raptor_that_diverged_is_left_out_of_the_trends() -> None:
    rows = [sweep_row(i / 10, 0.4 + i / 20, 0.3 + i / 20, 0.5, 0.4) for i in range(10)]
    rows[0] = replace(rows[0], raptor=replace(rows[0].raptor, r2_last=None))
    found = sweep_file(rows)
    assert found.statistics.trends["r2"].num == 9 and found.statistics.trends["similarity"].num == 10
    assert of(claims_stochastic_depth(found), "plain R2 of the last layer").verdict is AGREES


def test_partitions_need_three_seeds_of_max_cut() -> None:
    def claim(z: list[float]) -> Claim:
        score = ZScore(value=0.5, mean=0.4, deviation=0.1, z=z[0], below=0.9, num=10)
        rows = [PartitionRow(k=2, way="random", phases=[n, 12 - n], accuracy=0.5 - n / 100) for n in range(1, 6)]
        ways = {2: {"maxcut": {"accuracy": score, "r2_last": score}}}
        return of(claims_partitions(Partitions(rows=rows, statistics=ways, maxcut_z={2: z})), "(k = 2)")

    assert claim([1.4]).verdict is UNDETERMINED and "z = +1.40" in claim([1.4]).measured
    assert claim([1.4, 1.5, 1.45]).verdict is AGREES
    assert claim([-0.2, -0.3, -0.25]).verdict is DISAGREES
    assert claim([0.2, 1.9, 1.0]).verdict is UNDETERMINED
    assert claim([1.4, 1.5, 1.45]).evidence.value == pytest.approx(over_seeds([1.4, 1.5, 1.45])[0])

    def two(accuracy: float, num: int) -> Verdict:
        made = [PartitionRow(k=2, way="maxcut", phases=[6, 6], seed=s, accuracy=accuracy) for s in range(num)]
        rows = [replace(row, teacher_accuracy=0.8 + 0.001 * row.seed) for row in made]
        return of(claims_partitions(Partitions(rows=rows, statistics={})), "with 2 blocks").verdict

    assert [two(0.79, 3), two(0.79, 1), two(0.5, 3)] == [AGREES, UNDETERMINED, NOT_TESTED]
    assert "longest phase: Pearson" in claim([1.4]).measured and "over 5 partitions" in claim([1.4]).measured
    assert set(verdicts(claims_partitions(None))) == {NOT_TESTED}


def untrained_row(kind: str, seed: int, similarity: float, plain: float, bounded: float) -> UntrainedRow:
    curves = {name: GroupCurves(r2=[plain], bounded_r2=[bounded]) for name in ("cls", "patches")}
    means = {
        "all": SimilarityMeans(off_diagonal=1 - similarity, within_phases=similarity),
        "cls": SimilarityMeans(off_diagonal=similarity, within_phases=similarity),
    }
    nulls = {"mean": {name: NullCurves(r2=[plain / 2], bounded_r2=[0.0]) for name in curves}}
    return UntrainedRow(
        kind=kind,
        seed=seed,
        teacher=TeacherScores(accuracy=0.5, train_accuracy=0.5),
        similarity=TeacherSimilarity(within_phases=similarity, off_diagonal=1 - similarity, means=means),
        raptor=RaptorScores(phases=[4, 4, 4], curves=curves, nulls=nulls),
    )


def test_untrained_verdicts_need_three_seeds_and_hold_for_each_group() -> None:
    def rows(seeds: int, spread: float = 0.001) -> Untrained:
        kinds = {"trained": (0.9, 0.2, 0.8), "untrained": (0.7, 0.9, 0.5), "overfitted": (0.8, 0.1, 0.6)}
        made = []
        for kind, values in kinds.items():
            for seed in range(seeds):
                off = spread * seed if kind == "trained" else 0.0
                made.append(untrained_row(kind, seed, *(x + off for x in values)))
        return Untrained(rows=made)

    one = claims_untrained(rows(1))
    assert set(verdicts(one)) == {UNDETERMINED}
    three = claims_untrained(rows(3))
    assert of(three, "layer-layer similarity of all tokens").verdict is DISAGREES
    assert of(three, "layer-layer similarity of cls tokens").verdict is AGREES
    assert of(three, "reconstruction of the output cls (bounded").verdict is AGREES
    assert of(three, "reconstruction of the output cls (plain").verdict is DISAGREES
    gain = of(three, "output cls gains over the best null")
    assert gain.evidence.value == pytest.approx((0.2 + 0.001) / 2 - 0.9 / 2)
    assert of(three, "easier to reconstruct than overfitted ones (plain").verdict is AGREES
    assert of(three, "randomly initialised").verdict is AGREES
    assert of(claims_untrained(rows(3, spread=0.3)), "within phases of all").verdict is UNDETERMINED
    brief = claims_untrained(replace(rows(3), settings={"teacher_budget": "240steps", "teacher_batch": 128}))
    assert not [claim for claim in brief if claim.says.startswith("training")]
    few = {"teacher_budget": "240steps", "teacher_batch": 128, "limit": 1000}  # of so few images these are 30 epochs
    assert len(claims_untrained(replace(rows(3), settings=few))) > len(brief)
    assert verdicts(brief) == [DISAGREES, AGREES, AGREES]
    assert of(brief, "overfitted ones (plain") == of(three, "overfitted ones (plain")
    assert set(verdicts(claims_untrained(None))) == {NOT_TESTED}
