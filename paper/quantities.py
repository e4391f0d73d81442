"""The numbers behind the claims, from the JSON of a run: each function returns the number with its 95 % interval.

`claims.yaml` names these functions and their arguments. None where the run does not hold what the number needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import hypot, sqrt
from statistics import fmean

import numpy as np
from estimates import correlation, over_seeds
from numpy.typing import ArrayLike
from scipy import stats
from surrogates import best_null
from sweep import Json, column, entry, sum_of, where
from table1 import share_kept

from raptor import Phases, compare_pairs

PAPER_IMAGES = 40_000_000  # 20 epochs of 1,000,000 images in each of two stages
TABLE_3 = {"2": [7, 5], "3": [7, 3, 2], "4": [4, 3, 3, 2]}
_BATCH_SIZE = 128  # the default recipe's when tables did not record it
_MIN_PAIRS = 5  # four pairs are in one order by chance in 1 of 24 draws, and every resample of them then is too
_OVERFIT = 0.1  # a teacher overfits when it is so much better on training images
_COLLAPSED = 0.2  # share of the teacher's accuracy above chance
_EPOCH = 50_000  # images of CIFAR-100, on which the paper trains its small teachers, and of tiny-imagenet-100
# Estimates that depend on where depth is cut: there an untrained model with a cut of its own is another comparison.
_OF_THE_CUT = ("similarity.within", "speed.jump", "speed.between", "attraction.")
# The paper's perturbations have one size, whatever the norm of the state: only under them are these judged.
_OF_PERTURBATIONS = ("sensitivity", "path", "attraction")


@dataclass(frozen=True)
class Number:
    """A number and its interval.

    Attributes:
        basis: what the interval is over: `images` of a given model, `seeds` of one training, `runs` (models trained in
            different ways), untrained `twins` of one trained model, or `counted`, which has no error.
        num: how many of them.
        smaller_budget: the number is what a run with less training than the paper's reached.
    """

    value: float | None
    lower: float | None
    upper: float | None
    basis: str
    num: int = 0
    smaller_budget: bool = False


def _over_seeds(values: Sequence[float], basis: str = "seeds", smaller_budget: bool = False) -> Number | None:
    if not values:
        return None
    return Number(*over_seeds(values), basis, len(values), smaller_budget)


def _counted(value: float) -> Number:
    return Number(value, value, value, "counted")


# Depth as a dynamical system: results of `raptor dynamics`; `twins` are those of untrained models


def estimate(model: Json, key: str) -> Number | None:
    """A number that depth_numbers.py has written beside the result."""
    teacher = model["teacher"]
    found = teacher["estimates"].get(key)
    if found is None:
        return None
    if key.startswith(_OF_PERTURBATIONS) and (teacher["stability"] or {}).get("kind") != "paper":
        return None
    return Number(found["value"], found["lower"], found["upper"], "images", found["num_images"])


def estimates_of_twins(model: Json, key: str) -> tuple[tuple[Number, str], ...]:
    """The number of the first untrained model; where it depends on the cut, of the first with each kind of cut."""
    by_cut: dict[str, Number] = {}
    for twin in model["twins"]:
        number = estimate(twin, key)
        if number is not None and number.value is not None:
            by_cut.setdefault(cut_of_twin(model, twin) if key.startswith(_OF_THE_CUT) else "", number)
    return tuple(zip(by_cut.values(), by_cut))


def cut_of_twin(model: Json, twin: Json) -> str:
    kind = "cut alike" if twin["phases"] == model["phases"] else "its own cut"
    return f"{kind}, {sum_of(twin['phases'] or [])}"


def nearest_class_mean(model: Json, group: str) -> Number:
    """The share of images whose nearest class mean at the last layer is right."""
    basins = model["teacher"]["basins"]
    num = sum(basins["images_per_class"])
    num_right = basins["groups"][group]["accuracy"][-1] * num
    ends = stats.binomtest(round(num_right), num).proportion_ci(0.95, method="wilson")
    return Number(num_right / num, float(ends.low), float(ends.high), "images", num)


def trained_minus_untrained(model: Json, key: str) -> Number | None:
    """What training did to this model: its number minus that of each untrained seed.

    As in the paper each model has its own cut: one found on the trained model is not the best of an untrained one.
    """
    trained = estimate(model, key)
    at_own_cut: dict[int, float] = {}
    at_any_cut: dict[int, float] = {}
    for twin in model["twins"]:
        number = estimate(twin, key)
        if number is not None and number.value is not None:
            # The same weights measured twice are not two seeds.
            at_any_cut.setdefault(twin["seed"], number.value)
            if twin["phases"] != model["phases"]:
                at_own_cut.setdefault(twin["seed"], number.value)
    values = at_own_cut or at_any_cut
    if trained is None or trained.value is None or not values:
        return None
    value, lower, upper = over_seeds([trained.value - other for other in values.values()])
    if lower is None or upper is None or trained.lower is None or trained.upper is None:
        return Number(value, None, None, "twins", len(values))
    half = hypot(upper - value, 0.5 * (trained.upper - trained.lower))
    return Number(value, value - half, value + half, "twins", len(values))


# Stochastic depth


def trend_with_p(run: Json, measure: str) -> Number | None:
    return _of_correlation(run["statistics"]["trends"].get(measure), "spearman")


def similarity_with_r2(run: Json) -> Number | None:
    return _of_correlation(run["statistics"]["correlations"].get("similarity/bounded_r2"), "pearson")


def layerwise_trend(run: Json, group: str) -> Number | None:
    """Trend with p of the bounded R2, mean over layers."""
    means = []
    for row in run["rows"]:
        curve = row["raptor"]["curves"].get(group, {}).get("bounded_r2", [None])
        means.append(None if None in curve else fmean(curve))
    return _of_correlation(correlation(column(run["rows"], "p"), means), "spearman")


def accuracy_with_r2(run: Json) -> Number | None:
    """Correlation of the surrogate's accuracy with its R2.

    Teachers that do not overfit get worse with every p, so accuracy and R2 both follow p: they test nothing.
    """
    found = correlation(column(run["rows"], "raptor/accuracy"), column(run["rows"], "raptor/bounded_r2_last"))
    return _of_correlation(found, "pearson", smaller_budget=_overfit_by(run["rows"]) < _OVERFIT)


def _of_correlation(found: Json | None, kind: str, smaller_budget: bool = False) -> Number | None:
    """The correlation with its interval, which fewer than five pairs do not have; None where it is not defined."""
    if found is None or found[kind] is None:
        return None
    r = found[kind]
    if found["num"] < _MIN_PAIRS:
        return Number(r["value"], None, None, "runs", found["num"], smaller_budget)
    return Number(r["value"], r["lower"], r["upper"], "runs", found["num"], smaller_budget)


def _overfit_by(rows: Sequence[Json]) -> float:
    """By how much teachers at the smallest p are better on training images than on others."""
    differences = []
    for row in where(rows, p=min(column(rows, "p"))):
        differences.append(row["teacher"]["train_accuracy"] - row["teacher"]["accuracy"])
    return fmean(differences)


def accuracy_peak(run: Json) -> Number | None:
    """The best accuracy at a middle p minus the better one of the two ends.

    The best of several p is better than it will be again, so each seed is judged at the p that the other seeds choose.
    With one seed that has every p there are no others: the gain is then that of the means, and no verdict follows.
    The interval is the wider one of that over images and Student's over seeds. The paper speaks of teachers that
    overfit without stochastic depth; others test nothing.
    """
    by_p: dict[float, dict[int, float]] = defaultdict(dict)  # p -> seed -> accuracy
    for row in run["rows"]:
        by_p[row["p"]][row["seed"]] = row["teacher"]["accuracy"]
    if len(by_p) < 3:
        return None
    mean = {p: fmean(by_seed.values()) for p, by_seed in by_p.items()}
    best, end = _peak_and_end(mean)
    gain = mean[best] - mean[end]

    # The gain of each seed that every p has.
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in by_p.values())))
    gains = []
    if len(seeds) > 1:
        for seed in seeds:
            mean_of_others = {}
            for p, by_seed in by_p.items():
                mean_of_others[p] = fmean(by_seed[other] for other in seeds if other != seed)
            chosen, chosen_end = _peak_and_end(mean_of_others)
            gains.append(by_p[chosen][seed] - by_p[chosen_end][seed])

    num_seeds = max(1, len(gains))
    num_images = run["rows"][0]["raptor"]["num_images"] * num_seeds
    # Two standard errors of the difference of two accuracies of about this size, as if on different images.
    half = 2 * sqrt(2 * mean[best] * (1 - mean[best]) / num_images) if num_images else 0.0
    if gains:
        gain, lower, upper = over_seeds(gains)
        assert lower is not None and upper is not None
        half = max(half, 0.5 * (upper - lower))
    smaller_budget = _overfit_by(run["rows"]) < _OVERFIT
    return Number(gain, gain - half, gain + half, "seeds", num_seeds, smaller_budget)


def _peak_and_end(mean: dict[float, float]) -> tuple[float, float]:
    """The p between the smallest and the largest that has the highest mean, and the better one of these two."""
    first, *middle, last = sorted(mean)
    return max(middle, key=lambda p: mean[p]), max((first, last), key=lambda p: mean[p])


# Untrained


def by_training(run: Json, path: str) -> Number | None:
    """A measure of the trained teacher minus that of the untrained one, seed by seed."""
    if is_briefly_trained(run["settings"]):
        return None
    return _difference(run, "trained", "untrained", lambda row: entry(row, path))


def by_overfitting(run: Json, path: str) -> Number | None:
    return _difference(run, "untrained", "overfitted", lambda row: entry(row, path))


def gain_over_null_by_training(run: Json, group: str) -> Number | None:
    if is_briefly_trained(run["settings"]):
        return None

    def gain(row: Json) -> float | None:
        own = entry(row, f"raptor/curves/{group}/r2/-1")
        null = best_null(row["raptor"], group)
        if own is None or null is None:
            return None
        return float(own - null)

    return _difference(run, "trained", "untrained", gain)


def untrained_r2(run: Json) -> Number | None:
    values = column(where(run["rows"], kind="untrained"), "raptor/curves/cls/r2/-1")
    return _over_seeds([value for value in values if value is not None])


def _difference(run: Json, first: str, second: str, measure: Callable[[Json], float | None]) -> Number | None:
    """A measure of one kind of teacher minus that of another one of the same seed."""
    of_kind: dict[str, dict[int, float]] = defaultdict(dict)
    for row in run["rows"]:
        value = measure(row)
        if value is not None:
            of_kind[row["kind"]][row["seed"]] = value
    differences = []
    for seed, value in of_kind[first].items():
        if seed in of_kind[second]:
            differences.append(value - of_kind[second][seed])
    return _over_seeds(differences)


def is_briefly_trained(settings: Json) -> bool:
    """Whether teachers saw their images fewer than ten times; not known of budgets in seconds.

    What training does depends on how long it goes on, so such teachers say nothing about it.
    """
    budget = settings.get("teacher_budget", "20epochs")
    if budget.endswith("epochs"):
        return float(budget.removesuffix("epochs")) < 10
    if budget.endswith("steps"):
        images = float(budget.removesuffix("steps")) * settings.get("teacher_batch", 0)
        return images / (settings.get("limit") or _EPOCH) < 10
    return False


# Partitions


def maxcut_z(run: Json, k: str) -> Number | None:
    """Where max-cut stands among random partitions, in their deviations, each seed of it once."""
    accuracy = run["statistics"][k].get("maxcut", {}).get("accuracy")
    if accuracy is None or accuracy["z"] is None:
        return None
    return _over_seeds((run.get("maxcut_z") or {}).get(k) or [accuracy["z"]])


def two_blocks_keep(run: Json) -> Number | None:
    """The share of the teacher's accuracy that max-cut surrogates with two blocks keep; ours train for less."""
    kept = []
    for row in where(run["rows"], k=2, way="maxcut"):
        if row.get("accuracy") is not None and row.get("teacher_accuracy"):
            kept.append(row["accuracy"] / row["teacher_accuracy"])
    return _over_seeds(kept, smaller_budget=True)


