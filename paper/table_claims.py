"""The paper's claims about what surrogates keep (Table 1, Figure 5) and what each ingredient adds (Table 2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import sqrt
from statistics import fmean
from typing import Any

import numpy as np
from evidence import Basis, Claim, Evidence, over_seeds
from outcome import data_label
from records import Ablation, AblationRow, ProbedRaptor, ProbedTeacher, Table1, Table1Row

from raptor.fidelity.heads import share_kept

_PAPER_IMAGES = 40_000_000  # 20 epochs of 1,000,000 images in each of two stages
_BATCH_SIZE = 128  # the default recipe's when tables did not record it
PAPER_RECOVERY = {
    "classify": {"2": 81.2 / 84.5, "3": 83.0 / 84.5, "4": 83.2 / 84.5},
    "segment": {"2": 39.6 / 47.5, "3": 43.0 / 47.5, "4": 43.6 / 47.5},
    "depth": {"2": 0.578 / 0.648, "3": 0.578 / 0.618, "4": 0.578 / 0.607},
}


def claims_table1(found: Table1 | None) -> list[Claim]:
    """Recovery of each task at each k beside the paper's, the smaller ViT, and how accuracy and R2 go with k."""
    titles = {
        "classify": "of the teacher's ImageNet-1k accuracy",
        "segment": "of the teacher's ADE20K mIoU",
        "depth": "on NYUv2 depth (the teacher's RMSE over its own)",
    }
    raptors = [cell for cell in found.cells.values() if isinstance(cell, ProbedRaptor)] if found else []
    teacher = found.cells.get("teacher") if found else None
    rows = {row.k: row for row in found.rows if row.k != "teacher"} if found else {}
    settings = found.settings if found else {}
    small = bool(raptors) and _images_seen(raptors[0], settings) < _PAPER_IMAGES
    claims = []
    for task, title in titles.items():
        for k, paper in PAPER_RECOVERY[task].items():
            claim = Claim(place="Table 1", says=f"k = {k} keeps {paper:.1%} {title}; within 2 points")
            kept = _recoveries(raptors, teacher, int(k), task)
            if not kept:
                claims.append(claim)
                continue
            value, lower, upper = over_seeds(kept)
            text = f"{value:.1%}{_measured_on(settings, rows[k], task)}, {_images_text(raptors[0], settings)}"
            evidence = Evidence(
                value=value,
                lower=lower,
                upper=upper,
                basis=Basis.SEEDS,
                num=len(kept),
                above=paper - 0.02,
                smaller_budget=small,
            )
            claims.append(replace(claim, measured=text, evidence=evidence))
    claims.append(_strongest(raptors, teacher, small))
    claims.append(Claim(place="Table 1", says="k = 3 of a ViT-B is more accurate than the smaller DINOv2 ViT-S"))
    return [*claims, *_along_k(raptors, small)]


def _strongest(raptors: Sequence[ProbedRaptor], teacher: ProbedRaptor | ProbedTeacher | None, small: bool) -> Claim:
    """Whether every k keeps more in classification than in the other tasks, seed by seed."""
    says = "strongest on classification: the share kept there minus the larger one of the other tasks, smallest over k"
    claim = Claim(place="Section 3", says=says)
    by_seed: dict[int, list[float]] = defaultdict(list)
    by_k: dict[int, list[list[float]]] = defaultdict(list)
    for raptor in raptors:
        own = {task: _recoveries([raptor], teacher, raptor.k, task) for task in PAPER_RECOVERY}
        if all(own.values()):
            first, *others = (kept for (kept,) in own.values())
            by_seed[raptor.seed].append(first - max(others))
            by_k[raptor.k].append([first, *others])
    if not by_seed:
        return claim
    value, lower, upper = over_seeds([min(found) for found in by_seed.values()])
    evidence = Evidence(value=value, lower=lower, upper=upper, basis=Basis.SEEDS, num=len(by_seed), above=0.0)
    means = ((k, np.mean(by_k[k], axis=0)) for k in sorted(by_k))
    text = "; ".join(f"k = {k}: " + ", ".join(f"{kept:.1%}" for kept in mean) for k, mean in means)
    text = f"classification, segmentation, depth at {text}"
    return replace(claim, measured=text, evidence=replace(evidence, smaller_budget=small))


def _images_seen(raptor: ProbedRaptor, settings: dict[str, Any]) -> int:
    return sum(raptor.num_steps.values()) * (settings.get("batch_size") or _BATCH_SIZE)


def _images_text(raptor: ProbedRaptor, settings: dict[str, Any]) -> str:
    return f"after {_images_seen(raptor, settings):,} images (the paper: {_PAPER_IMAGES:,})"


