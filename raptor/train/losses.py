"""What a step minimises beside its blocks: the weights of each state's error, and the term of a head's classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raptor.certificate.heads import Head
from raptor.data.stream import TrainStream
from raptor.devices import ONE_PROCESS, Ranks
from raptor.phases.cut import Phases
from raptor.streaming import Moments
from raptor.vit.groups import GROUP_NAMES, TokenGroups
from raptor.vit.trajectory import NonFiniteStates, autocast
from raptor.vit.view import ViT

NORMALISATIONS = ("none", "layer", "group", "coordinate")
_VARIANCE_BATCHES = 8
_FLOOR = 0.01  # of the median coordinate's variance: smaller ones count as this


def token_weights(groups: TokenGroups, weights: Mapping[str, float] | None) -> Tensor:
    """One weight per token, (T,), summing to one.

    `weights` are the weights of each token group's mean. Groups that the model does not have are dropped and the other
    weights renormalised. None gives the plain mean over all tokens.
    """
    w_t = torch.zeros(groups.num_tokens)
    if weights is None:
        return w_t + 1 / groups.num_tokens
    unknown = sorted(set(weights) - set(GROUP_NAMES))
    if unknown:
        raise ValueError(f"unknown token group {unknown[0]!r}: choose from {', '.join(GROUP_NAMES)}")
    given = {name: float(weights.get(name, 0.0)) for name, _ in groups.present()}
    total = sum(given.values())
    if total <= 0 or min(given.values()) < 0:
        raise ValueError(f"token weights {dict(weights)} give no positive weight to {', '.join(given)}")
    for name, where in groups.present():
        # A group's mean has this weight, so that its tokens share it.
        w_t[where] = given[name] / total / (where.stop - where.start)
    return w_t


class Target(NamedTuple):
    """The weights of a layer's squared error, (T,) or (T, D), and of its cosine, (T,)."""

    weights: Tensor
    cosine_t: Tensor | None


def targets_of(
    groups: TokenGroups,
    phases: Phases,
    variance: Tensor,
    stage1_weights: Mapping[str, float] | None,
    last_phase_weights: Mapping[str, float] | None,
    stage2_weights: Mapping[str, float] | None,
    cosine: float,
) -> tuple[list[Target], list[Target]]:
    """The targets of all layers in stage 1, whose last phase has weights of its own, and in stage 2.

    `variance` is (L, T) or (L, T, D), the divisor of each squared error.
    """
    num_early = phases.spans[-1][0] - 1  # layers before the last phase
    early_t = token_weights(groups, stage1_weights)
    last_t = token_weights(groups, last_phase_weights)
    joint_t = token_weights(groups, stage2_weights)
    stage1_lt = torch.stack([early_t] * num_early + [last_t] * (phases.num_layers - num_early))
    stage2_lt = joint_t.expand(phases.num_layers, -1)
    stages = []
    for w_lt in (stage1_lt, stage2_lt):
        w_lt = w_lt.to(variance.device)
        squared = w_lt
        if variance.ndim == 3:
            squared = w_lt[..., None]  # the same weight for all coordinates of a token
        squared = squared / variance
        angles: Sequence[Tensor | None] = [None] * phases.num_layers
        if cosine:
            angles = (cosine * w_lt).unbind()  # the cosine is of the states themselves: no variance divides it
        stages.append([Target(weights, cosine_t) for weights, cosine_t in zip(squared.unbind(), angles)])
    return stages[0], stages[1]