# Swaps: of one model over images, or of the teachers of a sweep. `without` is 1 where block 1 is left out.


def turn_across_minus_within(run: Json, without: int) -> Number | None:
    """How much more a swap across phases turns the last state, at equal distance."""
    if "rows" in run:
        values = []
        for row in learned(run):
            if row["angle"]:
                means = _turns(row, row["angle"], without)
                values.append(means["across_matched"] - means["within_matched"])
        return _over_finite(values)
    found = _turns(run, run["angle"], without)
    value = found["across_matched"] - found["within_matched"]
    if not np.isfinite(value):
        return None
    deviation = _paired(run, "turn", without)
    if deviation is None and run["angle_std"] is not None:
        # Deviations of all pairs as if fully correlated, so the interval is too wide rather than too narrow.
        errors = _turns(run, run["angle_std"], without)
        deviation = errors["across_matched"] + errors["within_matched"]
    if deviation is None:
        return Number(value, None, None, "images", run["num_images"])
    half = 1.96 * deviation / sqrt(run["num_images"])
    return Number(value, value - half, value + half, "images", run["num_images"])


def predictions_stay(run: Json, kind: str, without: int) -> Number | None:
    """Share of the predictions that stay after a swap, mean over pairs."""
    shares = run.get("stays", (None, None))[without]
    if shares is None or shares[kind] is None or not np.isfinite(shares[kind]):
        return None
    share = shares[kind]
    return Number(share, *_wilson(share, run["num_images"]), "images", run["num_images"])


