"""Which blocks do the same: each block of a model is replaced by each other one, and depth is cut where that breaks it.

The similarity of states says where depth changes its *representation*. Replacement says which blocks compute the same
*function*, as the tied block of a phase has to. Nothing is trained: block l of the untouched model is replaced by block
m, the blocks behind it run as they are, and the model's output is compared with the original output.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raptor.data.stream import Batch
from raptor.phases.cut import Phases, best_partition, check_counts
from raptor.phases.evidence import NUM_RESAMPLES, CutEvidence, boundary_intervals
from raptor.phases.partitions import num_partitions, sample_partitions
from raptor.progress import Progress
from raptor.streaming import Array, NotSaved, Record
from raptor.vit.calls import first_tensor
from raptor.vit.trajectory import autocast
from raptor.vit.view import Context, ViT

Part = Literal["block", "attention", "mlp"]
PARTS: tuple[Part, ...] = ("block", "attention", "mlp")
_NUM_RANDOM = 1000  # partitions whose mean cost is shown beside the best one


@dataclass
class Replacement(Record):
    """What replacing one block by another costs.

    Attributes:
        cost: (L, L); row l, column m is the cost of block m in the place of block l, averaged over images. The diagonal
            is 0.
        agreement: (L, L); the share of images whose class stays the same, or None for a model without a head.
        measure: `kl` for the divergence of class probabilities in nats, `error` for the relative error of `a_L`.
        image_cost: the cost for each image, (N, L, L), in the order of the images.
    """

    cost: Array
    agreement: Array | None
    measure: Literal["kl", "error"]
    num_images: int
    image_cost: NotSaved[Array | None] = None

    def resampled(self, seed: int = 0) -> Array:
        """The cost over all images, (R, L, L), with the images drawn again with replacement."""
        assert self.image_cost is not None, "a result that was read from a file has no images"
        num = self.num_images
        # Counts of each image, not drawn images: a resample is then one product.
        weights_rn = np.random.default_rng(seed).multinomial(num, np.full(num, 1 / num), size=NUM_RESAMPLES)
        return np.einsum("rn,nlm->rlm", weights_rn / num, self.image_cost)


# Replacing ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_replacement(
    vit: ViT, batches: Iterable[Batch], parts: Sequence[Part] = ("block",), precision: str = "fp32"
) -> dict[Part, Replacement]:
    """Replace every block, or one part of it, by every other one over a stream of images.

    Costs about L^2 / 2 forward passes per image and part.
    """
    costs: dict[Part, list[Tensor]] = defaultdict(list)
    agreements: dict[Part, list[Tensor]] = defaultdict(list)
    pairs = list(permutations(range(1, vit.num_layers + 1), 2))
    with Progress(f"replacing blocks of {vit.name}", None, "replacements") as bar:
        # Known only here: whoever makes the stream decides how many batches it has.
        bar.total = len(parts) * len(pairs) * len(batches)  # type: ignore[arg-type]
        for batch in batches:
            images = batch.images.to(vit.device, non_blocking=True)
            with autocast(precision, vit.device):
                a_0, context = vit.embed(images)
                states = vit.unroll(a_0, context)
                original = _outcome(vit, states[-1])
                for part in parts:
                    # A block in its own place changes nothing.
                    cost_bll = torch.zeros(len(images), vit.num_layers, vit.num_layers, dtype=torch.float64)
                    agrees_bll = torch.ones_like(cost_bll)
                    for layer, other in pairs:
                        altered = _outcome(vit, _run_replaced(vit, states[layer - 1], context, layer, other, part))
                        if vit.num_classes:
                            # KL(original || altered) of class probabilities for each image, in nats.
                            log_p_bc = F.log_softmax(original, dim=-1)
                            cost_b = (log_p_bc.exp() * (log_p_bc - F.log_softmax(altered, dim=-1))).sum(-1)
                            agrees_bll[:, layer - 1, other - 1] = (original.argmax(-1) == altered.argmax(-1)).double()
                        else:
                            cost_b = (altered - original).flatten(1).norm(dim=1) / original.flatten(1).norm(dim=1)
                        cost_bll[:, layer - 1, other - 1] = cost_b
                        bar.advance()
                    costs[part].append(cost_bll)
                    agreements[part].append(agrees_bll)
    found: dict[Part, Replacement] = {}
    for part in parts:
        image_cost = torch.cat(costs[part]).numpy()
        bad = np.argwhere(~np.isfinite(image_cost))
        if len(bad):
            _, row, column = bad[0]
            raise ValueError(
                f"{vit.name} with block {row + 1} replaced by block {column + 1} gives an output that is not finite: "
                "check its weights, or use --precision fp32"
            )
        found[part] = Replacement(image_cost.mean(0), None, "error", len(image_cost), image_cost)
        if vit.num_classes:
            found[part].measure = "kl"
            found[part].agreement = torch.cat(agreements[part]).mean(0).numpy()
    return found


def _outcome(vit: ViT, last_btd: Tensor) -> Tensor:
    """Class scores (B, C) of a last state, or the state itself where the model has no head."""
    if vit.num_classes:
        # Blocks that do nearly the same differ in the last digits of log-probabilities, which float32 rounds away.
        return vit.finish(last_btd).double()
    return last_btd.double()


def _run_replaced(vit: ViT, x_btd: Tensor, context: Context, layer: int, other: int, part: Part) -> Tensor:
    """The last state of the model with block `layer` replaced by block `other`, from the state before `layer`."""
    # The arguments of the place, not of the block that is put there: masks and rotary angles belong to the place.
    args, kwargs = context.calls[layer - 1]
    if part == "block":
        x_btd = first_tensor(vit.blocks[other - 1](x_btd, *args, **kwargs))
    else:
        with _replaced_part(vit.blocks[layer - 1], vit.blocks[other - 1], part) as block:
            x_btd = first_tensor(block(x_btd, *args, **kwargs))
    return vit.unroll(x_btd, context, start=layer)[-1]


@contextmanager
def _replaced_part(block: nn.Module, other: nn.Module, part: Part) -> Iterator[nn.Module]:
    """Inside, one branch of `block`, with its norm and scale, is the branch of `other`."""
    names = branch_names(block)[part]
    own = {name: block._modules[name] for name in names}
    try:
        for name in names:
            block._modules[name] = other._modules[name]
        yield block
    finally:
        block._modules.update(own)


def parts_of(vit: ViT) -> tuple[tuple[Part, ...], str]:
    """The parts of the model's blocks that can be replaced, and why they are not all of them."""
    try:
        for block in vit.blocks:
            branch_names(block)
    except ValueError as error:
        return ("block",), str(error)
    return PARTS, ""


