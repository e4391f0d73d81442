"""What `raptor phases` finds in one model: its similarity, its cuts and how sure they are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from raptor.data.stream import ImageStream
from raptor.devices import seeded
from raptor.phases.cut import (
    Phases,
    find_phases,
    most_cuts,
    num_partitions,
    shortest_phase,
    within_and_across,
)
from raptor.phases.evidence import CutEvidence, Evidence, no_structure
from raptor.phases.outliers import Outliers
from raptor.phases.similarity import CoordinateStatistics, SimilarityResult, measure_similarity
from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.streaming import Array, Record
from raptor.subject import Subject
from raptor.vit.builders import build_base
from raptor.vit.stated import forward_arguments
from raptor.vit.structure import inspect_vit
from raptor.vit.trajectory import Trajectories
from raptor.vit.view import POOLED, ModelFacts, ViT

TWIN_IMAGES = 64
TWIN_SECONDS = 20
DEFAULT_CUTS = (2, 3, 4)
DEFAULT_TOKENS = "pooled"  # better surrogates than "all" over three seeds: docs/results/recipe.md
_FEW_IMAGES = 16


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
    evidence = Evidence(matrix, measured.blocks, twin_matrix, shortest_phase("maxcut", min_length))
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
        twin = untrained_twin(vit)
    except ValueError as error:
        return None, f"{missing} ({error})"
    trajectories = Trajectories(twin, batches.sample(TWIN_IMAGES), precision)
    measured = measure_similarity(trajectories, vit.num_layers, vit.groups, cka_features=None, model=twin.name)
    return measured.matrices[tokens], f"its untrained twin was measured on {measured.num_images} images"


def untrained_twin(vit: ViT, seed: int = 0) -> ViT:
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
    length = shortest_phase(method, min_length)
    num_partitions(vit.num_layers, 1, length)
    most = most_cuts(vit.num_layers, length) if method == "maxcut" else vit.num_layers // length
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