def predictions_within_minus_across(run: Json, without: int) -> Number | None:
    """The same at equal distance: within a phase minus across phases."""
    shares = run.get("stays", (None, None))[without]
    if shares is None:
        return None
    num = run["num_images"]
    near = shares["within_matched"]
    far = shares["across_matched"]
    if near is None or far is None or not np.isfinite(near - far):
        return None
    deviation = _paired(run, "agreement", without)
    if deviation is None:
        return Number(near - far, None, None, "images", num)
    half = 1.96 * max(deviation, 1 / num) / sqrt(num)
    return Number(near - far, max(-1.0, near - far - half), min(1.0, near - far + half), "images", num)


def accuracy_kept(run: Json, kind: str, without: int) -> Number | None:
    """Share of the accuracy kept, mean over pairs, over the teachers that learned something."""
    return _over_finite([_kept(row, without)[kind] for row in learned(run)])


def accuracy_within_minus_across(run: Json, without: int) -> Number | None:
    values = []
    for row in learned(run):
        shares = _kept(row, without)
        values.append(shares["within_matched"] - shares["across_matched"])
    return _over_finite(values)


def _over_finite(values: Sequence[float]) -> Number | None:
    """Over teachers; one without such a pair of blocks has NaN and is left out."""
    return _over_seeds([value for value in values if np.isfinite(value)], "runs")


