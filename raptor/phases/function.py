"""Which blocks do the same: each block of a model is replaced by each other one, and depth is cut where that breaks it.

The similarity of states says where depth changes its *representation*. Replacement says which blocks compute the same
*function*, as the block of a phase has to. Nothing is trained: block l of the untouched model is replaced by block m,
the blocks behind it run as they are, and the model's output is compared with the original output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from raptor.streaming import Moments
from raptor.vit.trajectory import Trajectories, autocast
from raptor.vit.view import Context, ViT, first_tensor

Array = NDArray[np.float64]
Part = Literal["block", "attention", "mlp"]
Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Replacement:
    """What replacing one block by another costs.

    Attributes:
        cost: (L, L); row l, column m is the cost of block m in the place of block l, averaged over images. The diagonal
            is 0.
        agreement: (L, L); the share of images whose class stays the same, or None for a model without a head.
        measure: `kl` for the divergence of class probabilities in nats, `error` for the relative error of `a_L`.
        part: whether whole blocks are replaced or only one branch of them.
    """

    cost: Array
    agreement: Array | None
    measure: Literal["kl", "error"]
    part: Part
    num_images: int


@dataclass(frozen=True)
class FunctionCut:
    """Phases whose blocks can stand for each other, and the block that stands for each phase best.

    Attributes:
        lengths: of the phases, in the order of depth.
        representatives: for each phase, the block (1..L) that replaces all others of the phase at the least cost.
        cost: sum over all blocks of the cost of being replaced by the representative of their phase.
    """

    lengths: tuple[int, ...]
    representatives: tuple[int, ...]
    cost: float


@torch.no_grad()
def measure_replacement(
    vit: ViT, trajectories: Trajectories, logits: Logits | None = None, part: Part = "block"
) -> Replacement:
    """Replace every block by every other one over a stream of images.

    Costs `L (L + 1) / 2` forward passes per image. Memory does not grow with the number of images.

    Args:
        logits: class scores of a last state `a_L`, for a model without a head of its own; without either the cost is
            the relative error of `a_L`.
        part: replace whole blocks, or only their attention or their MLP.
    """
    if logits is None and vit.num_classes:
        logits = vit.finish
    cost, agreement = Moments(), Moments()
    num_images = 0
    for states, _, batch in trajectories:
        images = batch.images.to(vit.device, non_blocking=True)
        with autocast(trajectories.precision, vit.device):
            _, context = vit.embed(images)
            found = _replace_all(vit, states, context, logits, part)
        cost.add_rows(found.cost_bll)
        if found.agrees_bll is not None:
            agreement.add_rows(found.agrees_bll)
        num_images += len(images)
    cost.reduce(trajectories.ranks)
    if logits is not None:
        agreement.reduce(trajectories.ranks)
    return Replacement(
        cost=cost.mean.cpu().numpy(),
        agreement=None if logits is None else agreement.mean.cpu().numpy(),
        measure="error" if logits is None else "kl",
        part=part,
        num_images=int(cost.num),
    )


@dataclass(frozen=True)
class _Found:
    """Costs of one batch: for each image, an (L, L) matrix."""

    cost_bll: Tensor
    agrees_bll: Tensor | None


def _replace_all(vit: ViT, states: Sequence[Tensor], context: Context, logits: Logits | None, part: Part) -> _Found:
    num_layers, num_images = vit.num_layers, len(states[0])
    cost_bll = torch.zeros(num_images, num_layers, num_layers, dtype=torch.float64, device=states[0].device)
    agrees_bll = None if logits is None else torch.ones_like(cost_bll)
    original_bc = None if logits is None else logits(states[-1]).float()
    for layer in range(1, num_layers + 1):
        for other in range(1, num_layers + 1):
            if layer == other:
                continue
            last_btd = _run_replaced(vit, states[layer - 1], context, layer, other, part)
            place = (slice(None), layer - 1, other - 1)
            if logits is None or original_bc is None or agrees_bll is None:
                cost_bll[place] = _relative_error(last_btd, states[-1])
                continue
            altered_bc = logits(last_btd).float()
            cost_bll[place] = _divergence(original_bc, altered_bc)
            agrees_bll[place] = (original_bc.argmax(-1) == altered_bc.argmax(-1)).double()
    return _Found(cost_bll, agrees_bll)


def _run_replaced(vit: ViT, x_btd: Tensor, context: Context, layer: int, other: int, part: Part) -> Tensor:
    """The last state of the model with block `layer` replaced by block `other`, from the state before `layer`."""
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


def branch_names(block: nn.Module) -> dict[Part, list[str]]:
    """The children of a pre-norm block that belong to its attention and to its MLP.

    Blocks declare their children in the order in which they call them: a norm, attention, a norm, an MLP.
    """
    names = [name for name, child in block.named_children() if any(True for _ in child.parameters())]
    kinds = [type(block.get_submodule(name)).__name__.lower() for name in names]
    attention = next((i for i, kind in enumerate(kinds) if "att" in kind), None)
    second_norm = next((i for i, name in enumerate(names) if i > (attention or 0) and "norm" in name.lower()), None)
    if attention is None or second_norm is None or "norm" not in names[0].lower():
        raise ValueError(f"the branches of a {type(block).__name__} cannot be told apart: replace whole blocks instead")
    return {"attention": names[:second_norm], "mlp": names[second_norm:]}


def _divergence(original_bc: Tensor, altered_bc: Tensor) -> Tensor:
    """KL(original || altered) of class probabilities for each image, in nats."""
    log_p_bc = F.log_softmax(original_bc.double(), dim=-1)
    log_q_bc = F.log_softmax(altered_bc.double(), dim=-1)
    return (log_p_bc.exp() * (log_p_bc - log_q_bc)).sum(-1)


def _relative_error(x_btd: Tensor, target_btd: Tensor) -> Tensor:
    difference_btd = x_btd.double() - target_btd.double()
    return difference_btd.flatten(1).norm(dim=1) / target_btd.double().flatten(1).norm(dim=1)


def cut_by_function(cost: Array, k: int, min_length: int = 1, max_length: int | None = None) -> FunctionCut:
    """The exact partition into `k` contiguous phases of least cost, by dynamic programming.

    The cost of a phase is the sum of the costs of replacing its blocks by one representative, the best of the phase.
    Ties go to the later boundary and to the earlier representative.

    Args:
        cost: (L, L), see `Replacement`.
        max_length: longest phase that is allowed; by default any.
    """
    num_layers = len(cost)
    longest = num_layers if max_length is None else max_length
    if not 1 <= k <= num_layers or k * min_length > num_layers or k * longest < num_layers:
        raise ValueError(
            f"{num_layers} blocks cannot be cut into {k} phases of {min_length} to {longest} blocks: change --k or the "
            "length of phases"
        )
    best = np.full((k + 1, num_layers + 1), np.inf)
    start_of = np.zeros((k + 1, num_layers + 1), dtype=int)
    best[0, 0] = 0.0
    segment_cost, representative = _segments(cost)
    for phase in range(1, k + 1):
        for stop in range(1, num_layers + 1):
            for start in range(max(0, stop - longest), stop - min_length + 1):
                total = best[phase - 1, start] + segment_cost[start, stop]
                if total <= best[phase, stop] and np.isfinite(total):
                    best[phase, stop] = total
                    start_of[phase, stop] = start
    lengths: list[int] = []
    representatives: list[int] = []
    stop = num_layers
    for phase in range(k, 0, -1):
        start = int(start_of[phase, stop])
        lengths.insert(0, stop - start)
        representatives.insert(0, int(representative[start, stop]))
        stop = start
    return FunctionCut(tuple(lengths), tuple(representatives), float(best[k, num_layers]))


def _segments(cost: Array) -> tuple[Array, NDArray[np.int64]]:
    """Cost and representative (1..L) of the phase of the blocks start+1..stop, for each start and stop."""
    num_layers = len(cost)
    total_of = np.full((num_layers + 1, num_layers + 1), np.inf)
    representative = np.zeros((num_layers + 1, num_layers + 1), dtype=np.int64)
    for start in range(num_layers):
        for stop in range(start + 1, num_layers + 1):
            cost_by_representative = cost[start:stop, start:stop].sum(axis=0)
            chosen = int(cost_by_representative.argmin())
            total_of[start, stop] = cost_by_representative[chosen]
            representative[start, stop] = start + chosen + 1
    return total_of, representative
