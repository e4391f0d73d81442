"""Which list of modules carries the residual stream: every candidate is watched in one forward pass."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raptor.vit.calls import first_tensor, output_tensor, per_batch, reason_of, state_argument
from raptor.vit.origin import Arguments
from raptor.vit.view import NotAViT

# Two, because with one image a batch axis cannot be told from an axis of length 1.
NUM_PROBED = 2  # images of a probe forward


class WrongSize(NotAViT):
    """The model does not run on images of this size."""


@dataclass
class Call:
    """A call of a block: copies of the states that it was given and returned, which later writes do not reach.

    Attributes:
        in_place: whether it wrote into its input.
    """

    block: nn.Module
    before: Any
    after: Any
    returns_tuple: bool
    in_place: bool


@dataclass
class Candidate:
    """A list of alike modules that may be the blocks.

    Attributes:
        within: paths of the candidates whose blocks were running when this one's were called.
    """

    path: str
    blocks: list[nn.Module]
    calls: list[Call] = field(default_factory=list)
    within: set[str] = field(default_factory=set)

    def states(self) -> list[Tensor]:
        """`a_0..a_L`, for a candidate without a fault."""
        return [self.calls[0].before, *(call.after for call in self.calls)]

    def fault(self) -> str | None:
        """The first condition that the list fails, or None."""
        if not self.calls:
            return f"`{self.path}` is not called by the forward pass"
        # Hooks on a module that stands at two depths fire twice, and could not say at which depth.
        if len(set(map(id, self.blocks))) < len(self.blocks):
            return f"`{self.path}` holds one module at several places (put a copy.deepcopy at each, with equal weights)"
        if [id(call.block) for call in self.calls] != [id(block) for block in self.blocks]:
            return f"the modules of `{self.path}` are not called once each, in order"
        if self.calls[0].before is None:
            return f"the modules of `{self.path}` are not given the state as their first argument"
        states = self.states()
        if not all(isinstance(state, Tensor) for state in states):
            return f"the modules of `{self.path}` do not map tensors to tensors"
        first = tuple(states[0].shape)
        if len(first) != 3:
            return f"`{self.path}` works on states of shape {first}, not (batch, tokens, dim)"
        # Models of windows or of several views put more rows into a batch, and a row is then no image.
        if first[0] != NUM_PROBED:
            return f"`{self.path}` has {first[0]} rows of tokens for {NUM_PROBED} images, not one for each"
        for layer, state in enumerate(states):
            if tuple(state.shape) != first:
                shape = tuple(state.shape)
                return f"`{self.path}` changes the state's shape from {first} to {shape} at block {layer}"
        # A recorded state is a reference. A block that writes into its input would change the state before it.
        for layer, call in enumerate(self.calls, start=1):
            if call.in_place:
                return f"block {layer} of `{self.path}` writes into its input (`x += y` where `x = x + y` is needed)"
        for layer, (call, following) in enumerate(zip(self.calls, self.calls[1:]), start=1):
            # To the last bit: the model hands on this very tensor, unless something is done between two blocks.
            if not torch.equal(call.after, following.before):
                return f"block {layer + 1} of `{self.path}` does not start from block {layer}'s output"
        return None


def find_candidates(model: nn.Module, path: str | None) -> list[Candidate]:
    """Lists of at least two alike modules with parameters, the largest first; only `path` when it is given."""

    def plain_layer(blocks: nn.ModuleList | nn.Sequential) -> str | None:
        # nn.TransformerEncoderLayer is of torch too and is a block: it has children.
        for block in blocks:
            if type(block).__module__.startswith("torch.nn.") and not list(block.children()):
                return type(block).__name__
        return None

    if path is not None:
        try:
            named = model.get_submodule(path)
        except AttributeError:
            raise ValueError(f"the model has no `{path}`: blocks= takes the dotted path of its block list") from None
        if not isinstance(named, nn.ModuleList | nn.Sequential):
            raise ValueError(f"`{path}` is a {type(named).__name__}, not a list of blocks")
        plain = plain_layer(named)
        if plain is not None:
            raise ValueError(f"`{path}` holds a {plain} beside its blocks: move it out of the list")
        if len(named) < 2:
            raise ValueError(f"`{path}` has {len(named)} blocks: a study of depth needs two or more")
        return [Candidate(path, list(named))]
    sizes = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        # Lists of plain layers are stems and heads; a list of several types is a block's own sequence.
        if len({type(block) for block in module}) == 1 and plain_layer(module) is None:
            num_parameters = sum(p.numel() for block in module for p in block.parameters())
            sizes.append((num_parameters, Candidate(name, list(module))))
    sizes.sort(key=lambda entry: entry[0], reverse=True)
    return [candidate for _, candidate in sizes]


def choose(candidates: list[Candidate], name: str) -> Candidate:
    """The outermost list that fulfils every condition; NotAViT where depth is not in this list alone."""
    faults = {candidate.path: candidate.fault() for candidate in candidates}
    # A block's experts or its two branches may form a sound list as well, so the outermost one is taken.
    sound = {path for path, fault in faults.items() if fault is None}
    chosen = next((c for c in candidates if c.path in sound and not c.within & sound), None)
    if chosen is None:
        fault = faults[candidates[0].path]
        raise NotAViT(f"{name}: no single residual stream of blocks: {fault}: choose a ViT of raptor models")
    beside = []  # candidates that were called, and neither inside nor around the chosen one
    for other in candidates:
        if other is not chosen and other.calls and not {other.path, chosen.path} & (other.within | chosen.within):
            beside.append(other)
    for other in beside:
        state = other.calls[0].before
        if isinstance(state, Tensor) and state.ndim == 3:
            raise NotAViT(f"{name}: the depth of `{chosen.path}` continues in another list, `{other.path}`")
    for other in candidates:
        # Whole blocks have parameters of the same shapes, and the parts of one block do not.
        shapes = [[p.shape for p in block.parameters()] for block in other.blocks]
        is_alike = bool(shapes[0]) and all(one == shapes[0] for one in shapes)
        if other.path in sound and other.path.startswith(f"{chosen.path}.") and is_alike:
            raise NotAViT(
                f"{name}: `{chosen.path}` holds groups of blocks, such as `{other.path}`: put all into one list, "
                f"or take the groups as they are with blocks='{chosen.path}'"
            )
    # A larger list beside the chosen one would be the trunk, as where a small adapter runs along a frozen model.
    if beside and candidates.index(beside[0]) < candidates.index(chosen):
        other = beside[0]
        raise NotAViT(
            f"{name}: `{other.path}` holds more of its weights than `{chosen.path}`, but {faults[other.path]}"
        )
    return chosen


def watch_forward(
    model: nn.Module, candidates: list[Candidate], images: Tensor, kwargs: Arguments, name: str
) -> tuple[list[tuple[nn.Module, Any]], Tensor]:
    """One forward pass that fills the candidates' calls.

    The result is the output, and each norm outside the candidates with the state that it was given.
    """
    norms: list[tuple[nn.Module, Any]] = []
    running: list[tuple[str, Any]] = []  # paths of the candidates whose blocks run, with the states they were given

    def enter(candidate: Candidate, _block: nn.Module, args: tuple[Any, ...], kw: Arguments) -> None:
        candidate.within.update(path for path, _ in running if path != candidate.path)
        state = state_argument(args, kw)
        if isinstance(state, Tensor):
            state = state.clone()
        running.append((candidate.path, state))

    def leave(candidate: Candidate, block: nn.Module, args: tuple[Any, ...], kw: Arguments, output: Any) -> None:
        _, before = running.pop()
        # The state was copied on entry. If it is another one now, the block has written into it.
        in_place = isinstance(before, Tensor) and not torch.equal(before, state_argument(args, kw))
        after = first_tensor(output)
        if isinstance(after, Tensor):
            after = after.clone()
        candidate.calls.append(Call(block, before, after, isinstance(output, tuple | list), in_place))

    def keep(norm: nn.Module, args: tuple[Any, ...], kw: Arguments, _output: Any) -> None:
        norms.append((norm, state_argument(args, kw)))

    in_blocks: set[nn.Module] = set()
    with ExitStack() as hooks:
        for candidate in candidates:
            for block in candidate.blocks:
                in_blocks.update(block.modules())
                hooks.enter_context(block.register_forward_pre_hook(partial(enter, candidate), with_kwargs=True))
                hooks.enter_context(block.register_forward_hook(partial(leave, candidate), with_kwargs=True))
        # The final norm stands outside the blocks, so the norms inside need not be watched.
        for module in model.modules():
            # By name, because every library has norms of its own class.
            is_norm = "norm" in type(module).__name__.lower()
            if is_norm and module not in in_blocks and any(p.ndim == 1 for p in module.parameters(recurse=False)):
                hooks.enter_context(module.register_forward_hook(keep, with_kwargs=True))
        try:
            output = model(images, **per_batch(kwargs, images))
        # A model may raise anything on a size that it was not made for.
        except Exception as error:
            raise WrongSize(
                f"{name} does not run on {images.shape[-1]} px images: give another --size, or another model "
                f"({reason_of(error)})"
            ) from error
    return norms, output_tensor(output)