def learned(run: Json) -> list[Json]:
    """The teachers of a sweep that are more than twice as often right as a guess; a single model is none."""
    found = []
    for row in run.get("rows", []):
        if (row.get("accuracy") or 0) > 2 * (row.get("chance") or 1):
            found.append(row)
    return found


def swaps_of_model(row: Json) -> Json:
    """A row of swaps.json as the numbers of one model take it."""
    found = {name: row.get(name) for name in ("pairs", "angle", "angle_std", "phases", "num_images")}
    found["matched_std"] = row.get("matched_std", {})
    found["stays"] = [row["compared"].get("agreement"), row.get("without_first_agreement")]
    return found


def swaps_of_interventions(swaps: Json) -> Json:
    """The swaps of `raptor dynamics` in the same form."""
    found: Json = {
        "pairs": swaps["pairs"],
        "phases": swaps["phases"],
        "num_images": swaps["num_images"],
        "matched_std": swaps["matched_std"],
        "angle": swaps["angle"]["all"]["mean"],
        "angle_std": swaps["angle"]["all"]["std"],
        "stays": [None, None],
    }
    if swaps["agreement"] is not None:
        found["stays"] = [_turns(found, swaps["agreement"]["mean"], without) for without in (0, 1)]
    return found


def _turns(row: Json, values: ArrayLike, without: int) -> dict[str, float]:
    """Means over pairs of blocks of one phase and of two, plain and at equal distance."""
    left_out = (1,) if without else ()
    return compare_pairs(row["pairs"], np.array(values), Phases.from_lengths(row["phases"]), left_out)