@dataclass(frozen=True)
class Targets:
    """What the error of each state is weighted with.

    Attributes:
        variance: (L, T), or (L, T, D) where each coordinate has its own: the divisor of each squared error.
        layers: the `Target` of each layer, by stage and by the number of tokens of a batch's images.
    """

    variance: Tensor
    layers: dict[tuple[str, int], list[Target]]

    @classmethod
    def of(
        cls,
        teacher: ViT,
        phases: Phases,
        variance: Tensor,
        *,
        stage1_weights: Mapping[str, float] | None = None,
        last_phase_weights: Mapping[str, float] | None = None,
        stage2_weights: Mapping[str, float] | None = None,
        cosine: float = 0.0,
        sizes: Sequence[int] = (),
    ) -> Targets:
        """The targets of a recipe.

        Args:
            stage1_weights: token-group weights of the phases before the last in stage 1; None takes the plain mean.
            last_phase_weights: the same of the last phase in stage 1.
            stage2_weights: token-group weights of every layer in stage 2.
            cosine: how much of `1 - cos` is added to each squared error.
            sizes: image sizes that batches may have beside the teacher's own.
        """
        variance = variance.to(teacher.device)
        layers = {}
        for groups in (teacher.groups, *(groups_at(teacher, size) for size in sizes)):
            here = at_groups(variance, teacher.groups, groups)
            stages = targets_of(groups, phases, here, stage1_weights, last_phase_weights, stage2_weights, cosine)
            layers["stage1", groups.num_tokens], layers["stage2", groups.num_tokens] = stages
        return cls(variance, layers)


@dataclass(frozen=True)
class HeadTerm:
    """The term of stage 2 that compares the classes which a head gives teacher and student.

    Attributes:
        weight: of the term beside the mean over layers.
        every_phase: whether it reads the state at the end of every phase, not only of the last one.
    """

    head: Head
    weight: float
    every_phase: bool = False

    def loss(self, student: ViT, teacher_btd: Tensor, ends: Sequence[Tensor]) -> Tensor:
        """KL(p_T || p_S), mean over images and over the states read; `ends` are the student's, one for each phase.

        Both go through the norm and head that the student has from its teacher, which are frozen.
        """

        def log_probabilities(state_btd: Tensor) -> Tensor:
            if self.head.linear is None:
                logits_bc = student.finish(state_btd)
            else:
                logits_bc = self.head.linear(student.features(state_btd))
            return logits_bc.float().log_softmax(dim=-1)

        with torch.no_grad():
            teacher_bc = log_probabilities(teacher_btd.float())
        read = ends if self.every_phase else ends[-1:]
        losses = []
        for end_btd in read:
            student_bc = log_probabilities(end_btd)
            losses.append(F.kl_div(student_bc, teacher_bc, reduction="batchmean", log_target=True))
        return torch.stack(losses).mean()


class StateVariance:
    """Variance of the states around each coordinate's mean, per layer and group, estimated over a few batches."""

    def __init__(self, num_layers: int, groups: TokenGroups):
        self.groups = groups
        self.num_layers = num_layers
        self.moments: dict[tuple[int, str], Moments] = {}

    def update(self, states: Iterable[Tensor]) -> None:
        """Add states `a_1..a_L`, each (B, T, D)."""
        names = ["all", *(name for name, _ in self.groups.present())]
        for layer, x_btd in enumerate(states, start=1):
            for name in names:
                moments = self.moments.setdefault((layer, name), Moments())
                moments.add_rows(x_btd[:, self.groups.slice(name)].flatten(0, 1))

    def reduce(self, ranks: Ranks) -> None:
        """Merge the statistics of all ranks."""
        for moments in self.moments.values():
            moments.reduce(ranks)

    def variance(self, layer: int, name: str) -> float:
        # States that do not vary would divide their error by 0.
        return float(self.moments[layer, name].variance.mean().clamp(min=1e-12))

    def concentration(self) -> tuple[float, int, str]:
        """The largest share of a token group's variance that 1 % of the coordinates hold, with its layer and group."""
        found = []
        for (layer, name), moments in self.moments.items():
            if name == "all":
                continue
            v_d = moments.variance.sort(descending=True).values
            num_top = max(1, round(len(v_d) / 100))
            share = v_d[:num_top].sum() / v_d.sum().clamp(min=1e-30)
            found.append((float(share), layer, name))
        return max(found)

    def divisors(self, normalise: str) -> Tensor:
        """What each squared error is divided by.

        (L, T): 1, the variance of its layer, or of its layer and group. (L, T, D): the variance of its layer, group and
        coordinate, raised to a hundredth of the median coordinate's where it is smaller.
        """
        if normalise not in NORMALISATIONS:
            raise ValueError(f"unknown normalise {normalise!r}: choose from {', '.join(NORMALISATIONS)}")
        if normalise == "none":
            return torch.ones(self.num_layers, self.groups.num_tokens)
        shape = [self.num_layers, self.groups.num_tokens]
        if normalise == "coordinate":
            shape.append(len(self.moments[1, "all"].variance))
        variance = torch.empty(shape)
        for layer in range(1, self.num_layers + 1):
            for name, where in self.groups.present():
                if normalise == "coordinate":
                    v_d = self.moments[layer, name].variance.float().cpu()
                    # A coordinate that hardly varies would weigh its rounding errors as much as others weigh signal.
                    variance[layer - 1, where] = v_d.clamp(min=max(_FLOOR * float(v_d.median()), 1e-12))
                elif normalise == "group":
                    variance[layer - 1, where] = self.variance(layer, name)
                else:
                    variance[layer - 1, where] = self.variance(layer, "all")
        return variance


