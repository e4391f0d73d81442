"""The paper's claims about single models: depth as a dynamical system, certificate and complexity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import hypot, pi

import numpy as np
from evidence import Basis, Claim, Evidence, Verdict, counted, judge, of_counts, over_seeds
from outcome import sum_of
from witness import TABLE_3, Witness

from raptor.dynamics.estimates import ImageEstimate, boundary_jump
from raptor.dynamics.measure import DynamicsFile, DynamicsResult
from raptor.dynamics.stability import StabilityResult
from raptor.fidelity.certificate import Certificate
from raptor.fidelity.complexity import Complexity
from raptor.phases import ModelPhases

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


_CLOSEST, _WIDEST, _LEAST = (
    "cls_distance_minus_least_other",
    "patches_angle_minus_widest_other",
    "patches_modulus_minus_least_other",
)


def _modes(fit: str, words: str) -> list[_Rule]:
    """The claims about the eigenvalues of one kind of DMD fit."""
    made: tuple[tuple[str, str, float | None, float | None], ...] = (
        ("cls modes lie closest to +1: their distance minus the smallest other", _CLOSEST, None, 0),
        ("patches have the widest angles: theirs minus the widest other", _WIDEST, 0, None),
        ("patches contract most: their median modulus minus the smallest other", _LEAST, None, 0),
    )
    place, figure = "Figure 10, Appendix D", "dynamics-eigenvalues"
    return [
        _Rule(place, f"{says} ({words})", f"dmd.{fit}.{key}", above, below, figure) for says, key, above, below in made
    ]


_RATIO = "r = L / 4 as the paper's"
_RULES = (
    _Rule(
        "Figure 1",
        "layers are more alike within phases than across them (mean cosine within minus across)",
        "similarity.within_minus_across",
        above=0,
    ),
    _Rule("Figure 7", "norms of {g} grow with depth (last over first)", "norm.ratio.{g}", 1, None, "dynamics-norm"),
    _Rule(
        "Figure 7",
        "norms of {g} grow steadily: in every step (smallest ratio)",
        "norm.smallest_step.{g}",
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
        "gamma of {g} accelerates near the end: its rise per step over the last third minus that before",
        "gamma.late_acceleration.{g}",
        0,
        None,
        "dynamics-gamma",
    ),
    _Rule(
        "Section 4",
        "registers approach their last direction earliest: mean gamma over layers 1 to L - 1 minus the largest other",
        "gamma.registers_minus_earliest_other",
        0,
        None,
        "dynamics-gamma",
    ),
    _Rule(
        "Section 4",
        "patches approach their last direction before cls: mean gamma over layers 1 to L - 1 minus that of cls",
        "gamma.patches_minus_cls",
        0,
        None,
        "dynamics-gamma",
    ),
    _Rule(
        "Figure 9",
        "registers have the smallest angular speed: their mean minus the smallest other",
        "speed.registers_minus_slowest_other",
        None,
        0,
        "dynamics-speed",
    ),
    _Rule(
        "Section 4",
        "the variance of the speed is smallest for registers after early depth: theirs minus the smallest other",
        "speed_variance.registers_minus_least_other",
        None,
        0,
        "dynamics-speed-variance",
    ),
    _Rule(
        "Figure 9",
        "cls turns sharply late: its largest turn in the last quarter of depth minus the largest in steps 2 to 3 L / 4",
        "speed.late_turn_after_first.cls",
        0,
        None,
        "dynamics-speed",
    ),
    _Rule(
        "Section 4",
        "the turn of cls peaks at the end: its largest turn in the last quarter of depth minus the largest before",
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
        "perturbed paths bend back: angle of {g} at the end over that at the injection (in the first half of depth)",
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
        "the sensitivity of patches falls log-linearly (R2 of the line above .9)",
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
        "the stable rank of the updates of patches ends near six (last third, between 3 and 12)",
        "rank.stable_late.patches",
        3,
        12,
        "dynamics-stable-rank",
    ),
    _Rule(
        "Figure 10",
        "the effective rank of the updates of patches ends near six (last third, between 3 and 12)",
        "rank.effective_late.patches",
        3,
        12,
        "dynamics-effective-rank",
    ),
    _Rule(
        "Figure 10",
        "the coherence of patches peaks late (largest in the last third minus largest before)",
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
        "updates of patches in the last third turn toward their mean direction (mean cosine)",
        "gathering.toward_late.patches",
        0,
        None,
        "dynamics-gathering",
    ),
    _Rule(
        "Figure 10, Appendix D",
        f"eigenvalues of {{g}} lie just inside the unit circle: the largest modulus between .9 and 1 ({_RATIO})",
        "dmd.ratio.spectral_radius.{g}",
        0.9,
        1,
        "dynamics-eigenvalues",
    ),
    _Rule(
        "Figure 10, Appendix D",
        f"eigenvalues of {{g}} lie just inside the unit circle: the median modulus between .9 and 1 ({_RATIO})",
        "dmd.ratio.median_modulus.{g}",
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
        "the singular spectrum decays slowest for cls: its effective number of values minus the largest other",
        "dmd.singular.cls_minus_largest_other",
        0,
        None,
        "dynamics-singular-values",
    ),
    _Rule(
        "Figure 10",
        "the singular spectrum decays fastest for patches: their effective number of values minus the smallest other",
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
    found += [*_attraction(model), *_basins(model, twins)]
    beside = [_with_twin(_beside(claim, measured, witness, relative), measured, twins) for claim in found]
    return [*beside, *_differences(measured, twins)]


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
        says = f"phase {number} attracts: factor by which the angle of a perturbation changes per step"
        key = f"attraction.layers_{phase.first}_{phase.last}.all"
        if key in model.estimates:
            claim = _claim("Section 4", says, model, key, None, 1, "dynamics-attraction")
            rates = ", ".join(f"{g} {rate:.2f}" for g, rate in phase.rate.items() if g != "all")
            claims.append(replace(claim, measured=f"layers {phase.first} to {phase.last}; {rates}"))
    key = "attraction.last_minus_least_before.all"
    if key in model.estimates:
        says = "attraction strengthens in the final phase: the factor per step there minus the smallest before"
        claim = _claim("Section 4", says, model, key, None, 0, "dynamics-attraction")
        rates = ", ".join(f"{phase.rate['all']:.2f}" for phase in model.attraction)
        claims.append(replace(claim, measured=f"by phase: {rates}"))
    return claims


def _basins(model: DynamicsResult, twins: Sequence[DynamicsFile]) -> list[Claim]:
    if model.basins is None:
        return []
    claims, num = [], sum(model.basins.images_per_class)
    twin = next((t.teacher.basins for t in twins if t.teacher.basins is not None), None)
    for g, found in model.basins.groups.items():
        value, lower, upper = of_counts(found.accuracy[-1] * num, num)
        evidence = Evidence(value=value, lower=lower, upper=upper, num=num, above=model.basins.chance)
        ratio = found.scatter_ratio
        text = f"{found.accuracy[0]:.0%} at layer 0; between/within scatter {ratio[-1]:.2f} at the end"
        if twin is not None and g in twin.groups:
            last, num_twin = twin.groups[g].accuracy[-1], sum(twin.images_per_class)
            _, low, high = of_counts(last * num_twin, num_twin)
            text += f"; untrained {last:.3g} [{low:.3g}, {high:.3g}] ({num_twin:,} images)"
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


def _beside(claim: Claim, measured: DynamicsFile, witness: Witness | None, relative: DynamicsFile | None) -> Claim:
    """The claim with what stands beside its number: the groups it compares, the authors' matrix, other sizes."""
    key, model = claim.number.removeprefix("teacher/estimates/"), measured.teacher
    notes = [claim.measured, _by_group(key, measured)]
    notes += [] if witness is None else [_of_witness(key, model, witness)]
    if key.startswith("path.kept_angle"):
        notes.append(_kept_by_layer(model.stability, key.removeprefix("path.kept_angle.")))
    if key.startswith("sensitivity.slope"):
        notes.append("growing norms are part of this, because a perturbation of fixed size shrinks beside the state")
        if relative is not None and relative.teacher.stability is not None:
            found = relative.teacher.stability
            slope = found.log_slope()[0, found.groups.index("patches"), 0]
            notes.append(f"with sizes relative to the state {slope:+.3f}")
    if key == "speed_variance.registers_minus_least_other":
        found_by = model.direction.speed_variance
        late = {g: float(np.mean(v.images[max(1, len(v.images) // 3) :])) for g, v in found_by.items() if g != "all"}
        notes.append(f"over images only: {_listed(late)}")
    if key == "sensitivity.late_slope.cls" and f"{_OWN}.cls" in model.estimates:
        notes.append(f"with only cls perturbed {model.estimates[f'{_OWN}.cls']}")
    return replace(claim, measured="; ".join(filter(None, notes)))


def _kept_by_layer(stability: StabilityResult | None, group: str) -> str:
    """What is left of the angle of the first and of the last injection that counts."""
    assert stability is not None, "a path without its stability"
    path = stability.path[0, stability.groups.index(group), 0]
    early = [(i, layer) for i, layer in enumerate(stability.layers) if layer <= (path.shape[-1] - 1) // 2]
    kept = [f"{path[i, -1] / path[i, layer]:.2f} from layer {layer}" for i, layer in (early[0], early[-1])]
    return f"geometric mean; {', '.join(kept)}"


_COMPARED = {
    "speed.registers_minus": "speed.mean",
    "speed_variance.registers_minus": "speed_variance.late",
    **{f"dmd.{fit}.{_CLOSEST}": f"dmd.{fit}.distance" for fit in ("ratio", "pooled", "rank10")},
    **{f"dmd.{fit}.{_WIDEST}": f"dmd.{fit}.weighted_angle" for fit in ("ratio", "pooled", "rank10")},
    **{f"dmd.{fit}.{_LEAST}": f"dmd.{fit}.median_modulus" for fit in ("ratio", "pooled", "rank10")},
    "dmd.singular.": "dmd.singular",
}
"""Beginning of the key of a difference between groups -> that of what is compared."""


def _by_group(key: str, measured: DynamicsFile) -> str:
    """The numbers of the groups whose difference decides, or of each group where that of all tokens does."""
    model = measured.teacher
    if key.startswith(("gamma.registers_minus", "gamma.patches_minus")):
        gamma = model.direction.gamma
        return _listed({g: float(np.mean(gamma[g].mean[1:-1])) for g in GROUPS if g in gamma})
    if key == "speed.jump_at_boundaries" and measured.phases:
        speed = model.direction.speed
        jumps = {g: boundary_jump(speed[g].mean[None], measured.phases)[0] for g in GROUPS if g in speed}
        return _listed({g: float(jump) for g, jump in jumps.items()})
    found = next((own for start, own in _COMPARED.items() if key.startswith(start)), None)
    known = {g: model.estimates[f"{found}.{g}"].value for g in GROUPS if f"{found}.{g}" in model.estimates}
    return _listed({g: value for g, value in known.items() if value is not None})


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{g} {value:.2g}" if abs(value) < 0.1 else f"{g} {value:.2f}" for g, value in values.items())


def _of_witness(key: str, model: DynamicsResult, witness: Witness) -> str:
    """The same number of the authors' matrix, or the nearest it has."""
    words = "the authors' ViT-B matrix (pooled)"
    rise = np.diff(witness.gamma)
    if key.startswith("gamma.before_last"):
        return f"{words}: gamma_{len(witness.gamma) - 1} = {witness.gamma[-2]:.2f}"
    if key.startswith("gamma.inner_rise"):
        return f"{words} {rise[:-1].max() - rise[-1]:.2f}"
    if key.startswith("speed.late_turn"):
        turn = model.direction.speed["cls"].mean[-1]
        return f"last turn {turn:.2f} rad; {words} {witness.last_turn:.2f} rad"
    return ""


_OWN = "sensitivity.own_late_slope"


_OF_THE_CUT = ("similarity.within", "speed.jump", "speed.between", "attraction.")
"""Estimates that depend on where depth is cut: there a twin with a cut of its own is another comparison."""


def _with_twin(claim: Claim, model: DynamicsFile, twins: Sequence[DynamicsFile]) -> Claim:
    """The claim with the same number of its untrained twins: what is there before training is no sign of it.

    The first twin; where the number depends on the cut the first with each kind of cut.
    """
    key = claim.number.removeprefix("teacher/estimates/")
    of_cut = key.startswith(_OF_THE_CUT)
    known = [twin for twin in twins if key in twin.teacher.estimates and twin.teacher.estimates[key].value is not None]
    shown = [found[0] for found in by_cut(model, known).values()] if of_cut else known[:1]
    parts = [claim.measured] if claim.measured else []
    for twin in shown:
        found = twin.teacher.estimates[key]
        cut = f", {twin_cut(model, twin)}" if of_cut else ""
        parts.append(f"untrained {_with_ends(found)} ({found.num_images:,} images{cut})")
    numbers = [twin.teacher.estimates[key] for twin in shown]
    return replace(claim, measured="; ".join(parts), untrained_too=_all_meet(claim.evidence, numbers))


def _all_meet(evidence: Evidence | None, found: Sequence[ImageEstimate]) -> bool | None:
    """Whether all of these numbers meet the bounds of a claim; None where there is nothing to compare."""
    if evidence is None or not found:
        return None
    others = [
        replace(evidence, value=each.value, lower=each.lower, upper=each.upper, num=each.num_images) for each in found
    ]
    return all(judge(other) is Verdict.AGREES for other in others)


def _with_ends(found: ImageEstimate) -> str:
    ends = "" if found.lower is None or found.upper is None else f" [{found.lower:.3g}, {found.upper:.3g}]"
    return f"{found.value:.3g}{ends}"


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


_DIFFERENCES = (
    (
        "Section 1",
        "block structure emerges during training: similarity within phases minus across, trained minus untrained",
        "similarity.within_minus_across",
    ),
    (
        "Figure 11A",
        "training increases layer-layer similarity of pooled tokens (mean off the diagonal), trained minus untrained",
        "similarity.all_pairs",
    ),
    (
        "Figure 11B",
        "training increases similarity within phases of pooled tokens (each model's own cut), trained minus untrained",
        "similarity.within_phases",
    ),
)


def _differences(model: DynamicsFile, twins: Sequence[DynamicsFile]) -> list[Claim]:
    """What training did to this model: its number minus that of each untrained seed.

    As in the paper each model has its own cut: one found on the trained model is not the best of an untrained one.
    """
    made = (_difference(model, twins, *one) for one in _DIFFERENCES)
    return [claim for claim in made if claim is not None]


def _difference(model: DynamicsFile, twins: Sequence[DynamicsFile], place: str, says: str, key: str) -> Claim | None:
    trained = model.teacher.estimates.get(key)
    cuts = by_cut(model, [twin for twin in twins if key in twin.teacher.estimates])
    same = _one_per_seed(cuts.get(False) or cuts.get(True, []))
    values = [v for twin in same if (v := twin.teacher.estimates[key].value) is not None]
    if trained is None or trained.value is None or not values:
        return None
    value, lower, upper = over_seeds([trained.value - v for v in values])
    evidence = Evidence(value=value, basis=Basis.SEEDS, num=len(values), above=0)
    if None not in (lower, upper, trained.lower, trained.upper):
        half = hypot(upper - value, 0.5 * (trained.upper - trained.lower))  # type: ignore[operator]
        evidence = replace(evidence, lower=value - half, upper=value + half)
    cut = " or ".join(dict.fromkeys(twin_cut(model, twin) for twin in same))
    text = f"trained {trained}, untrained {', '.join(f'{v:.3f}' for v in values)} ({cut}); one trained model"
    text += ", the interval is over untrained seeds" if len(values) > 1 else ""
    return Claim(place=place, says=says, measured=text, evidence=evidence, recipe="untrained-twin")


def _one_per_seed(twins: Sequence[DynamicsFile]) -> list[DynamicsFile]:
    """One untrained model per seed, the first: measuring the same weights twice does not make two seeds."""
    seeds = [twin.seed for twin in twins]
    return [twin for i, twin in enumerate(twins) if twin.seed not in seeds[:i]]


def claims_certificate(certificate: Certificate | None, complexity: Complexity | None) -> list[Claim]:
    """One surrogate: whether it follows every layer, at the same compute, with a shorter description."""
    follows = Claim(
        place="Definition 1",
        says="k tied blocks reproduce every intermediate state: better than the data mean at each layer (lowest R2)",
    )
    compute = Claim(place="Section 3", says="at equal compute: FLOPs as a share of the teacher's, within 10 %")
    shorter = Claim(place="Appendix E", says="the Levin bound of the surrogate is below the teacher's (ratio, fp32)")
    if certificate is not None:
        r2 = certificate.curves.r2["all"]
        layer = int(np.argmin(r2))
        ends = certificate.intervals["r2"]["all"][:, layer]
        eps = certificate.eps["relative"]["all"]
        cut = sum_of(certificate.phases.lengths)
        text = f"phases {cut}, at layer {layer + 1}; relative error at most {eps.value:.3f} (layer {eps.layer})"
        lower, upper = (float(end) for end in ends)
        num = certificate.curves.num_images
        evidence = Evidence(value=float(r2[layer]), lower=lower, upper=upper, num=num, above=0)
        follows = replace(follows, measured=text, evidence=evidence, figure="certificate")
        own, other = certificate.costs["surrogate"], certificate.costs["teacher"]
        text = f"{own.flops / 1e9:.3g} for {other.flops / 1e9:.3g} GFLOPs per image"
        if own.seconds_per_image and other.seconds_per_image:
            text += f"; a forward pass takes {own.seconds_per_image / other.seconds_per_image:.2f} times as long"
            text += f" ({certificate.device})"
        compute = replace(compute, measured=text, evidence=counted(own.flops / other.flops, above=0.9, below=1.1))
    if complexity is not None:
        both = complexity.fp32
        bits = f"{both.surrogate.total_bits / 1e6:.0f} for {both.teacher.total_bits / 1e6:.0f} million bits"
        shorter = replace(shorter, measured=bits, evidence=counted(both.ratio, below=1), number="fp32/ratio")
    return [follows, compute, shorter]


def claims_phases(found: ModelPhases, witness: Witness | None = None, k: int = 3) -> list[Claim]:
    """Whether depth has boundaries: the contrast of its phases minus that of a matrix that changes gradually."""
    cut = found.evidence.get(k)
    if cut is None or cut.contrast is None or cut.smooth is None:
        return []
    value = cut.contrast - cut.smooth
    lower, upper = (None, None) if cut.interval is None else (end - cut.smooth for end in cut.interval)
    evidence = Evidence(value=value, lower=lower, upper=upper, num=found.num_images, above=0)
    text = f"{cut.contrast:.3f} for {sum_of(found.phases[k].lengths)}, {cut.smooth:.3f} for the smooth matrix"
    text += "" if cut.shuffled is None else f", {cut.shuffled:.3f} for layers in random order"
    if witness is not None and k in witness.above_smooth:
        text += f"; the authors' ViT-B matrix (pooled) {witness.above_smooth[k]:.3f}"
    says = (
        f"depth has boundaries (k = {k}): similarity within phases minus across, minus that of a smooth matrix with "
        "the same mean at each distance between layers"
    )
    return [Claim(place="Figure 1", says=says, measured=text, evidence=evidence)]


def claims_witness(found: Witness | None) -> list[Claim]:
    """Table 3 from the authors' own matrix."""
    claim = Claim(place="Table 3", says="max-cut of the published similarity gives the layer splits of k = 2, 3, 4")
    if found is None:
        return [claim]
    num = found.rows_of_table_3()
    text = ", ".join(sum_of(found.phases[k]) for k in TABLE_3)
    evidence = counted(num, above=len(TABLE_3) - 1)
    return [replace(claim, measured=f"rows of {len(TABLE_3)}: {text}", evidence=evidence)]
