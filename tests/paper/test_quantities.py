"""The numbers behind the claims, from runs made up for them: each needs its seeds, and leaves nothing out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import quantities
from estimates import over_seeds
from quantities import Number
from scipy import stats
from stochastic_depth import statistics
from sweep import Json
from verdict import Verdict, judge

AGREES, DISAGREES, UNDETERMINED, _, NOT_TESTED = Verdict


def sweep_row(p: float, similarity: float, r2: float | None, teacher: float, raptor: float, seed: int = 0) -> Json:
    curves = {group: {"r2": [r2], "bounded_r2": [r2]} for group in ("all", "cls", "patches")}
    scores = dict(accuracy=raptor, num_images=5000, bounded_r2_last=r2, r2_last=r2, curves=curves)
    means = dict(off_diagonal=similarity, within_phases=similarity)
    known = dict(accuracy=teacher, train_accuracy=1.0)
    return dict(p=p, seed=seed, teacher=known, similarity=means, raptor=scores)


def sweep(rows: list[Json]) -> Json:
    return {"rows": rows, "statistics": statistics(rows), "settings": {}}


def near(value: float, *ends: float) -> Any:
    """A value and the ends of its interval, to be compared with those of a number."""
    return pytest.approx([value, *ends], abs=1e-4)


def ends_of(number: Number | None) -> list[float | None]:
    assert number is not None
    return [number.value, number.lower, number.upper]


def wilson(num_right: int, num: int) -> tuple[float, float]:
    ends = stats.binomtest(num_right, num).proportion_ci(0.95, method="wilson")
    return ends.low, ends.high


def test_trends_of_a_sweep_and_of_its_mirror() -> None:
    points = [i / 10 for i in range(6)]
    up = sweep([sweep_row(p, 0.4 + 0.5 * p, 0.3 + 0.6 * p, 0.5, 0.3 + 0.1 * p) for p in points])
    down = sweep([sweep_row(p, 0.9 - 0.5 * p, 0.9 - 0.6 * p, 0.5 - 0.4 * p, 0.5 - 0.5 * p) for p in points])
    for measure in ("similarity", "within_phases", "bounded_r2", "r2"):
        assert judge(quantities.trend_with_p(up, measure), 0, None) is AGREES
        assert judge(quantities.trend_with_p(down, measure), 0, None) is DISAGREES
    assert judge(quantities.trend_with_p(up, "gap"), None, 0) is AGREES
    assert judge(quantities.trend_with_p(down, "gap"), None, 0) is DISAGREES
    assert judge(quantities.similarity_with_r2(down), 0.7, None) is AGREES  # they still go together
    assert judge(quantities.accuracy_with_r2(down), -0.5, 0.5) is DISAGREES
    # Four values of p are in order by chance in one draw of 24; resampling them then gives [1, 1].
    few = quantities.trend_with_p(sweep(up["rows"][:4]), "within_phases")
    assert few == Number(pytest.approx(1), None, None, "runs", 4)
    # Figure 4B is about all layers: one that rises is not enough where the others fall.
    for i, row in enumerate(up["rows"]):
        row["raptor"]["curves"]["cls"]["bounded_r2"] = [0.9 - i / 10, 0.9 - i / 10, 0.5 + i / 20]
    assert judge(quantities.layerwise_trend(up, "cls"), 0, None) is DISAGREES
    assert judge(quantities.layerwise_trend(up, "patches"), 0, None) is AGREES


def test_decoupled_is_neither_a_direct_nor_an_inverse_association() -> None:
    r2 = np.linspace(0.3, 0.9, 60)
    wave = np.tile([0.02, -0.02], 30)
    for accuracy, verdict in (
        (0.5 + wave, AGREES),
        (r2 + wave, DISAGREES),
        (1 - r2 + wave, DISAGREES),
        (0.5 + 0.06 * r2 + wave, UNDETERMINED),
        (0.5 - 0.06 * r2 + wave, UNDETERMINED),
    ):
        rows = [sweep_row(0.1, 0.5, float(x), 0.5, float(y)) for x, y in zip(r2, accuracy)]
        number = quantities.accuracy_with_r2({"rows": rows})
        assert judge(number, -0.5, 0.5) is verdict
        assert number is not None and number.value == pytest.approx(np.corrcoef(r2, accuracy)[0, 1])


def peak_of(accuracy_ps: Any) -> Number:
    """The number of the peak in a sweep with these accuracies, by p and seed; NaN where there is no run."""
    rows = []
    for i, accuracies in enumerate(np.asarray(accuracy_ps)):
        for seed, accuracy in enumerate(accuracies):
            if not np.isnan(accuracy):
                rows.append(sweep_row(i / 10, 0.5, 0.5, float(accuracy), 0.4, seed))
    number = quantities.accuracy_peak({"rows": rows})
    assert number is not None
    return number


def test_the_p_of_a_peak_is_chosen_on_the_other_seeds() -> None:
    """Worked by hand. Seed 0 is judged at the p that seeds 1 and 2 choose, and so on."""
    accuracy_ps = np.array([[50, 50, 50], [60, 54, 53], [52, 58, 51], [40, 40, 62]]) / 100
    gains = [0.52 - 0.40, 0.54 - 0.40, 0.53 - 0.50]  # p = .2 and .3, .1 and .3, .1 and 0
    found = peak_of(accuracy_ps)
    half = 4.302653 * (np.var(gains, ddof=1) / 3) ** 0.5  # t with two degrees of freedom
    expected = [0.29 / 3, 0.29 / 3 - half, 0.29 / 3 + half]
    assert [found.value, found.lower, found.upper] == pytest.approx(expected) and found.num == 3
    # A further seed without the largest p changes nothing.
    more = peak_of(np.concatenate([accuracy_ps, [[0.1], [0.9], [0.9], [np.nan]]], axis=1))
    assert more.num == 3 and more.value == pytest.approx(found.value)
    # Seeds that are alike have the interval over images, and one seed is no verdict.
    alike = peak_of([[0.5] * 4, [0.6] * 4, [0.3] * 4])
    half = 2 * (2 * 0.6 * 0.4 / (4 * 5000)) ** 0.5
    assert [alike.value, alike.lower, alike.upper] == pytest.approx([0.1, 0.1 - half, 0.1 + half])
    one = peak_of([[0.5] * 4, [0.6] * 4, [0.55, *[np.nan] * 3], [0.3] * 4])
    assert judge(one, 0, None) is UNDETERMINED and one.num == 1 and one.value == pytest.approx(0.1)


def test_many_p_of_equal_accuracy_give_no_gain_on_average() -> None:
    """The gain at the p that is best on the same seeds is above 0 on average, though no p is better than another."""
    random, num_sweeps = np.random.default_rng(0), 200
    ours, same_seeds = [], []
    for _ in range(num_sweeps):
        accuracy_ps = random.normal(0.5, 0.02, size=(10, 3))
        ours.append(peak_of(accuracy_ps).value)
        means = accuracy_ps.mean(axis=1)
        same_seeds.append(means[1:-1].max() - max(means[0], means[-1]))
    errors = [float(np.std(found, ddof=1)) / num_sweeps**0.5 for found in (ours, same_seeds)]
    assert abs(np.mean(ours)) < 3 * errors[0] and np.mean(same_seeds) > 5 * errors[1]


def test_the_verdict_on_a_peak() -> None:
    def verdict(*middle: float) -> Verdict:
        return judge(peak_of([[0.5] * 3, middle, [0.3] * 3]), 0, None)

    assert verdict(0.55, 0.55, 0.55) is AGREES
    assert verdict(0.45, 0.45, 0.45) is DISAGREES
    assert verdict(0.501, 0.501, 0.501) is UNDETERMINED  # 0.1 points on 5,000 images are no peak
    assert verdict(0.5, 0.55, 0.6) is UNDETERMINED  # seeds that differ so much are no peak either


def test_partitions_are_judged_over_seeds_of_max_cut() -> None:
    ways = {"2": {"maxcut": {"accuracy": {"z": 1.4}}}}
    one = quantities.maxcut_z({"statistics": ways}, "2")
    assert one == Number(1.4, None, None, "seeds", 1)
    three = quantities.maxcut_z({"statistics": ways, "maxcut_z": {"2": [1.4, 1.5, 1.45]}}, "2")
    assert three == Number(*over_seeds([1.4, 1.5, 1.45]), "seeds", 3)

    def two(accuracy: float, num: int) -> Verdict:
        rows = [dict(k=2, way="maxcut", accuracy=accuracy, teacher_accuracy=0.8 + 0.001 * s) for s in range(num)]
        return judge(quantities.two_blocks_keep({"rows": rows}), 81.2 / 84.5 - 0.02, None)

    assert [two(0.79, 3), two(0.79, 1), two(0.5, 3)] == [AGREES, UNDETERMINED, DISAGREES]


def test_training_is_compared_seed_by_seed() -> None:
    rows = []
    for kind, r2 in (("trained", 0.9), ("untrained", 0.7), ("overfitted", 0.2)):
        for seed in range(3):
            nulls = {name: {"cls": {"r2": [value]}} for name, value in (("mean", 0.1), ("tied", r2 / 2))}
            curves = {"cls": {"r2": [r2 + 0.01 * seed * (kind == "trained")]}}
            rows.append(dict(kind=kind, seed=seed, raptor=dict(curves=curves, nulls=nulls)))
    run: Json = {"settings": {}, "rows": rows}
    found = quantities.by_training(run, "raptor/curves/cls/r2/-1")
    assert ends_of(found) == near(*over_seeds([0.2, 0.21, 0.22])) and found is not None and found.num == 3
    assert judge(quantities.by_overfitting(run, "raptor/curves/cls/r2/-1"), 0, None) is AGREES
    gain = quantities.gain_over_null_by_training(run, "cls")
    assert gain is not None and gain.value == pytest.approx((0.91 - 0.45) - (0.7 - 0.35))
    assert quantities.by_training(run, "raptor/curves/patches/r2/-1") is None
    assert ends_of(quantities.untrained_r2(run)) == near(*over_seeds([0.7] * 3))
    one = quantities.by_training({**run, "rows": rows[:4]}, "raptor/curves/cls/r2/-1")
    assert one == Number(pytest.approx(0.2), None, None, "seeds", 1)


@pytest.mark.parametrize(
    ("settings", "brief"),
    [
        ({}, False),
        ({"teacher_budget": "9epochs"}, True),
        ({"teacher_budget": "240steps", "teacher_batch": 128}, True),
        ({"teacher_budget": "400steps", "teacher_batch": 128, "limit": 5000}, False),
        ({"teacher_budget": "60s"}, False),
    ],
)
def test_teachers_that_saw_their_images_fewer_than_ten_times(settings: Json, brief: bool) -> None:
    assert quantities.is_briefly_trained(settings) is brief


def test_swaps_count_only_teachers_that_learned() -> None:
    def row(accuracy: float, within: float, across: float) -> Json:
        # blocks 1..3 in phases 2 | 1: the pair (1, 2) is within; block 1 loses everything
        swapped = [within * accuracy, 0.0, across * accuracy]
        pairs = [[1, 2], [1, 3], [2, 3]]
        return dict(
            p=0.1, phases=[2, 1], pairs=pairs, angle=[], accuracy=accuracy, chance=0.01, swapped_accuracy=swapped
        )

    run = {"rows": [*(row(0.5, 0.96 + i / 1000, 0.4) for i in range(3)), row(0.012, 0.0, 1.0)]}
    within, across = (quantities.accuracy_kept(run, kind, 0) for kind in ("within", "across"))
    assert ends_of(within) == near(*over_seeds([0.96, 0.961, 0.962]))
    assert across is not None and across.value == pytest.approx(0.2)
    matched = quantities.accuracy_within_minus_across(run, 0)
    assert matched is not None and matched.value == pytest.approx(0.961 - 0.4)
    last = quantities.accuracy_kept(run, "across", 1)
    assert last is not None and last.value == pytest.approx(0.4)  # without block 1 only the pair (2, 3) is left
    assert quantities.accuracy_kept(run, "within", 1) is None  # and none within a phase


def test_one_model_is_judged_over_images_and_only_with_deviations() -> None:
    # blocks 1..4 in phases 2 | 2: at distance 1 the pairs (1, 2) and (3, 4) are within, (2, 3) across
    pairs = [[1, 2], [1, 3], [1, 4], [2, 3], [2, 4], [3, 4]]
    stays = dict(within=0.6, across=0.3, within_matched=0.6, across_matched=0.4)
    row = dict(phases=[2, 2], pairs=pairs, angle=[1.4, 1.4, 1.4, 0.8, 1.0, 0.4], num_images=400)
    run = quantities.swaps_of_model({**row, "compared": {"agreement": stays}})
    plain, rest = (quantities.turn_across_minus_within(run, without) for without in (0, 1))
    assert plain == Number(pytest.approx(0.8 - 0.9), None, None, "images", 400)
    assert rest is not None and rest.value == pytest.approx(0.8 - 0.4)
    assert ends_of(quantities.predictions_stay(run, "within", 0)) == near(0.6, *wilson(240, 400))
    apart = quantities.predictions_within_minus_across(run, 0)
    assert apart == Number(pytest.approx(0.2), None, None, "images", 400)
    known = quantities.turn_across_minus_within({**run, "angle_std": [0.2] * 6}, 0)
    assert known is not None and known.upper == pytest.approx(-0.1 + 1.96 * 0.4 / 20)
    # The deviation of the difference itself is what counts where a run has kept it.
    paired = {**run, "angle_std": [9.0] * 6, "matched_std": {"turn": [0.1, 0.2], "agreement": [0.3, None]}}
    found = [quantities.turn_across_minus_within(paired, without) for without in (0, 1)]
    found.append(quantities.predictions_within_minus_across(paired, 0))
    halves = [number.upper - number.value for number in found if number and number.upper and number.value]
    assert halves == pytest.approx([1.96 * std / 20 for std in (0.1, 0.2, 0.3)])


def test_few_images_decide_nothing_where_all_or_none_stay() -> None:
    stays = dict(within=1.0, across=0.0, within_matched=1.0, across_matched=0.0)
    run = {"stays": [stays, None], "num_images": 16, "matched_std": {"agreement": [0.0, None]}}
    within, across = (quantities.predictions_stay(run, kind, 0) for kind in ("within", "across"))
    assert judge(within, 0.9, None) is UNDETERMINED
    assert across is not None and across.upper == pytest.approx(wilson(0, 16)[1], abs=1e-3)
    apart = quantities.predictions_within_minus_across(run, 0)
    assert apart is not None and apart.lower is not None and apart.lower < 1


def ablation(*seeds: tuple[float, ...], steps: int = 0, chance: float = 0.0) -> Json:
    names = ("1-teacher-forcing", "2-autoregressive", "3-depth", "4-weighted", "5-joint")
    rows = []
    for seed, accuracies in enumerate(seeds):
        for name, accuracy in zip(names, accuracies):
            refit = {"accuracy": accuracies[5]} if name == "5-joint" else None
            row = dict(row=name, seed=seed, num_images=50_000, accuracy=accuracy, teacher_accuracy=0.845, refit=refit)
            rows.append({**row, "chance": chance, "num_steps": {"stage1": steps} if steps else {}})
    return {"settings": {"batch_size": 64}, "rows": rows}


def ablation_verdicts(run: Json) -> list[Verdict]:
    gains = [quantities.lead(run, 2), quantities.lead(run, 5, 2), *(quantities.step(run, row) for row in (3, 4, 5, 6))]
    return [judge(quantities.teacher_forcing_keeps(run), None, 0.2), *(judge(gain, 0, None) for gain in gains)]


def test_ablation_verdicts_are_over_seeds() -> None:
    paper = (0.039, 0.727, 0.752, 0.767, 0.824, 0.830)
    near = tuple(a + 0.0005 for a in paper)
    assert ablation_verdicts(ablation(paper, near, paper)) == [AGREES] * 7
    second = quantities.lead(ablation(paper, near, paper), 5, 2)
    assert second is not None and second.value == pytest.approx(0.057 - 0.025)
    one = ablation(paper)
    assert ablation_verdicts(one) == [UNDETERMINED] * 7
    # The share of the teacher's accuracy has an error of its own: that of the accuracy over the teacher's.
    keeps = quantities.teacher_forcing_keeps(one)
    assert keeps is not None and keeps.upper is not None and keeps.value is not None
    assert keeps.upper - keeps.value == pytest.approx(2 * (0.25 / 50_000) ** 0.5 / 0.845)
    begun = ablation(paper, paper[:2])  # of a sweep that is not done yet
    assert getattr(quantities.teacher_forcing_keeps(begun), "num", 0) == 2
    assert getattr(quantities.step(begun, 3), "num", 0) == 1
    other = (0.6, 0.65, 0.64, 0.7, 0.8, 0.8)
    short = [tuple(a + 0.001 * i * j for j, a in enumerate(other)) for i in range(3)]
    long = [DISAGREES, DISAGREES, AGREES, DISAGREES, AGREES, AGREES, UNDETERMINED]
    # Less training than the paper's is no excuse.
    assert ablation_verdicts(ablation(*short, steps=625_000)) == ablation_verdicts(ablation(*short, steps=1000)) == long


def test_teacher_forcing_collapses_only_where_something_was_learned() -> None:
    nothing = ablation(*[(0.02, 0.03 + i / 1000, 0.03, 0.03, 0.04, 0.04) for i in range(3)], steps=1000)
    assert ablation_verdicts(nothing)[0] is NOT_TESTED
    # Where teacher forcing itself keeps much, it has not collapsed, whatever the next row does.
    kept = ablation(*[(0.4, 0.1 + i / 1000, 0.1, 0.1, 0.1, 0.1) for i in range(3)], steps=1000)
    assert ablation_verdicts(kept)[0] is DISAGREES
    # Accuracy counts above that of a guess: .24 of .845 is a collapse where a guess has .2.
    seeds = [(0.24 + i / 1000, 0.7, 0.7, 0.7, 0.7, 0.7) for i in range(3)]
    assert ablation_verdicts(ablation(*seeds))[0] is DISAGREES
    guessed = quantities.teacher_forcing_keeps(ablation(*seeds, chance=0.2))
    assert judge(guessed, None, 0.2) is AGREES and guessed is not None
    assert guessed.value == pytest.approx(0.041 / 0.645)


def table1(scores: dict[int, tuple[float, float, float]], steps: int = 1000) -> Json:
    """Scores of classification, segmentation and depth by k, three seeds; the teacher's are 1."""

    def probes(values: tuple[float, ...]) -> Json:
        made = dict(higher_is_better=True, num_steps=10)
        return {task: {"score": v, **made} for task, v in zip(("classify", "segment", "depth"), values)}

    cells: Json = {"teacher": {"k": None, "probes": probes((1.0, 1.0, 1.0))}}
    for k, (classify, segment, depth) in scores.items():
        for s in range(3):
            own = probes((classify + 0.001 * s, segment, depth))
            scored = dict(probes=own, r2_last=0.4 + k / 10 + 0.001 * s, num_steps={"stage1": steps, "stage2": steps})
            cells[f"k{k}-s{s}"] = dict(k=k, seed=s, **scored)
    return {"cells": cells, "settings": {"batch_size": 64}}


