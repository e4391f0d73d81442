"""What has to be known of a teacher's blocks before one is copied or replaced; found by running them on one image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from raptor.vit.calls import copied, first_tensor, with_state
from raptor.vit.view import Context, ViT

_DIM_PER_HEAD = 64
_MIN_MATRICES = 4  # of attention and MLP, where a block holds them in linear layers


def own_copy(block: nn.Module, name: str) -> nn.Module:
    """A copy that holds its own weights, also of a surrogate's step, whose weights its model holds."""
    found: nn.Module = copied(block, name)
    own = getattr(found, "own", None)
    if own is not None:
        own()
    return found


@torch.no_grad()
def first_state(teacher: ViT) -> tuple[Tensor, Context]:
    """`a_0` of one image, and the arguments of the teacher's blocks."""
    size = teacher.preprocess.size
    image = torch.linspace(-1, 1, 3 * size * size).view(1, 3, size, size)
    return teacher.embed(image.to(next(teacher.model.parameters())))


def num_heads_of(block: nn.Module, dim: int) -> int:
    """Attention heads of a teacher's block, as it states them; one per 64 coordinates when it does not."""
    for module in block.modules():
        for name in ("num_heads", "num_attention_heads"):
            value = getattr(module, name, None)
            if isinstance(value, int) and value > 0 and dim % value == 0:
                return value
    return max(1, dim // _DIM_PER_HEAD)


def adapted_layers(teacher: ViT, layer: int, rank: int, which: str = "all") -> list[str]:
    """Names of the linear layers of a teacher's block that adapters of this rank change; ValueError if none can.

    `which` is `all`, or `mlp` for those that run after the second norm. A call of the block must run all of its linear
    layers: a block that does not computes with their weights itself, and would not see what adapters add to them.
    """
    block = own_copy(teacher.blocks[layer - 1], teacher.name)
    # A subclass may do something else with its weight.
    layers = {name: module for name, module in block.named_modules() if type(module) is nn.Linear}
    x_btd, context = first_state(teacher)
    args, kwargs = context.calls[layer - 1]
    called = _called(block, layers, x_btd, args, kwargs)
    if sorted(called) != sorted(layers) or len(layers) < _MIN_MATRICES:
        raise ValueError(
            f"the blocks of {teacher.name} do not call linear layers that hold their matrices: leave out --adapters"
        )
    most = min(min(module.weight.shape) for module in layers.values())
    if rank > most:
        raise ValueError(f"adapters of rank {rank} are larger than the matrices of {teacher.name}: at most {most}")
    if which == "all":
        return list(layers)
    points = modulation_points(teacher, layer)
    if not points:
        raise ValueError(f"the blocks of {teacher.name} have no second norm before their MLP: take --adapted all")
    second_norm = points[2]
    with_norm = {**layers, second_norm: block.get_submodule(second_norm)}
    order = _called(block, with_norm, x_btd, args, kwargs)
    return order[order.index(second_norm) + 1 :]


def modulation_points(teacher: ViT, layer: int) -> list[str]:
    """Names of (first norm, end of first branch, second norm, end of second branch) among the block's children.

    A branch ends at the last child with parameters called before the second norm, or before the block returns. Blocks
    that do not go norm, branch, norm, branch, or whose branches end in more than their own update, give an empty list.
    """
    block = teacher.blocks[layer - 1]
    if isinstance(block, nn.TransformerEncoderLayer):  # its fast path reads its children's weights and never calls them
        return []
    x_btd, context = first_state(teacher)
    args, kwargs = context.calls[layer - 1]
    with_parameters = {name: child for name, child in block.named_children() if list(child.parameters())}
    called = _called(block, with_parameters, x_btd, args, kwargs)
    norms = []  # places of the norms over all coordinates that have a gain or a bias
    for place, name in enumerate(called):
        child = getattr(block, name)
        shapes = {tuple(p.shape) for p in child.parameters()}
        if "norm" in type(child).__name__.lower() and shapes == {(teacher.dim,)}:
            norms.append(place)
    each_once = len(set(called)) == len(called)
    if not each_once or len(norms) != 2 or norms[0] != 0 or norms[1] < 2 or norms[1] == len(called) - 1:
        return []
    first_norm = called[0]
    first_end = called[norms[1] - 1]
    second_norm = called[norms[1]]
    second_end = called[-1]
    handles = [getattr(block, name).register_forward_hook(_no_update) for name in (first_end, second_end)]
    try:
        with torch.no_grad():
            left = first_tensor(block(x_btd, *args, **kwargs))
    finally:
        for handle in handles:
            handle.remove()
    # Without its updates a block returns the state, unless a child that adds the state itself has taken it along.
    if not torch.equal(left.to(x_btd), x_btd):
        return []
    return [first_norm, first_end, second_norm, second_end]


@torch.no_grad()
def _called(
    block: nn.Module, parts: Mapping[str, nn.Module], x_btd: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    """Names of the parts that a call of the block runs, in that order."""
    called: list[str] = []
    handles = []
    for name, part in parts.items():
        handles.append(part.register_forward_hook(lambda *_, name=name: called.append(name)))
    try:
        block(x_btd, *args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return called


def _no_update(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    return with_state(output, torch.zeros_like(first_tensor(output)))


@torch.no_grad()
def uses_places(teacher: ViT) -> bool:
    """Whether a block of the teacher treats patches by their place: rotary embedding, position bias, window or mask.

    Such a block does not commute with a permutation of the patches while its other arguments stay. The paper's block
    takes only the state, so it would lose what the arguments say. The first, middle and last block are tried, and one
    for each kind of arguments.
    """
    size = teacher.preprocess.size
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, 3, size, size, generator=generator).to(teacher.device)
    x_btd, context = teacher.embed(image)
    where = teacher.groups.slice("patches")
    order = torch.arange(x_btd.shape[1], device=x_btd.device)
    # A roll leaves no patch in its place.
    order[where] = order[where].roll(1)
    wide = double_device(x_btd.device)
    x_btd = x_btd.to(wide, torch.float64)
    order = order.to(wide)
    num = teacher.num_layers
    layers = {1, (num + 1) // 2, num}
    layers.update(n + 1 for n in context.distinct())
    for layer in sorted(layers):
        # In float64: with a LayerScale of 1e-5 a block's update is lost in the rounding of float32.
        block = own_copy(teacher.blocks[layer - 1], teacher.name).to(wide, torch.float64)
        args, kwargs = in_double(context.calls[layer - 1], wide)
        update = first_tensor(block(x_btd, *args, **kwargs)) - x_btd
        moved = first_tensor(block(x_btd[:, order], *args, **kwargs)) - x_btd[:, order]
        if not (moved - update[:, order]).norm() <= 1e-5 * update.norm():  # also if they are NaN
            return True
    return False


@torch.no_grad()
def has_image_arguments(teacher: ViT) -> bool:
    """Whether the model passes its blocks anything beside the state that has one row per image."""
    size = teacher.preprocess.size
    weight = next(teacher.model.parameters())
    shapes = []
    # With two batch sizes, because a dimension of 2 may be anything.
    for batch in (2, 3):
        _, context = teacher.embed(torch.zeros(batch, 3, size, size).to(weight))
        shapes.append([leaf.shape for leaf in tree_leaves(context.calls) if isinstance(leaf, Tensor)])
    return shapes[0] != shapes[1]


def double_device(device: torch.device) -> torch.device:
    """Where float64 can be computed: the device itself, unless it is Apple's."""
    if device.type == "mps":
        return torch.device("cpu")
    return device


def in_double(value: Any, device: torch.device) -> Any:
    """All tensors in nested tuples, lists and dictionaries on `device`, real ones as float64."""
    if isinstance(value, Tensor):
        dtype = value.dtype
        if value.is_floating_point():
            dtype = torch.float64
        return value.to(device, dtype)
    if isinstance(value, dict):
        return {name: in_double(item, device) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(in_double(item, device) for item in value)
    return value