def _paired(run: Json, name: str, without: int) -> float | None:
    """Deviation over images of the difference at equal distance; None where the run did not keep it."""
    kept: list[float | None] = run["matched_std"].get(name, [None, None])
    return kept[without]


def _kept(row: Json, without: int) -> dict[str, float]:
    """Share of the accuracy kept, means over pairs; NaN where there is no such pair."""
    return _turns(row, np.array(row["swapped_accuracy"]) / row["accuracy"], without)


def _wilson(share: float, num: int) -> tuple[float, float]:
    """The 95 % interval of a mean share over `num` images by Wilson's formula."""
    centre = share + 1.96**2 / (2 * num)
    spread = 1.96 * sqrt(share * (1 - share) / num + (1.96 / (2 * num)) ** 2)
    return (centre - spread) / (1 + 1.96**2 / num), (centre + spread) / (1 + 1.96**2 / num)


# Table 2


def teacher_forcing_keeps(run: Json) -> Number | None:
    """Accuracy of row 1 as a share of the teacher's, both less that of a guess.

    Undecided where row 2 keeps little, too: then nothing was learned that could collapse.
    """

    def above_chance(of: dict[str, float], row: str) -> float:
        return (of[row] - of["chance"]) / (of["teacher"] - of["chance"])

    found = _of_rows(run, lambda of: above_chance(of, "1"), is_share=True)
    if found is None or found.value is None or found.value > _COLLAPSED:
        return found
    kept = []
    for of in _by_number(run["rows"]).values():
        if "2" in of and "teacher" in of:
            kept.append(above_chance(of, "2"))
    if kept and fmean(kept) > _COLLAPSED:
        return found
    return Number(None, None, None, "seeds", found.num)


def lead(run: Json, row: int, but: int | None = None) -> Number | None:
    """A row's gain over the one before minus the largest gain of another one; row `but` is left out."""

    def quantity(of: dict[str, float]) -> float:
        gains = {}
        for before, after in pairwise("123456"):
            if after != str(but):
                gains[after] = of[after] - of[before]
        own = gains.pop(str(row))
        return own - max(gains.values())

    return _of_rows(run, quantity)


def step(run: Json, row: int) -> Number | None:
    """What a row gains over the one before."""
    return _of_rows(run, lambda of: of[str(row)] - of[str(row - 1)])


def _of_rows(run: Json, quantity: Callable[[dict[str, float]], float], is_share: bool = False) -> Number | None:
    """A quantity of each seed's accuracies; seeds without a row that it needs are left out.

    A gain that is missing may come with more training; that teacher forcing does not collapse needs no more.
    """
    values = []
    used = []
    for of in _by_number(run["rows"]).values():
        try:
            values.append(quantity(of))
        except KeyError:
            continue
        used.append(of)
    if not values:
        return None
    value, lower, upper = over_seeds(values)
    num_images = run["rows"][0]["num_images"]
    if lower is None and num_images:
        # One seed: at most two standard errors by the number of images.
        half = 2 * sqrt(0.5 / num_images)
        if is_share:
            half = 2 * sqrt(0.25 / num_images) / (used[0]["teacher"] - used[0]["chance"])
        lower = value - half
        upper = value + half
    steps = [sum(row["num_steps"].values()) for row in run["rows"] if row.get("num_steps")]
    is_small = bool(steps) and max(steps) * run["settings"].get("batch_size", _BATCH_SIZE) < PAPER_IMAGES
    return Number(value, lower, upper, "seeds", len(values), is_small and not is_share)


def _by_number(rows: Sequence[Json]) -> dict[int, dict[str, float]]:
    """Seed -> row number (and `teacher`, `chance`) -> accuracy."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for row in rows:
        of = {row["row"][0]: row["accuracy"], "teacher": row["teacher_accuracy"], "chance": row.get("chance") or 0.0}
        if row.get("refit") is not None:
            of["6"] = row["refit"]["accuracy"]
        for name, value in of.items():
            if value is not None:
                found[row["seed"]][name] = value
    return found


# Table 1 and Figure 5


def recovery(run: Json, task: str, k: int) -> Number | None:
    """Score of a task as a share of the teacher's, of each seed."""
    shares = []
    for raptor in where(_raptors(run), k=k):
        share = _share(run, raptor, task)
        if share is not None:
            shares.append(share)
    return _over_seeds(shares, smaller_budget=_is_small_table(run))


