"""The whole suite in one pass over the images: direction, gathering, rank, modes, basins, stability on a few of them.

Cost on top of the forward pass, for states of B images, T tokens and D coordinates at L+1 layers:

- direction reads every state and its predecessor a few times;
- the group means behind modes and basins read every state once; what follows works on `(B, L+1, D)`;
- the pooled modes take `8 L D^2` multiplications per image (on its group means) in float64, cls updates `L D^2`;
- gathering reads three states per layer, of at most 256 images;
- ranks use only `rank_images` images, with 2 L Gram matrices `T x T` each; a host thread factorises them in parallel;
- stability takes `stability_images` images, kept and followed at the end in fp32: one clean pass, and for every target,
  size and injection layer l the L - l blocks after it. These passes are counted in the result.

Nothing in the loop waits for the device, and the last factorisations run on the host while a GPU follows perturbations.
Memory does not grow with the number of images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from raptor.certificate.verdict import named_images
from raptor.data.stream import Batch, sharing
from raptor.devices import Ranks, full_precision
from raptor.dynamics.basins import Basins, BasinsResult
from raptor.dynamics.direction import Direction, DirectionResult, Gathering, GatheringResult
from raptor.dynamics.modes import Modes, ModesResult
from raptor.dynamics.rank import RANK_IMAGES, Rank, RankResult
from raptor.dynamics.stability import EPS, PhaseAttraction, Stability, StabilityResult, measure_attraction
from raptor.dynamics.states import EvenSubset, group_means, take_rows
from raptor.phases.study import few_images
from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.streaming import Record, Rows, reduce_all
from raptor.subject import Subject
from raptor.vit.trajectory import NonFiniteStates, Trajectories
from raptor.vit.view import Context, ModelFacts, ViT

STABILITY_BATCH = 32  # the random directions depend on it
_Factorised = tuple[RankResult, ModesResult, BasinsResult | None, list[str]]


@dataclass
class DynamicsResult(Record):
    """Every measure of one model. basins and stability are None where they were not asked for or not possible.

    num_images: images in the one pass. num_stability_images: those that were perturbed.
    perturbation_passes: forward passes that each perturbed image took, blocks run over L.
    precision: of the `states`, and of the perturbed ones (`stability`).
    notes: what was left out, and why. findings: what was found, in words.
    attraction: of each phase; empty where phases or perturbations were not given.
    """

    model: ModelFacts
    num_images: int
    direction: DirectionResult
    rank: RankResult
    modes: ModesResult
    basins: BasinsResult | None
    stability: StabilityResult | None
    num_stability_images: int
    perturbation_passes: float
    precision: dict[str, str]
    notes: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    gathering: GatheringResult | None = None
    attraction: list[PhaseAttraction] = field(default_factory=list)


@dataclass(kw_only=True)
class SidesFile(ResultFile):
    """A result about a model, or about a surrogate beside its teacher.

    num_images: that were measured. phases: the lengths that figures show.
    class_names: label -> name, of the classes whose basins were measured.
    """

    data: str = "the data"
    split: str = "val"
    image_size: int | None = None
    num_images: int | None = None
    phases: list[int] | None = None
    class_names: dict[str, str] | None = None
    seed: int = 0
    provenance: Provenance = field(default_factory=Provenance)
    subject: Subject | None = None

    @property
    def images(self) -> str:
        """What was measured on, in words."""
        split = self.split
        # Nothing was trained, so that none of all images are training images.
        if split == "all" and "surrogate" not in self.sides():
            split = ""
        return named_images(self.num_images, split, self.data, self.image_size)

    def sides(self) -> dict[str, Any]:
        """The sides that were measured, the teacher first."""
        found = {side: getattr(self, side, None) for side in ("teacher", "surrogate", "twin")}
        return {side: one for side, one in found.items() if one is not None}


@dataclass
class DynamicsFile(SidesFile):
    """dynamics.json: what `raptor dynamics` measured of a model, or of a surrogate beside its teacher."""

    FILE: ClassVar[str] = "dynamics.json"

    teacher: DynamicsResult
    surrogate: DynamicsResult | None
    bad_images: list[str] = field(default_factory=list)

    @property
    def few_images(self) -> str:
        """A warning where very few images were read; empty where there were enough."""
        return few_images(self.teacher.num_images, self.split, "other images may give other curves")


def measure_dynamics(
    vit: ViT,
    batches: Iterable[Batch],
    *,
    num_images: int,
    phases: Sequence[int] | None = None,
    classes: Sequence[int] | None = None,
    stability_images: int = 64,
    rank_images: int = RANK_IMAGES,
    eps: Sequence[float] = EPS,
    perturbation: str = "relative",
    precision: str = "fp32",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> DynamicsResult:
    """Measure a teacher or a surrogate over `batches`. Ranks that share them all call this and get the same.

    Args:
        batches: such as `raptor.data.iterate(...)`, on the model's device.
        num_images: how many images they hold; the subsets are spread evenly over them.
        phases: their lengths, for the attraction of each phase; None leaves that out.
        classes: labels whose basins are followed; None leaves basins out.
        stability_images: images that are perturbed; 0 leaves stability out.
        rank_images: images whose updates are factorised.
        eps: sizes of the perturbations.
        perturbation: `relative` to each token's norm, or the `paper`'s `eps u` with `u ~ N(0, I)`.
        precision: `fp32` or `bf16` for the states; stability always runs in fp32.
        seed: of the perturbations.
        progress: called with (forward passes of one image done, all of them), perturbation passes included.
    """
    if stability_images:
        check_perturbable(vit)
    direction = Direction(vit.groups)
    gathering = Gathering(vit.groups, num_images=num_images)
    rank = Rank(vit.groups, rank_images, num_images)
    modes = Modes(vit.groups, num_images=num_images)
    basins = None
    if classes is not None:
        basins = Basins(vit.groups, classes)
    stability = None
    if stability_images:
        stability = Stability(vit.groups, eps, kind=perturbation, seed=seed)
    ranks = sharing(batches)
    done = 0.0
    total = float(num_images)
    if stability is not None:
        # A clean pass of each image beside the perturbed ones, and one of the first batch for the noise floor.
        num_perturbed = min(stability_images, num_images)
        passes = 1 + stability.count_block_calls(vit.num_layers) / vit.num_layers
        total += num_perturbed * passes + min(num_perturbed, STABILITY_BATCH)

    def count(num_passes: float) -> None:
        nonlocal done
        done = min(total, done + num_passes * ranks.size)  # the other ranks do about as many
        if progress is not None:
            progress(round(done), round(total))

    subset = EvenSubset(stability_images, num_images)
    to_perturb = Rows()
    num_seen = 0
    for states, _, batch in Trajectories(vit, batches, precision):
        # Computed once for modes and basins: each reads every state.
        means = group_means(states, vit.groups)
        direction.update(states, batch.places)
        gathering.update(states, batch.places)
        rank.update(states, batch.places)
        modes.update(states, means, batch.places)
        if basins is not None:
            basins.update(states, _host_labels(batches, batch), means, batch.places)
        # Images and not states, because they are embedded again in fp32, whatever the precision of this pass is.
        rows, places = subset.pick(len(batch.images), batch.places)
        to_perturb.add(take_rows(batch.images, rows), places)
        num_seen += len(batch.images)
        count(len(batch.images))
    num_seen = sum(ranks.gather(num_seen))
    if num_seen == 0:
        raise ValueError("there are no images to measure")
    reduce_all(ranks, direction, gathering, rank, modes, basins, to_perturb)
    # Before the factorisations, whose errors would not name a layer.
    ranks.first(partial(_check_finite, vit, direction))

    factorise: Callable[[], _Factorised] = partial(_factorise, rank, modes, basins)
    with ThreadPoolExecutor(1) as pool:
        # On rank 0 only. With a GPU the host factorises while perturbations are followed; on a CPU both would use the
        # same cores.
        if ranks.is_first and vit.device.type != "cpu":
            factorise = pool.submit(factorise).result
        if stability is not None:
            # Only rank 0 holds the images collected from all ranks, but all share the paths.
            perturbed = to_perturb.values() if ranks.size == 1 else ranks.first(lambda: to_perturb.values().cpu())
            _follow_perturbations(vit, stability, perturbed, ranks, count)

    def result() -> DynamicsResult:
        rank_result, modes_result, basins_result, notes = factorise()
        found = DynamicsResult(
            model=vit.facts(),
            num_images=num_seen,
            direction=direction.result(),
            rank=rank_result,
            modes=modes_result,
            basins=basins_result,
            stability=None,
            num_stability_images=len(to_perturb),
            perturbation_passes=0.0,
            precision={"states": precision, "stability": "fp32"},
            notes=notes,
            gathering=gathering.result(),
        )
        if stability is not None:
            found.stability = stability.result()
            found.perturbation_passes = stability.num_block_calls / vit.num_layers
            if phases is not None:
                found.attraction = measure_attraction(found.stability, phases)
        return found

    return ranks.first(result)


def _check_finite(vit: ViT, direction: Direction) -> None:
    bad = np.flatnonzero(~np.isfinite(direction.result().norm["all"].mean))
    if len(bad):
        raise NonFiniteStates.of(vit.name, f"from layer {bad[0]} on")


def _factorise(rank: Rank, modes: Modes, basins: Basins | None) -> _Factorised:
    """The results that take factorisations, and why there are no basins where they were asked for."""
    rank_result = rank.result()
    modes_result = modes.result()
    if basins is None:
        return rank_result, modes_result, None, []
    try:
        return rank_result, modes_result, basins.result(), []
    except ValueError as error:
        # Too few images of the chosen classes: the other measures are as good as ever.
        return rank_result, modes_result, None, [f"no basins: {error}"]


def _follow_perturbations(
    vit: ViT, stability: Stability, images: Tensor, ranks: Ranks, count: Callable[[float], None]
) -> None:
    """Perturb `images` (N, 3, H, W) in fp32; `count` is told the forward passes."""

    def run_from(layer: int, x_btd: Tensor, context: Context) -> list[Tensor]:
        count(len(x_btd) * (vit.num_layers - layer) / vit.num_layers)
        return vit.unroll(x_btd, context, start=layer)

    with full_precision(vit.device):
        for some in images.to(vit.device).split(STABILITY_BATCH):
            a_0, context = vit.embed(some)
            follow = partial(run_from, context=context)
            stability.update(follow(0, a_0), follow, ranks)


def check_perturbable(vit: ViT) -> None:
    """Raise for weights in half precision, in which small perturbations are lost."""
    if vit.dtype.itemsize < 4:
        raise ValueError(
            f"{vit.name} is opened in {str(vit.dtype).removeprefix('torch.')}: perturbations are followed in fp32, so "
            "open it without dtype, or give --stability false"
        )


def _host_labels(batches: Iterable[Batch], batch: Batch) -> list[int]:
    """The labels of a batch, from the data itself if possible: copying them from the device would wait for it."""
    table = getattr(getattr(batches, "data", None), "labels", None)
    if table is not None:
        return [int(table[i]) for i in batch.indices.tolist()]
    if batch.labels is None:
        raise ValueError("basins need labels: use data with classes, or leave classes out")
    return [int(label) for label in batch.labels.tolist()]
