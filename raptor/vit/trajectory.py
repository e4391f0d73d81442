"""The states of a model through depth, one batch at a time, and interventions on its states and blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn

from raptor.data.stream import Batch, sharing
from raptor.progress import track
from raptor.vit.groups import TokenGroups, image_vectors
from raptor.vit.view import ViT, changed_state, replaced_blocks

_PRECISIONS = ("fp32", "bf16")


class NonFiniteStates(ValueError):
    """The states of a model have NaN or infinite entries, or a norm or variance beyond float32."""

    @classmethod
    def of(cls, model: str, where: str) -> Self:
        """The error to raise; `where` names the layer and, if they are known, the images."""
        return cls(f"the states of {model} are not finite {where}: check its weights, or use fp32")


class Trajectories:
    """The states `a_0..a_L` of a model over batches of images; at most one batch of states is held at a time.

    Iteration yields `(states, output, batch)`: the L + 1 states (B, T, D), the model's own output, and the batch.

    Args:
        vit: the model.
        batches: an iterable of `Batch`, such as `raptor.data.iterate(...)`, that may be iterated several times.
        precision: `fp32`, or `bf16` to run the model under autocast (states may then be bf16).
        title: text of the progress bar; None for no bar.
        quiet: whether a short pass leaves no line in a log.

    Attributes:
        ranks: the processes that share the batches.
    """

    def __init__(
        self,
        vit: ViT,
        batches: Iterable[Batch],
        precision: str = "fp32",
        title: str | None = None,
        quiet: bool = False,
    ):
        self.vit = vit
        self.batches = batches
        self.precision = precision
        self.title = title
        self.quiet = quiet
        self.ranks = sharing(batches)
        autocast(precision, vit.device)  # refuses an unknown precision before any image is read

    def __repr__(self) -> str:
        shape = f"(B, {self.vit.groups.num_tokens}, {self.vit.dim})"
        return f"Trajectories(a_0..a_{self.vit.num_layers} of {self.vit.name}, each {shape})"

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[list[Tensor], Tensor, Batch]]:
        device = self.vit.device
        batches = self.batches
        if self.title is not None:
            batches = track(batches, self.title, self.quiet)
        for batch in batches:
            with torch.no_grad(), autocast(self.precision, device):
                states, output = self.vit.record(batch.images.to(device, non_blocking=True))
            yield states, output, batch
            states.clear()  # the caller still has the list; without this, two batches would be held at once


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which a model runs at `precision`."""
    if precision not in _PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: choose from {', '.join(_PRECISIONS)}")
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def check_states(states: Sequence[Tensor], num_layers: int | None = None, num_tokens: int | None = None) -> None:
    """Raise unless `states` are the states `a_0..a_L` of at least one image, each (B, T, D)."""
    if num_layers is None and len(states) < 2:
        raise ValueError(f"a trajectory needs at least two states, got {len(states)}")
    if num_layers is not None and len(states) != num_layers + 1:
        raise ValueError(f"expected the {num_layers + 1} states a_0..a_{num_layers}, got {len(states)}")
    shape = tuple(states[0].shape)
    expected = "(B, T, D)" if num_tokens is None else f"{num_tokens} tokens"
    if len(shape) != 3 or num_tokens not in (None, shape[1]):
        raise ValueError(f"states of shape {shape} do not fit {expected}: pass the model's own states and token groups")
    # Its means would be NaN, and a bootstrap over images has nothing to draw from.
    if shape[0] == 0:
        raise ValueError("a batch of states has no images")


@torch.no_grad()
def pool_layers(states: Sequence[Tensor], groups: TokenGroups) -> dict[str, Tensor]:
    """The `image_vectors` of the layers 1..L, each (B, L, D), in float32 or better."""
    by_group: dict[str, list[Tensor]] = {}
    # Not a_0, which no block has made: phases are cut from the layers 1..L.
    for x_btd in states[1:]:
        for name, vector_bd in image_vectors(x_btd, groups, float_type(x_btd)).items():
            by_group.setdefault(name, []).append(vector_bd)
    return {name: torch.stack(vectors, dim=1) for name, vectors in by_group.items()}


def float_type(x: Tensor) -> torch.dtype:
    """The type of `x`, or float32 if `x` is in half precision."""
    return torch.promote_types(x.dtype, torch.float32)


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in `float_type(x)`."""
    return x.to(float_type(x))


def double(x: Tensor) -> Tensor:
    """`x` as float64 on the same device, or on the CPU if the device has no float64."""
    # Apple's GPUs have no float64.
    if x.device.type == "mps":
        x = x.cpu()
    return x.double()


def perturb(
    vit: ViT, layer: int, change: Tensor | Callable[[Tensor], Tensor], group: str = "all"
) -> AbstractContextManager[None]:
    """Inside the context, `change` is added to the state at `layer` (0..L), at the tokens of `group`.

    `change` is a tensor that broadcasts to (B, tokens of the group, D), or a function from the state of the group to
    such a tensor.
    """

    def add(part_btd: Tensor) -> Tensor:
        return part_btd + (change(part_btd) if callable(change) else change)

    return changed_state(vit, layer, add, group)


def swap_blocks(vit: ViT, first: int, second: int) -> AbstractContextManager[None]:
    """Inside the context, blocks `first` and `second` (1..L) have changed places."""
    return replaced_blocks(vit, {first: vit.block(second), second: vit.block(first)})


def replace_block(vit: ViT, layer: int, module: nn.Module) -> AbstractContextManager[None]:
    """Inside the context, `module` stands in the place of block `layer` (1..L)."""
    return replaced_blocks(vit, {layer: module})
