"""The paper's claims about single models: depth as a dynamical system, block swaps, certificate and complexity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import hypot, pi, sqrt

import numpy as np

from raptor.dynamics.interventions import WITHOUT, InterventionsFile, compare_pairs
from raptor.dynamics.measure import DynamicsFile, DynamicsResult
from raptor.experiments.evidence import Basis, Claim, Evidence, of_counts, over_seeds
from raptor.experiments.outcome import sum_of
from raptor.experiments.witness import TABLE_3, Witness
from raptor.fidelity.certificate import Certificate
from raptor.fidelity.complexity import Complexity
from raptor.phases import Phases

GROUPS = ("cls", "registers", "patches")


@dataclass(frozen=True)
class _Rule:
    """A claim, the key of the estimate that decides it, and its bounds; `{g}` stands for each token group."""

    place: str
    says: str
    key: str
    above: float | None = None
    below: float | None = None
    figure: str = ""


def _modes(fit: str, words: str) -> list[_Rule]:
    """The claims about the eigenvalues of one kind of DMD fit."""
    made: tuple[tuple[str, str, float | None, float | None], ...] = (
        ("cls modes lie closest to +1", "cls_distance_minus_least_other", None, 0),
        ("patches have the widest angles", "patches_angle_minus_widest_other", 0, None),
        ("patches contract most: least median modulus", "patches_modulus_minus_least_other", None, 0),
    )
    place, figure = "Figure 10, Appendix D", "dynamics-eigenvalues"
    return [
        _Rule(place, f"{says} ({words})", f"dmd.{fit}.{key}", above, below, figure) for says, key, above, below in made
    ]


_RATIO = "r = L / 4 as the paper's"
_RULES = (
    _Rule(
        "Figure 1", "layers are more alike within phases than across them", "similarity.within_minus_across", above=0
    ),
    _Rule("Figure 7", "feature norms grow with depth (last over first)", "norm.ratio.all", 1, None, "dynamics-norm"),
    _Rule(
        "Figure 7",
        "norms grow steadily: in every step (smallest ratio)",
        "norm.smallest_step.all",
        1,
        None,
        "dynamics-norm",
    ),
    _Rule(
        "Figure 6",
        "gamma of {g} saturates near 1: above .9 before the last block",
        "gamma.before_last.{g}",
        0.9,
        None,
        "dynamics-gamma",
    ),
    _Rule(
        "Figure 6",
        "gamma of {g} is S-shaped: it rises more in an inner step than in the last",
        "gamma.inner_rise.{g}",
        0,
        None,
        "dynamics-gamma",
    ),
    _Rule(
        "Section 4",
        "registers reach their direction first, then patches, then cls",
        "gamma.order",
        0,
        None,
        "dynamics-gamma",
    ),
    _Rule(
        "Figure 9",
        "registers have the smallest angular speed",
        "speed.registers_minus_slowest_other",
        None,
        0,
        "dynamics-speed",
    ),
    _Rule(
        "Section 4",
        "the variance of the speed is smallest for registers after early depth",
        "speed_variance.registers_minus_least_other",
        None,
        0,
        "dynamics-speed-variance",
    ),
    _Rule(
        "Figure 9",
        "cls turns sharply late: its largest turn is in the last quarter of depth",
        "speed.late_turn.cls",
        0,
        None,
        "dynamics-speed",
    ),
    _Rule(
        "Figure 9",
        "speed changes abruptly at phase boundaries: more than between other steps",
        "speed.jump_at_boundaries",
        0,
        None,
        "dynamics-speed",
    ),
    _Rule(
        "Figure 9",
        "speed is near-stationary within phases: more of its variance lies between them than for random phases",
        "speed.between_phases_minus_random",
        0,
        None,
        "dynamics-speed",
    ),
    _Rule(
        "Figure 8",
        "perturbed paths bend back: the angle of {g} ends smaller than it began",
        "path.kept_angle.{g}",
        None,
        1,
        "dynamics-perturbed-path",
    ),
    _Rule(
        "Figure 8",
        "sensitivity of patches falls with the injection layer (slope of its log)",
        "sensitivity.slope.patches",
        None,
        0,
        "dynamics-sensitivity",
    ),
    _Rule(
        "Figure 8",
        "that fall is log-linear (R2 of the line above .9)",
        "sensitivity.r2.patches",
        0.9,
        None,
        "dynamics-sensitivity",
    ),
    _Rule(
        "Figure 8",
        "sensitivity of cls rises when injected late (slope over the last third)",
        "sensitivity.late_slope.cls",
        0,
        None,
        "dynamics-sensitivity",
    ),
    _Rule(
        "Figure 10",
        "the stable rank of the updates of patches falls (late over early)",
        "rank.stable_late_over_early.patches",
        None,
        1,
        "dynamics-stable-rank",
    ),
    _Rule(
        "Figure 10",
        "the effective rank of the updates of patches falls (late over early)",
        "rank.effective_late_over_early.patches",
        None,
        1,
        "dynamics-effective-rank",
    ),
    _Rule(
        "Figure 10",
        "the stable rank ends near six (between 3 and 12)",
        "rank.stable_late.patches",
        3,
        12,
        "dynamics-stable-rank",
    ),
    _Rule(
        "Figure 10",
        "the effective rank ends near six (between 3 and 12)",
        "rank.effective_late.patches",
        3,
        12,
        "dynamics-effective-rank",
    ),
    _Rule(
        "Figure 10",
        "the coherence of patches peaks late (last third minus before)",
        "rank.coherence_late_peak.patches",
        0,
        None,
        "dynamics-coherence",
    ),
    _Rule(
        "Abstract",
        "patches gather late: their mean cosine with their mean direction rises over the last third",
        "gathering.alignment_late_rise.patches",
        0,
        None,
        "dynamics-gathering",
    ),
    _Rule(
        "Abstract",
        "late updates of patches turn toward their mean direction",
        "gathering.toward_late.patches",
        0,
        None,
        "dynamics-gathering",
    ),
    _Rule(
        "Figure 10, Appendix D",
        f"eigenvalues of {{g}} lie just inside the unit circle: radius between .9 and 1 ({_RATIO})",
        "dmd.ratio.spectral_radius.{g}",
        0.9,
        1,
        "dynamics-eigenvalues",
    ),
    _Rule(
        "Figure 10, Appendix D",
        f"eigenvalues of {{g}} concentrate near the positive real axis: weighted angle below pi / 4 ({_RATIO})",
        "dmd.ratio.weighted_angle.{g}",
        None,
        pi / 4,
        "dynamics-eigenvalues",
    ),
    *_modes("ratio", _RATIO),
    *_modes("pooled", f"one fit pooled over images, {_RATIO}"),
    *_modes("rank10", "r = 10"),
    _Rule(
        "Figure 10",
        "the singular spectrum decays slowest for cls (effective number of values)",
        "dmd.singular.cls_minus_largest_other",
        0,
        None,
        "dynamics-singular-values",
    ),
    _Rule(
        "Figure 10",
        "the singular spectrum decays fastest for patches (effective number of values)",
        "dmd.singular.patches_minus_least_other",
        None,
        0,
        "dynamics-singular-values",
    ),
)


def claims_dynamics(
    measured: DynamicsFile | None,
    witness: Witness | None = None,
    relative: DynamicsFile | None = None,
    twins: Sequence[DynamicsFile] = (),
) -> list[Claim]:
    """The claims about one model, with what stands beside its numbers.

    relative: the same model under relative perturbations. twins: untrained models of the same make, those first that
    stand beside its numbers.
    """
    if measured is None:
        return [Claim(place=rule.place, says=rule.says.format(g="every group")) for rule in _RULES]
    model = measured.teacher
    found = [claim for rule in _RULES for claim in _claims_of(rule, model)]
    found += [*_attraction(model), *_basins(model)]
    beside = [_with_twin(_beside(claim, model, witness, relative), measured, twins) for claim in found]
    return [*beside, *_more_alike(measured, twins)]


def _claims_of(rule: _Rule, model: DynamicsResult) -> list[Claim]:
    groups = [g for g in GROUPS if g in model.direction.norm] if "{g}" in rule.key else [""]
    claims = []
    for g in groups:
        key = rule.key.format(g=g)
        if key not in model.estimates:
            continue  # such as registers of a model that has none
        if key.startswith(("sensitivity", "path")) and (model.stability is None or model.stability.kind != "paper"):
            continue
        claims.append(_claim(rule.place, rule.says.format(g=g), model, key, rule.above, rule.below, rule.figure))
    return claims


def _claim(
    place: str, says: str, model: DynamicsResult, key: str, above: float | None, below: float | None, figure: str
) -> Claim:
    estimate = model.estimates[key]
    evidence = Evidence(
        value=estimate.value,
        lower=estimate.lower,
        upper=estimate.upper,
        basis=Basis.IMAGES,
        num=estimate.num_images,
        above=above,
        below=below,
    )
    return Claim(place=place, says=says, evidence=evidence, number=f"teacher/estimates/{key}", figure=figure)


def _attraction(model: DynamicsResult) -> list[Claim]:
    """Whether a perturbation made where a phase begins shrinks within it, over all tokens."""
    if model.stability is None or model.stability.kind != "paper":
        return []
    claims = []
    for number, phase in enumerate(model.attraction, start=1):
        says = (
            f"phase {number} (layers {phase.first} to {phase.last}) attracts: a perturbation's angle shrinks per step"
        )
        key = f"attraction.layers_{phase.first}_{phase.last}.all"
        if key in model.estimates:
            claim = _claim("Section 4", says, model, key, None, 1, "dynamics-attraction")
            rates = ", ".join(f"{g} {rate:.2f}" for g, rate in phase.rate.items() if g != "all")
            claims.append(replace(claim, measured=f"by group: {rates}"))
    return claims


def _basins(model: DynamicsResult) -> list[Claim]:
    if model.basins is None:
        return []
    claims, num = [], sum(model.basins.images_per_class)
    for g, found in model.basins.groups.items():
        value, lower, upper = of_counts(found.accuracy[-1] * num, num)
        evidence = Evidence(value=value, lower=lower, upper=upper, num=num, above=model.basins.chance)
        ratio = found.scatter_ratio
        text = f"{found.accuracy[0]:.0%} at layer 0; between/within scatter {ratio[-1]:.2f} at the end"
        says = f"{g} paths end in class-dependent basins: nearest class mean above chance at the last layer"
        claims.append(
            Claim(
                place="Figure 6",
                says=says,
                measured=text,
                evidence=evidence,
                number=f"teacher/basins/groups/{g}/accuracy/-1",
                figure="dynamics-paths",
            )
        )
    return claims


def _beside(claim: Claim, model: DynamicsResult, witness: Witness | None, relative: DynamicsFile | None) -> Claim:
    """The claim with what stands beside its number: depth, the authors' matrix, relative perturbations."""
    notes = [claim.measured] if claim.measured else []
    key = claim.number.removeprefix("teacher/estimates/")
    if witness is not None and key.startswith(("gamma.before_last", "gamma.inner_rise")):
        notes.append(f"the authors' ViT-B matrix (pooled): gamma_{len(witness.gamma) - 1} = {witness.gamma[-2]:.2f}")
    if witness is not None and key == "speed.late_turn.cls":
        turn = model.direction.speed["cls"].mean[-1]
        notes.append(f"last turn {turn:.2f} rad; the authors' ViT-B matrix (pooled) {witness.last_turn:.2f} rad")
    if key.startswith("sensitivity.slope"):
        notes.append("growing norms are part of this, because a perturbation of fixed size shrinks beside the state")
        if relative is not None and relative.teacher.stability is not None:
            found = relative.teacher.stability
            slope = found.log_slope()[0, found.groups.index("patches"), 0]
            notes.append(f"with sizes relative to the state {slope:+.3f}")
    if key == "speed_variance.registers_minus_least_other":
        found_by = model.direction.speed_variance
        late = {g: float(np.mean(v.images[max(1, len(v.images) // 3) :])) for g, v in found_by.items() if g != "all"}
        notes.append(f"over images only: {', '.join(f'{g} {value:.2g}' for g, value in late.items())}")
    if key == "gamma.order" and "registers" not in model.direction.norm:
        notes.append("it has no registers: patches against cls")
    if key == "sensitivity.late_slope.cls" and f"{_OWN}.cls" in model.estimates:
        notes.append(f"with only cls perturbed {model.estimates[f'{_OWN}.cls']}")
    return replace(claim, measured="; ".join(notes))


_OWN = "sensitivity.own_late_slope"


_OF_THE_CUT = ("similarity.", "speed.jump", "speed.between", "attraction.")
"""Estimates that depend on where depth is cut: there a twin with a cut of its own is another comparison."""


def _with_twin(claim: Claim, model: DynamicsFile, twins: Sequence[DynamicsFile]) -> Claim:
    """The claim with the same number of its untrained twins: what is there before training is no sign of it.

    The first twin; where the number depends on the cut the first with each kind of cut.
    """
    key = claim.number.removeprefix("teacher/estimates/")
    of_cut = key.startswith(_OF_THE_CUT)
    known = [twin for twin in twins if key in twin.teacher.estimates]
    shown = [found[0] for found in by_cut(model, known).values()] if of_cut else known[:1]
    parts = [claim.measured] if claim.measured else []
    for twin in shown:
        found = twin.teacher.estimates[key]
        cut = f", {twin_cut(model, twin)}" if of_cut else ""
        parts.append(f"its untrained twin {found} ({found.num_images:,} images{cut})")
    return replace(claim, measured="; ".join(parts))


def by_cut(model: DynamicsFile, twins: Sequence[DynamicsFile]) -> dict[bool, list[DynamicsFile]]:
    """Twins by whether they are cut as the trained model, in the order given."""
    found: dict[bool, list[DynamicsFile]] = defaultdict(list)
    for twin in twins:
        found[twin.phases == model.phases].append(twin)
    return found


def twin_cut(model: DynamicsFile, twin: DynamicsFile) -> str:
    """Where a twin is cut: as the trained model, or by its own similarity."""
    alike = twin.phases == model.phases
    return f"{'cut alike' if alike else 'its own cut'}, {sum_of(twin.phases or [])}"


def _more_alike(model: DynamicsFile, twins: Sequence[DynamicsFile]) -> list[Claim]:
    """Whether training made the phases of this model: its number minus that of each untrained seed.

    As in the paper each model has its own cut: one found on the trained model is not the best of an untrained one.
    """
    key = "similarity.within_minus_across"
    trained = model.teacher.estimates.get(key)
    cuts = by_cut(model, [twin for twin in twins if key in twin.teacher.estimates])
    same = cuts.get(False) or cuts.get(True, [])
    values = [v for twin in same if (v := twin.teacher.estimates[key].value) is not None]
    if trained is None or trained.value is None or not values:
        return []
    value, lower, upper = over_seeds([trained.value - v for v in values])
    evidence = Evidence(value=value, basis=Basis.SEEDS, num=len(values), above=0)
    if None not in (lower, upper, trained.lower, trained.upper):
        half = hypot(upper - value, 0.5 * (trained.upper - trained.lower))  # type: ignore[operator]
        evidence = replace(evidence, lower=value - half, upper=value + half)
    cut = " or ".join(dict.fromkeys(twin_cut(model, twin) for twin in same))
    text = f"trained {trained}, untrained {', '.join(f'{v:.3f}' for v in values)} ({cut}); one trained model"
    text += ", the interval is over untrained seeds" if len(values) > 1 else ""
    says = "training made layers of this model more alike within phases than across them (trained minus untrained)"
    return [Claim(place="Figure 11B", says=says, measured=text, evidence=evidence, recipe="untrained-twin")]


def claims_interventions(found: InterventionsFile) -> list[Claim]:
    """Block swaps of one model: how far the last state turns, within and across phases at equal distance."""
    if found.teacher is None:
        return []
    swaps = found.teacher.swaps
    turn = swaps.angle["all"]
    paired = swaps.matched_std.get("turn", [None] * len(WITHOUT))
    claims = [
        turn_claim(swaps.pairs, turn.mean, turn.std, swaps.phases, swaps.num_images, without, own)
        for without, own in zip(WITHOUT, paired)
    ]
    return [replace(claim, figure="interventions-swaps") for claim in claims]


def turn_says(without: Sequence[int]) -> str:
    suffix = ", without block 1" if without else ""
    return f"at equal distance a swap across phases turns the last state more than one within{suffix}"


def turn_claim(
    pairs: Sequence[tuple[int, int]],
    turn: np.ndarray,
    deviation: np.ndarray | None,
    phases: Phases,
    num_images: int,
    without: Sequence[int],
    paired: float | None = None,
) -> Claim:
    """How much more a swap across phases turns the last state; `turn` and its deviation over images are `(pairs,)`.

    paired: deviation over images of the difference itself. Without it the interval takes the deviations of all pairs as
    fully correlated, so it is too wide rather than too narrow.
    """
    claim = Claim(place="Section 2 (camera-ready)", says=turn_says(without))
    means = compare_pairs(pairs, turn, phases, without)
    value = means["across_matched"] - means["within_matched"]
    if not np.isfinite(value):
        return claim
    text = f"{means['across_matched']:.2f} rad across, {means['within_matched']:.2f} within"
    text += f" (at any distance {means['across']:.2f} and {means['within']:.2f})"
    evidence = Evidence(value=value, num=num_images, above=0)
    spread = paired
    if spread is None and deviation is not None:
        errors = compare_pairs(pairs, deviation, phases, without)
        spread = errors["across_matched"] + errors["within_matched"]
    if spread is None:
        text += "; the run kept no deviations over images, so there is no interval"
    else:
        half = 1.96 * spread / sqrt(num_images)
        evidence = replace(evidence, lower=value - half, upper=value + half)
    return replace(claim, measured=text, evidence=evidence)


def claims_certificate(certificate: Certificate | None, complexity: Complexity | None) -> list[Claim]:
    """One surrogate: whether it follows every layer, at the same compute, with a shorter description."""
    follows = Claim(
        place="Definition 1",
        says="k tied blocks reproduce every intermediate state: better than the data mean at each layer (lowest R2)",
    )
    compute = Claim(place="Section 3", says="at equal compute: FLOPs as a share of the teacher's within 10 %")
    shorter = Claim(place="Appendix E", says="the Levin bound of the surrogate is below the teacher's (ratio, fp32)")
    num = certificate.curves.num_images if certificate is not None else 0
    if certificate is not None:
        r2 = certificate.curves.r2["all"]
        layer = int(np.argmin(r2))
        ends = certificate.intervals["r2"][:, layer, certificate.curves.groups.index("all")]
        eps = certificate.eps["relative"]["all"]
        cut = sum_of(certificate.phases.lengths)
        text = f"phases {cut}, at layer {layer + 1}; relative error at most {eps.value:.3f} (layer {eps.layer})"
        lower, upper = (float(end) for end in ends)
        evidence = Evidence(value=float(r2[layer]), lower=lower, upper=upper, num=num, above=0)
        follows = replace(follows, measured=text, evidence=evidence, figure="certificate")
        share = certificate.costs["surrogate"].flops / certificate.costs["teacher"].flops
        counted = Evidence(value=share, lower=share, upper=share, num=num, above=0.9, below=1.1)
        compute = replace(compute, measured="counted, so without an interval", evidence=counted)
    if complexity is not None:
        both = complexity.fp32
        bits = f"{both.surrogate.total_bits:.3g} bits for {both.teacher.total_bits:.3g}; counted"
        counted = Evidence(value=both.ratio, lower=both.ratio, upper=both.ratio, num=num, below=1)
        shorter = replace(shorter, measured=bits, evidence=counted, number="fp32/ratio")
    return [follows, compute, shorter]


def claims_witness(found: Witness | None) -> list[Claim]:
    """Table 3 from the authors' own matrix."""
    claim = Claim(place="Table 3", says="max-cut of the published similarity gives the layer splits of k = 2, 3, 4")
    if found is None:
        return [claim]
    num = found.rows_of_table_3()
    text = ", ".join(sum_of(found.phases[k]) for k in TABLE_3)
    evidence = Evidence(value=num, lower=num, upper=num, num=found.num_images, above=len(TABLE_3) - 0.5)
    return [replace(claim, measured=f"rows reproduced, of {len(TABLE_3)}: {text}", evidence=evidence)]