def classification_lead(run: Json) -> Number | None:
    """Whether every k keeps more in classification than in the other tasks, seed by seed: the smallest lead over k."""
    by_seed: dict[int, list[float]] = defaultdict(list)
    for raptor in _raptors(run):
        classify = _share(run, raptor, "classify")
        segment = _share(run, raptor, "segment")
        depth = _share(run, raptor, "depth")
        if classify is not None and segment is not None and depth is not None:
            by_seed[raptor["seed"]].append(classify - max(segment, depth))
    return _over_seeds([min(leads) for leads in by_seed.values()], smaller_budget=_is_small_table(run))


def smallest_step(run: Json, score: str) -> Number | None:
    """The smallest rise of a score from one k to the next."""
    smallest = [float(np.diff(curve).min()) for curve in _curves(run, score)]
    return _over_seeds(smallest, smaller_budget=_is_small_table(run))


def saturation(run: Json) -> Number | None:
    """The gain in accuracy from the second to the third k minus half of that from the first to the second."""
    rest = []
    for curve in _curves(run, "probes/classify/score"):
        if len(curve) > 2:
            first, second, third = curve[:3]
            rest.append((third - second) - 0.5 * (second - first))
    return _over_seeds(rest, smaller_budget=_is_small_table(run))


def _raptors(run: Json) -> list[Json]:
    cells = dict(run["cells"])
    cells.pop("teacher", None)
    return list(cells.values())


def _share(run: Json, raptor: Json, task: str) -> float | None:
    of_teacher = run["cells"].get("teacher", {}).get("probes", {}).get(task)
    if of_teacher is None or task not in raptor["probes"]:
        return None
    return share_kept(raptor["probes"][task], of_teacher)


def _is_small_table(run: Json) -> bool:
    """Whether the surrogates saw fewer images than the paper's."""
    raptors = _raptors(run)
    batch_size = run["settings"].get("batch_size") or _BATCH_SIZE
    return bool(raptors) and sum(raptors[0]["num_steps"].values()) * batch_size < PAPER_IMAGES


def _curves(run: Json, path: str) -> list[list[float]]:
    """The scores at `a/b` over k of each seed that has all of them."""
    by_seed: dict[int, dict[int, float]] = defaultdict(dict)
    ks = set()
    for raptor in _raptors(run):
        ks.add(raptor["k"])
        value = entry(raptor, path)
        if value is not None:
            by_seed[raptor["seed"]][raptor["k"]] = value
    curves = []
    for _, of_k in sorted(by_seed.items()):
        if len(ks) > 1 and len(of_k) == len(ks):
            curves.append([of_k[k] for k in sorted(ks)])
    return curves


# Single models


def rows_of_table_3(run: Json) -> Number | None:
    """How many rows of Table 3 the cuts of the authors' own matrix reproduce."""
    return _counted(sum(run["phases"][k] == lengths for k, lengths in TABLE_3.items()))


def above_smooth(run: Json, k: int) -> Number | None:
    """The contrast of a model's phases minus that of a matrix that changes gradually."""
    cut = (run.get("evidence") or {}).get(str(k))
    if cut is None or cut["contrast"] is None or cut["smooth"] is None:
        return None
    lower = None
    upper = None
    if cut["interval"]:
        lower = cut["interval"][0] - cut["smooth"]
        upper = cut["interval"][1] - cut["smooth"]
    return Number(cut["contrast"] - cut["smooth"], lower, upper, "images", run["num_images"])


def lowest_r2(run: Json) -> Number | None:
    """The R2 of a surrogate at its worst layer."""
    r2 = run["curves"]["all"]["r2"]
    layer = int(np.argmin(r2))
    lower, upper = run["intervals"]["r2"]["all"]
    return Number(r2[layer], lower[layer], upper[layer], "images", run["num_images"])


def flops_ratio(run: Json) -> Number | None:
    return _counted(run["costs"]["surrogate"]["flops"] / run["costs"]["teacher"]["flops"])


def levin_ratio(run: Json) -> Number | None:
    return _counted(run["fp32"]["ratio"])