def test_table1_at_a_smaller_budget_is_judged_alike() -> None:
    def of_k(*classify: float) -> dict[int, tuple[float, float, float]]:
        return {k: (score, 0.5, 0.5) for k, score in zip((2, 3, 4), classify)}

    bounds = {k: paper / 84.5 - 0.02 for k, paper in ((2, 81.2), (3, 83.0), (4, 83.2))}
    for steps in (1000, 312_500):
        run = table1(of_k(0.95, 0.93, 0.9), steps)
        assert [judge(quantities.recovery(run, "classify", k), bounds[k], None) for k in (2, 3, 4)] == [
            AGREES,
            DISAGREES,
            DISAGREES,
        ]
    assert judge(quantities.smallest_step(run, "probes/classify/score"), 0, None) is DISAGREES
    assert judge(quantities.smallest_step(run, "r2_last"), 0, None) is AGREES
    assert judge(quantities.saturation(table1(of_k(0.9, 0.95, 0.955))), None, 0) is AGREES
    assert judge(quantities.saturation(table1(of_k(0.9, 0.91, 0.95))), None, 0) is DISAGREES
    # Strongest on classification: at every k and seed.
    found = quantities.classification_lead(table1({2: (0.9, 0.5, 0.8), 3: (0.85, 0.5, 0.8)}))
    assert found is not None and found.value == pytest.approx(0.051) and judge(found, 0, None) is AGREES
    other = quantities.classification_lead(table1({2: (0.9, 0.5, 0.8), 3: (0.75, 0.5, 0.8)}))
    assert judge(other, 0, None) is DISAGREES