def _recoveries(
    raptors: Sequence[ProbedRaptor], teacher: ProbedRaptor | ProbedTeacher | None, k: int, task: str
) -> list[float]:
    """Score as a share of the teacher's, of each seed."""
    own = teacher.probes.get(task) if teacher is not None else None
    if own is None or own.score is None:
        return []
    kept = []
    for raptor in raptors:
        found = raptor.probes.get(task)
        if raptor.k == k and found is not None and found.num_steps == own.num_steps:
            share = share_kept(found.score, own.score, own.higher_is_better)
            kept += [] if share is None else [share]
    return kept


def _measured_on(settings: dict[str, Any], row: Table1Row, task: str) -> str:
    """Our data, which is not the paper's, and how often the best learning rate was the grid's smallest or largest."""
    spec = settings.get("data" if task == "classify" else task)
    at_edge = row.scores[task].at_edge
    parts = [data_label(spec)] if spec else []
    parts += [f"learning rate at the grid's edge in {at_edge} of {row.num_seeds} probes"] if at_edge else []
    return f" ({'; '.join(parts)})" if parts else ""


def _along_k(raptors: Sequence[ProbedRaptor], small: bool) -> list[Claim]:
    """Accuracy and R2 rise with k, and accuracy saturates: its gain from 3 to 4 is below half of that from 2 to 3."""
    by_k: dict[int, dict[int, ProbedRaptor]] = defaultdict(dict)
    for raptor in raptors:
        by_k[raptor.k][raptor.seed] = raptor
    scores: dict[str, Callable[[ProbedRaptor], float | None]] = {
        "accuracy": lambda raptor: raptor.probes["classify"].score,
        "R2 of the last layer": lambda raptor: raptor.r2_last,
    }
    claims = []
    for name, score in scores.items():
        curves = _curves(by_k, score)
        smallest = [min(b - a for a, b in pairwise(curve)) for curve in curves]
        claims.append(_of_k(f"{name} rises with k (smallest step)", smallest, sorted(by_k), curves, small, above=0.0))
    curves = [curve for curve in _curves(by_k, scores["accuracy"]) if len(curve) > 2]
    rest = [(curve[2] - curve[1]) - 0.5 * (curve[1] - curve[0]) for curve in curves]
    says = "accuracy rises markedly from k = 2 to 3 and saturates at k = 4 (second gain below half of the first)"
    return [*claims, _of_k(says, rest, sorted(by_k), curves, small, below=0.0)]


def _curves(
    by_k: dict[int, dict[int, ProbedRaptor]], score: Callable[[ProbedRaptor], float | None]
) -> list[list[float]]:
    """The scores over k of each seed that has all of them."""
    seeds = sorted(set.intersection(*(set(found) for found in by_k.values()))) if len(by_k) > 1 else []
    curves = [[score(by_k[k][seed]) for k in sorted(by_k)] for seed in seeds]
    return [[v for v in curve if v is not None] for curve in curves if None not in curve]


def _of_k(
    says: str,
    values: list[float],
    ks: list[int],
    curves: list[list[float]],
    small: bool,
    above: float | None = None,
    below: float | None = None,
) -> Claim:
    claim = Claim(place="Figure 5", says=says)
    if not values:
        return claim
    value, lower, upper = over_seeds(values)
    shown = ", ".join(f"{v:.3f}" for v in np.mean(curves, axis=0))
    evidence = Evidence(
        value=value,
        lower=lower,
        upper=upper,
        basis=Basis.SEEDS,
        num=len(values),
        above=above,
        below=below,
        smaller_budget=small,
    )
    return replace(claim, measured=f"{shown} at k = {', '.join(map(str, ks))}", evidence=evidence)


