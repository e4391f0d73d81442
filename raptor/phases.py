"""Where depth is cut: contiguous phases from a layer-layer similarity matrix.

Layers are numbered 1..L, as the states `a_1..a_L` they produce. Phases are numbered 0..k-1, so that a phase number
indexes a list of blocks. Ties (to rounding) go to the later boundary.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations, pairwise
from math import comb
from typing import Annotated, Any, ClassVar, NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import PlainValidator

from raptor.data.stream import ImageStream
from raptor.devices import seeded
from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.similarity.cosine import Blocks, CoordinateStatistics, SimilarityResult, measure_similarity
from raptor.similarity.outliers import Outliers
from raptor.streaming import Array, Record, decode
from raptor.subject import Subject
from raptor.vit.builders import build_base
from raptor.vit.stated import forward_arguments
from raptor.vit.structure import inspect_vit
from raptor.vit.trajectory import Trajectories
from raptor.vit.view import POOLED, ModelFacts, ViT

NUM_RESAMPLES = 200  # of images, and of orders of the layers
TWIN_IMAGES, TWIN_SECONDS, TWIN_MARGIN = 64, 20, 1.25
DEFAULT_CUTS = (2, 3, 4)
_ROUNDING = 1e-6  # mean cosines are sums of float32 products
_FEW_IMAGES = 16
_ENDS = (0.025, 0.975)  # of intervals of 95 %
_METHODS = ("maxcut", "dp")
_SCORES = ("weighted", "mean", "cut")
DEFAULT_TOKENS = "pooled"  # better surrogates than "all" over three seeds: docs/results/recipe.md


@dataclass(frozen=True)
class Phases(Record, Sequence[int]):
    """Contiguous segments of the layers 1..L; as a sequence, their lengths.

    `lengths` sum to L. `scores` are the gain of each successive cut (`maxcut`, k-1 of them, in cutting order), the
    score of each phase (`dp`, k of them), or empty. Two partitions are equal when their lengths are.
    """

    lengths: tuple[int, ...]
    scores: tuple[float, ...] = field(default=(), compare=False)
    method: str = field(default="given", compare=False)

    def __post_init__(self) -> None:
        if not self.lengths or any(n < 1 for n in self.lengths):
            raise ValueError(f"phase lengths must be one or more positive integers, got {list(self.lengths)}")

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> Phases:
        """The phases of these lengths, which may be `Phases` already."""
        return lengths if isinstance(lengths, Phases) else cls(tuple(operator.index(n) for n in lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self.lengths[index]

    @property
    def num_layers(self) -> int:
        return sum(self.lengths)

    @property
    def k(self) -> int:
        return len(self.lengths)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The k-1 layers after which a new phase begins: `(7,)` for 7 | 5. Neither 0 nor L is one."""
        return tuple(accumulate(self.lengths[:-1]))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and last layer of each phase, both included: `[(1, 7), (8, 12)]` for 7 | 5."""
        ends = list(accumulate(self.lengths))
        return [(end - length + 1, end) for length, end in zip(self.lengths, ends)]

    def start(self, phase: int) -> int:
        """The l of the state `a_l` that enters this phase; the phase makes `a_(l+1)` first. `start(0)` is 0."""
        if not 0 <= phase < self.k:
            raise ValueError(f"phase must be 0 to {self.k - 1}, got {phase}")
        return sum(self.lengths[:phase])

    def phase_of(self, layer: int) -> int:
        """The phase (0..k-1) that makes `a_layer`, for a layer of 1..L."""
        if not 1 <= layer <= self.num_layers:
            raise ValueError(f"layer must be 1 to {self.num_layers}, got {layer}")
        return sum(layer > boundary for boundary in self.boundaries)

    def same_phase(self) -> NDArray[np.bool_]:
        """(L, L): whether two layers are in one phase."""
        phase_l = np.repeat(np.arange(self.k), self.lengths)
        return phase_l[:, None] == phase_l[None, :]

    def __str__(self) -> str:
        return " | ".join(str(n) for n in self.lengths)


PhaseLengths = Annotated[Phases, PlainValidator(lambda saved: Phases(decode(tuple[int, ...], saved)))]
"""Phases that JSON holds as their lengths only."""


@dataclass
class CutEvidence(Record):
    """How sure a cut into k phases is, and what it is worth.

    The contrast is the mean similarity within phases less the mean across them. `shuffled` is the contrast of a matrix
    whose layers are in random order (mean, and its 95th percentile), `smooth` that of a matrix with the same mean
    similarity at each distance between layers, `twin` that of the untrained twin. None where it is not known.

    Attributes:
        boundaries: 95 % interval of each boundary over resampled images.
        stability: share of resamples with this very boundary.
        interval: 95 % interval of the contrast.
    """

    boundaries: list[tuple[int, int]] = field(default_factory=list)
    stability: list[float] = field(default_factory=list)
    contrast: float | None = None
    interval: tuple[float, float] | None = None
    shuffled: float | None = None
    shuffled_upper: float | None = None
    smooth: float | None = None
    twin: float | None = None


class ChosenK(NamedTuple):
    k: int
    gains: tuple[float, ...]  # gains[i] is what the cut from i+1 to i+2 phases adds


@dataclass
class ModelPhases(Record):
    """Layer-layer similarity of one model and the phases cut from it.

    Attributes:
        similarity: variant (`all`, the groups present, `pooled`) -> (L, L) matrix of mean cosines.
        cka: (L, L) linear CKA, or None when no batch had enough images.
        tokens: the variant that the phases are cut from.
        standardised: whether each coordinate was divided by its standard deviation first.
        phases: k -> the phases.
        within: k -> mean similarity of layers of one phase, and of layers of different phases.
        chosen_k: what the gains suggest; only a finding where `structure` is empty.
        gains: gain of each further cut.
        side: `teacher` or `surrogate` of a run; empty for a model by itself.
        evidence: k -> how sure each boundary is, and what matrices without phases give; also at `chosen_k`.
        k_shares: k -> the share of resamples that suggest it.
        null_gains: `shuffled`, `smooth` and `twin` -> the gain of each further cut there.
        twin: how the untrained twin was measured, or why it was not.
        structure: why there is no phase structure to speak of; empty where there is.
    """

    model: ModelFacts
    num_images: int
    image_size: int
    similarity: dict[str, Array]
    cka: Array | None
    outliers: Outliers
    tokens: str
    standardised: bool
    phases: dict[int, Phases]
    within: dict[int, tuple[float | None, float | None]]
    chosen_k: int
    gains: list[float]
    data: str = "the data"
    split: str = "val"
    bad_images: list[str] = field(default_factory=list)
    side: str = ""
    evidence: dict[int, CutEvidence] = field(default_factory=dict)
    k_shares: dict[int, float] = field(default_factory=dict)
    null_gains: dict[str, list[float]] = field(default_factory=dict)
    twin: str = "its untrained twin was not measured"
    structure: str = ""
    subject: Subject | None = None

    @property
    def suggestion(self) -> str:
        """What the gains suggest, as one sentence, or why they suggest nothing."""
        if self.structure:
            return f"no k is suggested: {self.structure}"
        share = f" ({self.k_shares.get(self.chosen_k, 0.0):.0%} of resamples)" if self.k_shares else ""
        said = f"the gains of further cuts suggest k={self.chosen_k}{share}"
        if not self.is_gradual:
            return said
        return f"{said}; depth changes gradually: a smooth matrix without boundaries has as much contrast"

    @property
    def is_gradual(self) -> bool:
        """Whether a smooth matrix without boundaries has as much contrast as the cut at the chosen k."""
        cut = self.evidence.get(self.chosen_k)
        lowest = None if cut is None else (cut.interval or (cut.contrast,))[0]
        return cut is not None and cut.smooth is not None and lowest is not None and lowest <= cut.smooth

    @property
    def few_images(self) -> str:
        """A warning where very few images were read; empty where there were enough."""
        return few_images(self.num_images, self.split, "cuts may lie elsewhere on others")

    @property
    def whose(self) -> str:
        """The model by its side and name: `teacher: NAME`, `surrogate: NAME`, or only the name of a model by itself."""
        side = self.side or ("surrogate" if self.model.phases else "")
        return f"{side}: {self.model.name}" if side else self.model.name

    @property
    def chosen(self) -> Phases | None:
        """The phases at the chosen k, or at the nearest k that was cut; None when nothing was cut."""
        nearest = min(self.phases, key=lambda k: (abs(k - self.chosen_k), k), default=None)
        return None if nearest is None else self.phases[nearest]


def few_images(num: int, split: str, danger: str) -> str:
    """A warning where very few images of a split were read; empty where there were enough."""
    if num >= _FEW_IMAGES:
        return ""
    remedy = ": --split all reads more than the held-out ones, if --num_images allows" if split == "val" else ""
    return f"measured on very few images ({num}), so {danger}{remedy}"


@dataclass
class PhasesFile(ResultFile):
    """phases.json: what `raptor phases` found, one entry per model."""

    FILE: ClassVar[str] = "phases.json"

    models: list[ModelPhases]
    provenance: Provenance = field(default_factory=Provenance)
    subject: Subject | None = None


def study_phases(
    vit: ViT,
    batches: ImageStream,
    k: Sequence[int] | None = None,
    method: str = "maxcut",
    score: str = "weighted",
    min_length: int | None = None,
    tokens: str = DEFAULT_TOKENS,
    standardise: bool = False,
    precision: str = "fp32",
    twin: bool | None = None,
) -> ModelPhases:
    """Measure the similarity of one model over `batches` and cut its layers into phases, once for each `k`.

    `k`: by default those of `DEFAULT_CUTS` that the model has room for.
    `twin`: whether its untrained twin is measured too, on up to 64 of the images; by default where that takes less than
    20 seconds and the model can be built anew.
    """
    k = check_cuts(vit, k, method, score, min_length, tokens)
    statistics = None
    if standardise:
        statistics = CoordinateStatistics(vit.num_layers, vit.name)
        for states, _, _ in Trajectories(vit, batches, precision, f"statistics of {vit.name}"):
            statistics.update(states)
        statistics.reduce(batches.ranks)
    started = time.monotonic()
    measured = measure_similarity(
        Trajectories(vit, batches, precision, f"similarity of {vit.name}"),
        vit.num_layers,
        vit.groups,
        statistics=statistics,
        model=vit.name,
        blocks_of=tokens,
    )
    seconds = (time.monotonic() - started) / max(1, measured.num_images)

    def finish() -> ModelPhases:
        twin_found = _twin_matrix(vit, batches.whole(), tokens, precision, seconds, twin, standardise)
        found = _cut(vit, measured, twin_found, k, method, score, min_length, tokens, standardise)
        return replace(found, subject=Subject.of(vit, batches.data))

    return batches.ranks.first(finish)


def _cut(
    vit: ViT,
    measured: SimilarityResult,
    twin: tuple[Array | None, str],
    k: Sequence[int],
    method: str,
    score: str,
    min_length: int | None,
    tokens: str,
    standardise: bool,
) -> ModelPhases:
    """The phases of a model whose similarity was measured, once for each `k`, and how sure they are."""
    matrix = measured.matrices[tokens]
    found = {num: find_phases(matrix, num, method=method, score=score, min_length=min_length) for num in k}
    twin_matrix, twin_note = twin
    evidence = _Evidence(matrix, measured.blocks, twin_matrix, _shortest("maxcut", min_length))
    chosen = evidence.choose(matrix)
    cuts = {num: evidence.of(phases, method, score, min_length) for num, phases in found.items()}
    if chosen.k not in cuts:
        cuts[chosen.k] = evidence.of(find_phases(matrix, chosen.k, min_length=min_length), min_length=min_length)
    return ModelPhases(
        model=vit.facts(),
        num_images=measured.num_images,
        image_size=vit.preprocess.size,
        similarity=measured.matrices,
        cka=measured.cka,
        outliers=measured.outliers,
        tokens=tokens,
        standardised=standardise,
        phases=found,
        within={num: within_and_across(matrix, phases) for num, phases in found.items()},
        chosen_k=chosen.k,
        gains=list(chosen.gains),
        evidence=cuts,
        k_shares=evidence.k_shares(),
        null_gains=evidence.null_gains(),
        twin=twin_note,
        structure=no_structure(chosen.k, cuts[chosen.k], matrix),
    )


def no_structure(k: int, cut: CutEvidence, similarity: Array) -> str:
    """Why a suggested cut of `similarity` into `k` phases is no finding; empty where it is one.

    Distances must be more than rounding: the tokens of an untrained DINOv2, with a LayerScale of 1e-5, hardly move. The
    contrast must be above that of a shuffled matrix (95th percentile) and above `TWIN_MARGIN` times that of the
    untrained twin where it was measured; its lower end counts. A second random model differs from the first by less
    than that margin.
    """
    largest = float((1 - similarity).max())
    if largest < _ROUNDING:
        return f"all layers are alike up to rounding (the largest distance is {largest:.0e})"
    if k == 1:
        return "all layers are alike"
    if cut.contrast is None:
        return f"the gains of further cuts do not level off before k={k}, where every layer is a phase"
    lowest = cut.contrast if cut.interval is None else cut.interval[0]
    found = f"at k={k} no more phase structure than {{}} (contrast at least {lowest:.3f}; {{}} {{:.3f}})"
    if cut.shuffled_upper is not None and lowest <= cut.shuffled_upper:
        return found.format("a shuffled matrix", "95 % of shuffled ones are below", cut.shuffled_upper)
    if cut.twin is not None and lowest <= TWIN_MARGIN * cut.twin:
        return found.format("its untrained twin", f"{TWIN_MARGIN} times the twin's is", TWIN_MARGIN * cut.twin)
    return ""


@dataclass
class _Evidence:
    """What cuts are compared with: resamples over images, and matrices without phases. See `CutEvidence`."""

    matrix: Array
    blocks: Blocks | None
    twin: Array | None
    min_length: int

    def __post_init__(self) -> None:
        num = len(self.matrix)
        enough = self.blocks is not None and len(self.blocks.sizes) > 1
        self.resampled = self.blocks.resampled(NUM_RESAMPLES) if enough and self.blocks else np.empty((0, num, num))
        rng = np.random.default_rng(0)
        orders = [rng.permutation(num) for _ in range(NUM_RESAMPLES)]
        self.shuffled = np.stack([self.matrix[np.ix_(order, order)] for order in orders])
        self.smooth = smooth_matrix(self.matrix)

    def of(
        self, phases: Phases, method: str = "maxcut", score: str = "weighted", min_length: int | None = None
    ) -> CutEvidence:
        def cut(matrix: Array) -> Phases:
            return find_phases(matrix, phases.k, method, score, min_length)

        found = CutEvidence(contrast=_contrast(self.matrix, phases), smooth=_contrast(self.smooth, cut(self.smooth)))
        if self.twin is not None:
            found.twin = _contrast(self.twin, cut(self.twin))
        if len(self.resampled):
            self._add_intervals(found, phases, [cut(m) for m in self.resampled])
        if found.contrast is not None:
            contrasts = [_contrast(m, cut(m)) for m in self.shuffled]
            null = [contrast for contrast in contrasts if contrast is not None]
            if null:
                found.shuffled = float(np.mean(null))
                found.shuffled_upper = float(np.quantile(null, 0.95))
        return found

    def _add_intervals(self, found: CutEvidence, phases: Phases, recut: Sequence[Phases]) -> None:
        """The intervals of the boundaries and of the contrast of `phases`; `recut` are the cuts of the resamples."""
        edges_rb = np.array([one.boundaries for one in recut]).reshape(len(recut), phases.k - 1)
        # The nearest of the resampled layers: a boundary lies between two layers.
        lower_b, upper_b = np.quantile(edges_rb, _ENDS, axis=0, method="nearest")
        found.boundaries = [(int(lower), int(upper)) for lower, upper in zip(lower_b, upper_b)]
        found.stability = (edges_rb == np.array(phases.boundaries)).mean(0).tolist()
        if found.contrast is not None:
            lower, upper = np.quantile([_contrast(m, phases) for m in self.resampled], _ENDS)
            found.interval = (float(lower), float(upper))

    def choose(self, matrix: Array) -> ChosenK:
        """The k that `matrix` suggests, of those that every matrix of its size has room for."""
        return choose_k(matrix, _most_cuts(len(matrix), self.min_length), self.min_length)

    def k_shares(self) -> dict[int, float]:
        """The share of resamples that suggest each k."""
        ks = [self.choose(m).k for m in self.resampled]
        return {k: ks.count(k) / len(ks) for k in sorted(set(ks))}

    def null_gains(self) -> dict[str, list[float]]:
        nulls = {"shuffled": self.shuffled[:20], "smooth": self.smooth[None]}
        if self.twin is not None:
            nulls["twin"] = self.twin[None]
        found = {}
        for name, matrices in nulls.items():
            rows = [self.choose(m).gains for m in matrices]
            num_cuts = min(len(gains) for gains in rows)  # of those that all of them reach
            found[name] = np.mean([gains[:num_cuts] for gains in rows], axis=0).tolist()
        return found


def _contrast(matrix: Array, phases: Phases) -> float | None:
    within, across = within_and_across(matrix, phases)
    return None if within is None or across is None else within - across


def _twin_matrix(
    vit: ViT,
    batches: ImageStream,
    tokens: str,
    precision: str,
    seconds: float,
    wanted: bool | None,
    standardised: bool,
) -> tuple[Array | None, str]:
    """The similarity of the untrained twin on some of the images, and how it was measured or why it was not."""
    missing = "its untrained twin was not measured"
    if wanted is False:
        return None, f"{missing} (--twin false)"
    if standardised:
        return None, f"{missing} (its coordinates are not standardised)"
    if wanted is None and seconds * TWIN_IMAGES > TWIN_SECONDS:
        return None, f"{missing} (it takes longer than {TWIN_SECONDS} s: --twin true)"
    try:
        twin = _untrained_twin(vit)
    except ValueError as error:
        return None, f"{missing} ({error})"
    trajectories = Trajectories(twin, batches.sample(TWIN_IMAGES), precision)
    measured = measure_similarity(trajectories, vit.num_layers, vit.groups, cka_features=None, model=twin.name)
    return measured.matrices[tokens], f"its untrained twin was measured on {measured.num_images} images"


def _untrained_twin(vit: ViT, seed: int = 0) -> ViT:
    """The same model with random weights; ValueError for a surrogate or a module of your own, which has none."""
    if vit.phases or not vit.source.get("source"):
        raise ValueError("a surrogate has none" if vit.phases else "a module of your own cannot be built anew")
    with seeded(seed):
        model = build_base(vit.source)
    norm = next((name for name, module in vit.model.named_modules() if module is vit.norm), None)
    structure: dict[str, Any] = {
        "blocks": vit.blocks_path,
        "norm": norm,
        "cls": vit.groups.cls,
        "registers": vit.groups.registers,
    }
    arguments = forward_arguments(model, vit.preprocess.size)
    name, source = f"untrained twin of {vit.name}", vit.source
    return inspect_vit(model, name, vit.preprocess, forward_kwargs=arguments, source=source, **structure).to(vit.device)


def check_cuts(
    vit: ViT,
    k: Sequence[int] | None,
    method: str = "maxcut",
    score: str = "weighted",
    min_length: int | None = None,
    tokens: str = DEFAULT_TOKENS,
) -> Sequence[int]:
    """`k`, by default those of `DEFAULT_CUTS` that there is room for.

    Raises when the model cannot be cut this way, before any image is read.
    """
    present = [name for name, _ in vit.groups.present()]
    known = ["all", *present, *(["pooled"] if set(POOLED) & set(present) else [])]
    if tokens not in known:
        raise ValueError(f"{vit.name} has no {tokens!r} tokens: choose from {', '.join(known)}")
    find_phases(np.eye(vit.num_layers), 1, method, score)
    length = _shortest(method, min_length)
    num_partitions(vit.num_layers, 1, length)
    most = _most_cuts(vit.num_layers, length) if method == "maxcut" else vit.num_layers // length
    if k is None:
        k = [num for num in DEFAULT_CUTS if num <= most] or DEFAULT_CUTS[:1]
    for num in k:
        num_partitions(vit.num_layers, num, length)
        if num > most:
            raise ValueError(
                f"max-cut may leave no room for k={num} phases of at least {length} layers in the {vit.num_layers} of "
                f"{vit.name}: give --k {most} or less, a smaller --min_length, or --method dp"
            )
    return k


def _most_cuts(num_layers: int, min_length: int) -> int:
    """The largest k that max-cut reaches whatever the similarity is: a phase of 2 `min_length` - 1 cannot be cut."""
    return -(-num_layers // (2 * min_length - 1))


def check_phases(vit: ViT, phases: Sequence[int]) -> Phases:
    """`phases` as `Phases`; raises where they are not phases of the layers of `vit`."""
    found = Phases.from_lengths(phases)
    if found.num_layers != vit.num_layers:
        raise ValueError(f"phases {list(found)} do not sum to the {vit.num_layers} blocks of {vit.name}: change one")
    return found


def smooth_matrix(matrix: ArrayLike) -> Array:
    """The (L, L) matrix without boundaries that has the same mean at each distance between layers."""
    m = np.asarray(matrix, dtype=np.float64)
    num = len(m)
    distance = np.abs(np.arange(num)[:, None] - np.arange(num))
    return np.array([np.diagonal(m, n).mean() for n in range(num)])[distance]


def within_and_across(matrix: ArrayLike, phases: Sequence[int]) -> tuple[float | None, float | None]:
    """Mean of an (L, L) similarity over pairs of different layers of one phase, and over pairs of different phases.

    None where there is no such pair.
    """
    matrix = np.asarray(matrix)
    same = Phases.from_lengths(phases).same_phase()
    within = matrix[same & ~np.eye(len(same), dtype=bool)]
    across = matrix[~same]
    return (
        float(np.mean(within)) if within.size else None,
        float(np.mean(across)) if across.size else None,
    )


def find_phases(
    similarity: ArrayLike, k: int, method: str = "maxcut", score: str = "weighted", min_length: int | None = None
) -> Phases:
    """Cut the layers into k phases.

    Args:
        similarity: (L, L) similarity (not distance) over `a_1..a_L`, numpy or torch; `a_0` must not be in it.
        method: `maxcut` cuts where the total distance `1 - similarity` across the cut is largest, then again the
            segment with the largest gain, so phases nest as k grows. `dp` is the exact best sum of phase scores.
        score: for `dp` only. With `sum` the segment's similarity sum and n its length: `weighted` is `sum / n`,
            `mean` is `sum / n^2` (the paper's printed one, which rewards tiny phases), `cut` is `sum - n^2`.
        min_length: no phase is shorter; by default 1 for `maxcut` and 2 for `dp`, whose scores reward tiny phases.
    """
    matrix = _check_similarity(similarity)
    min_length = _shortest(method, min_length)
    _check_counts(len(matrix), k, min_length)
    if score not in _SCORES:
        raise ValueError(f"unknown score {score!r}: choose from {', '.join(_SCORES)}")
    if method == "dp":
        return _dynamic_programme(matrix, k, score, min_length)
    edges, gains = _max_cut(matrix, k, min_length)
    if len(edges) - 1 < k:
        found = " | ".join(str(n) for n in np.diff(edges))
        raise ValueError(
            f"max-cut stops at {found}: no phase can be cut again with min_length={min_length}; "
            f"lower k={k} or min_length, or use method='dp'"
        )
    return Phases(tuple(int(n) for n in np.diff(edges)), gains, "maxcut")


def _shortest(method: str, min_length: int | None) -> int:
    """The `min_length` that is meant: the given one, or the method's own."""
    if method not in _METHODS:
        raise ValueError(f"unknown method {method!r}: choose from {', '.join(_METHODS)}")
    return min_length if min_length is not None else (2 if method == "dp" else 1)


def choose_k(similarity: ArrayLike, max_k: int | None = None, min_length: int = 1, min_share: float = 0.1) -> ChosenK:
    """Choose k from the gains of max-cut: the smallest k whose next cut gains less than `min_share` of the first cut.

    With non-negative distances the gains never rise, so every further cut gains less too. When no gain falls below
    the share, k is the largest reached (`max_k`, or where `min_length` stops the cutting). Layers that are all alike
    (no gain at all) give k = 1.
    """
    matrix = _check_similarity(similarity)
    max_k = len(matrix) // max(min_length, 1) if max_k is None else max_k
    _check_counts(len(matrix), max_k, min_length)
    edges, gains = _max_cut(matrix, max_k, min_length)
    if not gains or gains[0] <= _tie_tolerance(matrix):
        return ChosenK(1, gains)
    small = [i for i, gain in enumerate(gains) if gain < min_share * gains[0]]
    return ChosenK(small[0] + 1 if small else len(edges) - 1, gains)


def num_partitions(num_layers: int, k: int, min_length: int = 1) -> int:
    """How many ways there are to cut L layers into k phases of at least `min_length`."""
    _check_counts(num_layers, k, min_length)
    return comb(num_layers - k * min_length + k - 1, k - 1)


def random_phases(num_layers: int, k: int, min_length: int = 1, seed: int = 0) -> Phases:
    """One contiguous partition, uniform over the compositions of L into k parts of at least `min_length`."""
    _check_counts(num_layers, k, min_length)
    return _draw(np.random.default_rng(seed), num_layers, k, min_length)


def sample_partitions(
    num_layers: int,
    k: int,
    count: int,
    seed: int = 0,
    exclude: Iterable[Sequence[int]] = (),
) -> list[Phases]:
    """`count` distinct partitions drawn uniformly without replacement, none of them in `exclude`."""
    excluded = {Phases.from_lengths(p) for p in exclude}
    excluded = {p for p in excluded if p.num_layers == num_layers and p.k == k}
    total = num_partitions(num_layers, k)
    if not 0 <= count <= total - len(excluded):
        raise ValueError(f"count must be 0 to {total - len(excluded)}, the partitions there are, got {count}")
    rng = np.random.default_rng(seed)
    if total <= max(10_000, 2 * (count + len(excluded))):
        every = [_from_bars(bars, num_layers, k, 1) for bars in combinations(range(num_layers - 1), k - 1)]
        left = [p for p in every if p not in excluded]
        return [left[i] for i in rng.choice(len(left), count, replace=False)]
    drawn: dict[Phases, None] = {}
    while len(drawn) < count:
        phases = _draw(rng, num_layers, k, 1)
        if phases not in excluded:
            drawn[phases] = None
    return list(drawn)


def _draw(rng: np.random.Generator, num_layers: int, k: int, min_length: int) -> Phases:
    bars = rng.choice(num_layers - k * min_length + k - 1, k - 1, replace=False) if k > 1 else ()
    return _from_bars(sorted(int(b) for b in bars), num_layers, k, min_length)


def _from_bars(bars: Sequence[int], num_layers: int, k: int, min_length: int) -> Phases:
    """Stars and bars: k-1 bars among the places left once every phase has its `min_length` layers."""
    places = num_layers - k * min_length + k - 1
    edges = [-1, *bars, places]
    return Phases(tuple(b - a - 1 + min_length for a, b in pairwise(edges)), method="random")


def _max_cut(matrix: Array, k: int, min_length: int) -> tuple[list[int], tuple[float, ...]]:
    """Edges 0..L of at most k segments, and the gain of each cut in cutting order."""
    prefix = _prefix_sums(1.0 - matrix)
    tolerance = _tie_tolerance(matrix)
    edges, gains = [0, len(matrix)], []
    best = {0: _best_cut(prefix, 0, len(matrix), min_length, tolerance)}
    while len(edges) - 1 < k:
        top = max(gain for _, gain in best.values())
        if top == -np.inf:
            break
        start = max(s for s, (_, gain) in best.items() if gain >= top - tolerance)
        cut, gain = best[start]
        end = edges[edges.index(start) + 1]
        gains.append(gain)
        edges = sorted([*edges, cut])
        best[start] = _best_cut(prefix, start, cut, min_length, tolerance)
        best[cut] = _best_cut(prefix, cut, end, min_length, tolerance)
    return edges, tuple(gains)


def _best_cut(prefix: Array, start: int, end: int, min_length: int, tolerance: float) -> tuple[int, float]:
    """The cut of layers start+1..end with the largest total distance across it; gain -inf when none is allowed."""
    cuts = np.arange(start + min_length, end - min_length + 1)
    if len(cuts) == 0:
        return start, -np.inf
    across = prefix[cuts, end] - prefix[start, end] - prefix[cuts, cuts] + prefix[start, cuts]
    last = int(np.flatnonzero(across >= across.max() - tolerance)[-1])
    return int(cuts[last]), float(across[last])


def _dynamic_programme(matrix: Array, k: int, score: str, min_length: int) -> Phases:
    """best[e] after j rounds is the best total score of layers 1..e in j phases; back-pointers recover the cuts."""
    num_layers, tolerance = len(matrix), _tie_tolerance(matrix)
    score_se = _segment_scores(matrix, score, min_length)
    best, pointers = score_se[0], []
    for _ in range(k - 1):
        total_se = best[:, None] + score_se
        threshold = total_se.max(axis=0) - tolerance
        last = num_layers - np.argmax((total_se >= threshold)[::-1], axis=0)
        pointers.append(last)
        best = total_se[last, np.arange(num_layers + 1)]
    edges = [num_layers]
    for last in reversed(pointers):
        edges.append(int(last[edges[-1]]))
    edges = [0, *reversed(edges)]
    scores = tuple(float(score_se[s, e]) for s, e in pairwise(edges))
    return Phases(tuple(e - s for s, e in pairwise(edges)), scores, "dp")


def _segment_scores(matrix: Array, score: str, min_length: int) -> Array:
    """(L+1, L+1): the score of the segment of layers s+1..e, -inf where it is shorter than `min_length`."""
    prefix = _prefix_sums(matrix)
    diagonal = np.diagonal(prefix)
    within_se = diagonal[None, :] - prefix - prefix.T + diagonal[:, None]
    length_se = np.arange(len(prefix))[None, :] - np.arange(len(prefix))[:, None]
    n = np.maximum(length_se, 1).astype(float)
    scores = {"weighted": within_se / n, "mean": within_se / n**2, "cut": within_se - n**2}
    return np.where(length_se >= min_length, scores[score], -np.inf)


def _prefix_sums(matrix: Array) -> Array:
    """(L+1, L+1): entry i, j is the sum of the first i rows and j columns."""
    return np.pad(matrix.cumsum(axis=0).cumsum(axis=1), ((1, 0), (1, 0)))


def _tie_tolerance(matrix: Array) -> float:
    """Two totals closer than the rounding of the prefix sums are a tie."""
    return 1e-14 * len(matrix) ** 2 * max(1.0, float(np.abs(matrix).max()))


def _check_similarity(similarity: ArrayLike) -> Array:
    if hasattr(similarity, "detach"):
        similarity = similarity.detach().cpu().double()
    matrix = np.asarray(similarity, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) == 0:
        raise ValueError(f"similarity must be a square L x L matrix over a_1..a_L, got shape {matrix.shape}")
    if not np.isfinite(matrix).all():
        raise ValueError("similarity has NaN or infinite entries: measure it again on finite states")
    if np.abs(matrix - matrix.T).max() > 1e-5 * max(1.0, float(np.abs(matrix).max())):
        raise ValueError("similarity must be symmetric: pass the layer-layer matrix, or average it with its transpose")
    return (matrix + matrix.T) / 2


def _check_counts(num_layers: int, k: int, min_length: int) -> None:
    if min_length < 1:
        raise ValueError(f"min_length must be at least 1, got {min_length}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if min_length > num_layers:
        raise ValueError(
            f"a phase of at least {min_length} layers does not fit into {num_layers}: give a smaller --min_length"
        )
    if k > num_layers // min_length:
        raise ValueError(
            f"k={k} phases of at least {min_length} layers need {k * min_length} layers, but there are {num_layers}: "
            "give a smaller --k"
        )