def branch_names(block: nn.Module) -> dict[Part, list[str]]:
    """The children of a pre-norm block that belong to its attention and to its MLP.

    Blocks declare their children in the order in which they call them: a norm, attention, a norm, an MLP.
    """
    names = []
    for name, child in block.named_children():
        if list(child.parameters()):
            names.append(name)
    attention = None
    second_norm = None
    for place, name in enumerate(names):
        if attention is None and "att" in type(block.get_submodule(name)).__name__.lower():
            attention = place
        elif attention is not None and second_norm is None and "norm" in name.lower():
            second_norm = place
    if attention is None or second_norm is None or "norm" not in names[0].lower():
        kind = type(block).__name__
        raise ValueError(f"the branches of a {kind} cannot be told apart: only whole blocks can be replaced")
    return {"attention": names[:second_norm], "mlp": names[second_norm:]}


# Cutting --------------------------------------------------------------------------------------------------------------


def cut_by_function(cost: Array, k: int, min_length: int = 1, max_length: int | None = None) -> Phases:
    """The exact partition into `k` contiguous phases of least cost, by dynamic programming.

    The cost of a phase is the sum of the costs of replacing its blocks by one representative, the best of the phase.
    Ties go to the later boundary and to the earlier representative.

    Args:
        cost: (L, L), see `Replacement`.
        min_length, max_length: shortest and longest phase allowed; by default any.
    """
    num_layers = len(cost)
    longest = max_length or num_layers
    check_counts(num_layers, k, min_length)
    if k * longest < num_layers:
        raise ValueError(f"{k} phases of at most {longest} blocks are fewer than {num_layers}: give a larger --k")
    # Costs are negated, because the dynamic programme looks for the largest sum.
    score_se = np.full((num_layers + 1, num_layers + 1), -np.inf)  # of a phase of the blocks s+1..e
    for start in range(num_layers):
        for end in range(start + min_length, min(start + longest, num_layers) + 1):
            score_se[start, end] = -cost[start:end, start:end].sum(axis=0).min()
    edges = best_partition(score_se, k, tolerance=1e-12 * float(np.abs(cost).max()))
    return with_representatives(cost, Phases(tuple(np.diff(edges).tolist()), method="function"))


def with_representatives(cost: Array, phases: Phases) -> Phases:
    """The same phases with the representative of each, and what it costs to replace the whole phase by it."""
    costs = []
    representatives = []
    for first, last in phases.spans:
        cost_m = cost[first - 1 : last, first - 1 : last].sum(axis=0)
        # Of the blocks of the phase only: one from elsewhere would start the phase at another function.
        best = int(cost_m.argmin())
        costs.append(float(cost_m[best]))
        representatives.append(first + best)
    return Phases(phases.lengths, tuple(costs), phases.method, tuple(representatives))


def function_evidence(found: Replacement, phases: Phases) -> CutEvidence:
    """How sure the boundaries of a cut by function are over resampled images, and what other partitions cost."""
    # The mean over all contiguous partitions into as many phases, or over a sample where there are many.
    num = min(num_partitions(phases.num_layers, phases.k), _NUM_RANDOM)
    costs = []
    for drawn in sample_partitions(phases.num_layers, phases.k, num):
        costs.append(sum(with_representatives(found.cost, drawn).scores))
    evidence = CutEvidence(cost=sum(phases.scores), random_cost=float(np.mean(costs)))
    if found.num_images > 1:
        recut = [cut_by_function(cost, phases.k) for cost in found.resampled()]
        evidence.boundaries, evidence.stability = boundary_intervals(phases, recut)
    return evidence