def claims_ablation(found: Ablation | None) -> list[Claim]:
    """Whether each row of Table 2 improves on the one before it, seed by seed."""
    base = found.settings.get("base", "paper") if found else "paper"
    place = "Table 2" if base == "paper" else f"Table 2, with the {base} recipe"
    collapse = (
        "teacher forcing by itself collapses (3.9 of 84.5 %: below a fifth of the teacher's accuracy above chance)"
    )
    largest = "the autoregressive loss brings the largest gain (+ 68.8 points): its lead over the next"
    second = "the joint stage brings the second largest gain (+ 5.7 points): its lead over the rest"
    steps = {
        "3": "depth scaling adds (+ 2.5 points)",
        "4": "weighting cls in the last phase adds (+ 1.5 points)",
        "5": "the joint stage adds (+ 5.7 points)",
        "6": "fitting the probe again adds (+ .6 points)",
    }
    rows = _by_number(found.rows) if found else {}
    num_images = found.rows[0].num_images if found and found.rows else None
    claims = [_collapse(_seeded(place, collapse, rows, num_images, lambda of: _above_chance(of, "1"), below=0.2), rows)]
    claims.append(_seeded(place, largest, rows, num_images, lambda of: _lead(of, "2"), above=0.0))
    claims.append(_seeded(place, second, rows, num_images, lambda of: _lead(of, "5", but="2"), above=0.0))
    for number, says in steps.items():
        before = str(int(number) - 1)
        claims.append(
            _seeded(place, says, rows, num_images, lambda of, n=number, b=before: of[n] - of[b], above=0.0)  # type: ignore[misc]
        )
    rate = found.settings.get("lr") if found else None  # another one than the base recipe's
    if rate is not None:
        claims = [replace(c, measured=f"{c.measured}; learning rate {rate:g}") if c.measured else c for c in claims]
    return [_of_budget(claim, found is not None and _is_small(found)) for claim in claims]


def _of_budget(claim: Claim, small: bool) -> Claim:
    """A gain that is missing may come with more training; that teacher forcing does not collapse needs no more."""
    if claim.evidence is None or claim.evidence.above is None:
        return claim
    return replace(claim, evidence=replace(claim.evidence, smaller_budget=small))


def _collapse(claim: Claim, rows: dict[int, dict[str, float]]) -> Claim:
    """The claim, undecided where both rows keep little: then nothing was learned that could collapse."""
    e, kept = claim.evidence, [_above_chance(of, "2") for of in rows.values() if {"2", "teacher"} <= of.keys()]
    if e is None or e.value is None or e.below is None or e.value > e.below or (kept and fmean(kept) > e.below):
        return claim
    beside = f"with the autoregressive loss {fmean(kept):.1%}" if kept else "the autoregressive row was not run"
    text = f"{claim.measured}; {beside}, so that it is not known what a trained one keeps"
    return replace(claim, measured=text, evidence=replace(e, value=None, lower=None, upper=None))


def _is_small(found: Ablation) -> bool:
    """Whether the rows saw fewer images than the paper's."""
    steps = [sum(row.num_steps.values()) for row in found.rows if row.num_steps]
    return bool(steps) and max(steps) * found.settings.get("batch_size", _BATCH_SIZE) < _PAPER_IMAGES


def _by_number(rows: Sequence[AblationRow]) -> dict[int, dict[str, float]]:
    """Seed -> row number (and `teacher`) -> accuracy."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for row in rows:
        numbers = {row.row[0]: row.accuracy, "teacher": row.teacher_accuracy, "chance": row.chance or 0.0}
        numbers |= {"6": row.refit.accuracy} if row.refit is not None else {}
        found[row.seed] |= {name: value for name, value in numbers.items() if value is not None}
    return found


def _above_chance(of: dict[str, float], row: str) -> float:
    """A row's share of the teacher's accuracy, both less that of a guess."""
    return (of[row] - of["chance"]) / (of["teacher"] - of["chance"])


def _lead(of: dict[str, float], row: str, but: str = "") -> float:
    """A row's gain minus the largest gain of another one; rows in `but` are left out."""
    gains = {b: of[b] - of[a] for a, b in pairwise("123456") if b not in but}
    return gains.pop(row) - max(gains.values())


def _seeded(
    place: str,
    says: str,
    rows: dict[int, dict[str, float]],
    num_images: int | None,
    quantity: Callable[[dict[str, float]], float],
    above: float | None = None,
    below: float | None = None,
) -> Claim:
    """A claim about a quantity of each seed's accuracies; seeds without a row it needs are left out."""
    claim, values, used = Claim(place=place, says=says), [], []
    for of in rows.values():
        try:
            values.append(quantity(of))
        except KeyError:
            continue
        used.append(of)
    if not values:
        return claim
    value, lower, upper = over_seeds(values)
    seeds = "one seed" if len(values) == 1 else f"{len(values)} seeds"
    text = f"{value:.1%} ({seeds})" if below is not None else f"{100 * value:+.1f} points ({seeds})"
    if lower is None and num_images:  # of one seed: at most two standard errors by the number of images
        half = 2 * (
            sqrt(0.5 / num_images)
            if below is None
            else sqrt(0.25 / num_images) / (used[0]["teacher"] - used[0]["chance"])
        )
        lower, upper = value - half, value + half
    evidence = Evidence(
        value=value, lower=lower, upper=upper, basis=Basis.SEEDS, num=len(values), above=above, below=below
    )
    return replace(claim, measured=text, evidence=evidence)