def state_variance(
    teacher: ViT, stream: TrainStream, normalise: str, precision: str, ranks: Ranks = ONE_PROCESS
) -> StateVariance:
    """The variance of the teacher's states on a few batches of all ranks; on one where nothing is divided by it.

    Raises `NonFiniteStates` where the teacher's states are not finite, or their variance is beyond float32.
    """
    num_batches = _VARIANCE_BATCHES
    if normalise == "none":
        num_batches = 1  # only to see that the states are finite
    variance = StateVariance(teacher.num_layers, teacher.groups)
    for step in range(num_batches):
        # At one size, whatever sizes are trained on: `at_groups` carries the variances over.
        images = stream.batch(step, stage="variance", size=teacher.preprocess.size)
        with torch.no_grad(), autocast(precision, teacher.device):
            variance.update(teacher.unroll(*teacher.embed(images))[1:])
    # Merged over ranks, so that every rank divides by the numbers that one process would have.
    variance.reduce(ranks)
    for layer in range(1, teacher.num_layers + 1):
        # Written so that NaN fails as well.
        if not variance.variance(layer, "all") <= torch.finfo(torch.float32).max:
            raise NonFiniteStates.of(teacher.name, f"at layer {layer} on training images")
    return variance


@torch.no_grad()
def groups_at(teacher: ViT, size: int) -> TokenGroups:
    """The token groups of images of another size; ValueError where the teacher does not take them."""
    groups = dataclasses.replace(teacher.groups, patches=(size // teacher.patch_size) ** 2)
    weight = next(teacher.model.parameters())
    images = torch.zeros(1, 3, size, size).to(weight)
    try:
        x_btd, context = teacher.embed(images)
        taken = size % teacher.patch_size == 0 and x_btd.shape[1] == groups.num_tokens
        teacher.unroll(x_btd, context)
    # timm asserts the size, transformers raises a ValueError, and positions that do not fit end in a RuntimeError.
    except (AssertionError, RuntimeError, ValueError):
        taken = False
    if not taken:
        raise ValueError(
            f"{teacher.name} does not take images of {size} px beside {teacher.preprocess.size}: give sizes that are "
            f"multiples of {teacher.patch_size} to a model with dynamic position embeddings, or no --sizes"
        )
    return groups


def at_groups(v_lt: Tensor, old: TokenGroups, new: TokenGroups) -> Tensor:
    """Values (L, T) or (L, T, D), equal within each token group, for another number of patches."""
    if new == old:
        return v_lt
    # All tokens of a group have one value: the value of the first one serves any number of them.
    w_lt = v_lt.new_empty(len(v_lt), new.num_tokens, *v_lt.shape[2:])
    for name, where in new.present():
        w_lt[:, where] = v_lt[:, old.slice(name)][:, :1]
    return w_lt
