"""What `raptor phases` finds in one model: its similarity, its cuts and how sure they are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from raptor.data.stream import ImageStream
from raptor.phases.cut import Phases, check_counts, choose_k, find_phases, shortest_phase, within_and_across
from raptor.phases.evidence import CutEvidence, Evidence, no_structure
from raptor.phases.function import Replacement, cut_by_function, function_evidence, measure_replacement, parts_of
from raptor.phases.outliers import Outliers
from raptor.phases.similarity import CoordinateStatistics, measure_similarity
from raptor.phases.twin import untrained_twin
from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.streaming import Array, Record
from raptor.subject import Subject
from raptor.vit.groups import POOLED
from raptor.vit.trajectory import Trajectories
from raptor.vit.view import ModelFacts, ViT

FUNCTION_IMAGES = 32
DEFAULT_CUTS = (2, 3, 4)
DEFAULT_TOKENS = "pooled"  # better surrogates than "all" over three seeds: docs/results/recipe.md
_FEW_IMAGES = 16
_TWIN_IMAGES = 64
_TWIN_SECONDS = 20


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
        chosen_k: the k that the gains suggest; only a finding where `structure` is empty.
        gains: gain of each further cut.
        side: `teacher` or `surrogate` of a run; empty for a model by itself.
        evidence: k -> how sure each boundary is, and what matrices without phases give; also at `chosen_k`.
        k_shares: k -> the share of resamples that suggest it.
        null_gains: `shuffled`, `smooth` and `twin` -> the gain of each further cut there.
        twin: how the untrained twin was measured, or why it was not.
        structure: why there is no phase structure to speak of; empty where there is.
        replacement: of the method `function`, `block`, `attention` and `mlp` -> the cost of replacing this part.
        no_parts: why only whole blocks were replaced; empty where parts were, too.
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
    replacement: dict[str, Replacement] = field(default_factory=dict)
    no_parts: str = ""
    subject: Subject | None = None

    @property
    def matrix(self) -> Array:
        """The similarity that phases are cut from."""
        return self.similarity[self.tokens]

    @property
    def suggestion(self) -> str:
        """The suggested k in one sentence, or why there is none."""
        if self.structure:
            return f"no k is suggested: {self.structure}"
        said = f"the gains of further cuts suggest k={self.chosen_k}"
        if self.k_shares:
            said += f" ({self.k_shares.get(self.chosen_k, 0.0):.0%} of resamples)"
        if self.is_gradual:
            said += "; depth changes gradually: a smooth matrix without boundaries has as much contrast"
        return said

    @property
    def is_gradual(self) -> bool:
        """Whether a smooth matrix without boundaries has as much contrast as the cut at the chosen k."""
        cut = self.evidence.get(self.chosen_k)
        if cut is None or cut.smooth is None or cut.lowest is None:
            return False
        return cut.lowest <= cut.smooth

    @property
    def few_images(self) -> str:
        """A warning where very few images were read; empty where there were enough."""
        return few_images(self.num_images, self.split, "cuts may lie elsewhere on others")

    @property
    def whose(self) -> str:
        """The model by its side and name: `teacher: NAME`, `surrogate: NAME`, or only the name of a model by itself."""
        side = self.side
        if not side and self.model.phases:
            side = "surrogate"
        if not side:
            return self.model.name
        return f"{side}: {self.model.name}"

    @property
    def chosen(self) -> Phases | None:
        """The phases at the chosen k, or at the nearest k that was cut; None when nothing was cut."""
        if not self.phases:
            return None
        # Only the numbers that were asked for are cut, and the chosen one need not be among them.
        nearest = min(self.phases, key=lambda k: (abs(k - self.chosen_k), k))
        return self.phases[nearest]


def few_images(num: int, split: str, danger: str) -> str:
    """A warning where very few images of a split were read; empty where there were enough."""
    if num >= _FEW_IMAGES:
        return ""
    remedy = ""
    if split == "val":
        remedy = ": --split all reads more than the held-out ones, if --num_images allows"
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
    tokens: str = DEFAULT_TOKENS,
    standardise: bool = False,
    precision: str = "fp32",
    twin: bool | None = None,
) -> ModelPhases:
    """Measure the similarity of one model over `batches` and cut its layers into phases, once for each `k`.

    `k`: by default the numbers of `DEFAULT_CUTS` that the model has room for.
    `twin`: whether its untrained twin is measured too, on up to 64 of the images; by default where that takes less than
    20 seconds and the model can be built anew.
    """
    k = check_cuts(vit, k, method, tokens)
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
    # The twin is the same model, so that the pass just made says how long its own will take.
    seconds = (time.monotonic() - started) / max(1, measured.num_images)

    def finish() -> ModelPhases:
        found = ModelPhases(
            model=vit.facts(),
            num_images=measured.num_images,
            image_size=vit.preprocess.size,
            similarity=measured.matrices,
            cka=measured.cka,
            outliers=measured.outliers,
            tokens=tokens,
            standardised=standardise,
            phases={},
            within={},
            chosen_k=1,
            gains=[],
            subject=Subject.of(vit, batches.data),
        )
        reason = ""
        if twin is False:
            reason = "--twin false"
        elif standardise:
            reason = "its coordinates are not standardised"
        elif twin is None and seconds * _TWIN_IMAGES > _TWIN_SECONDS:
            reason = f"it takes longer than {_TWIN_SECONDS} s: --twin true"
        twin_matrix = None
        if reason:
            found.twin = f"its untrained twin was not measured ({reason})"
        else:
            twin_matrix, found.twin = _twin_similarity(vit, batches, tokens, precision)
        evidence = Evidence(found.matrix, measured.blocks, twin_matrix)
        if method == "function":
            parts, found.no_parts = parts_of(vit)
            replaced = measure_replacement(vit, batches.whole().sample(FUNCTION_IMAGES), parts, precision)
            found.replacement = {str(part): replacement for part, replacement in replaced.items()}
            for num in k:
                found.phases[num] = cut_by_function(replaced["block"].cost, num)
                found.evidence[num] = function_evidence(replaced["block"], found.phases[num])
        else:
            for num in k:
                found.phases[num] = find_phases(found.matrix, num, method)
                found.evidence[num] = evidence.of(found.phases[num])
        _suggest_k(found, evidence)
        return found

    return batches.ranks.first(finish)


def _suggest_k(found: ModelPhases, evidence: Evidence) -> None:
    """The k that the gains of max-cut suggest, whichever method cut the phases, and what speaks for it."""
    chosen = choose_k(found.matrix)
    found.chosen_k = chosen.k
    found.gains = list(chosen.gains)
    found.k_shares = evidence.k_shares()
    found.null_gains = evidence.null_gains()
    cut = found.evidence.get(chosen.k)
    # Cuts by function have no contrast, by which the suggestion is judged.
    if cut is None or found.replacement:
        cut = evidence.of(find_phases(found.matrix, chosen.k))
        found.evidence.setdefault(chosen.k, cut)
    found.structure = no_structure(chosen.k, cut, found.matrix)
    for num, phases in found.phases.items():
        found.within[num] = within_and_across(found.matrix, phases)


def _twin_similarity(vit: ViT, batches: ImageStream, tokens: str, precision: str) -> tuple[Array | None, str]:
    """The similarity of the untrained twin, and a note: on how many images it was measured, or why it was not."""
    try:
        twin = untrained_twin(vit)
    except ValueError as error:
        return None, f"its untrained twin was not measured ({error})"
    # On one rank: the twin takes 64 images at most. Without CKA, which needs more.
    trajectories = Trajectories(twin, batches.whole().sample(_TWIN_IMAGES), precision)
    measured = measure_similarity(trajectories, vit.num_layers, vit.groups, cka_features=None, model=twin.name)
    return measured.matrices[tokens], f"its untrained twin was measured on {measured.num_images} images"


def check_cuts(
    vit: ViT, k: Sequence[int] | None, method: str = "maxcut", tokens: str = DEFAULT_TOKENS
) -> Sequence[int]:
    """`k`, by default the numbers of `DEFAULT_CUTS` that there is room for.

    Raises when the model cannot be cut this way, before any image is read.
    """
    present = [name for name, _ in vit.groups.present()]
    known = ["all", *present]
    if set(POOLED) & set(present):
        known.append("pooled")
    if tokens not in known:
        raise ValueError(f"{vit.name} has no {tokens!r} tokens: choose from {', '.join(known)}")
    shortest = shortest_phase(method)
    check_counts(vit.num_layers, 1, shortest)
    if k is None:
        # Where there is room for none of them the smallest is kept, and refused below by its number.
        k = [num for num in DEFAULT_CUTS if num <= vit.num_layers // shortest] or DEFAULT_CUTS[:1]
    for num in k:
        check_counts(vit.num_layers, num, shortest)
    return k
