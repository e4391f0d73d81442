"""Which list of modules carries the residual stream: every candidate is watched in one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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
    """A call of a module: the state it was given and what it returned, as they were at that time."""

    module: nn.Module
    state: Any
    output: Any
    in_place: bool = False
    """Whether it wrote into its input."""


@dataclass
class Candidate:
    """A list of alike modules that may be the blocks."""

    path: str
    blocks: list[nn.Module]
    calls: list[Call] = field(default_factory=list)
    entered: list[Any] = field(default_factory=list)
    """The states that the running blocks were given."""
    within: set[str] = field(default_factory=set)
    """Paths of the candidates whose blocks were running when this one's were called."""

    def states(self) -> list[Tensor]:
        """`a_0..a_L`, for a candidate without a fault."""
        return [self.calls[0].state, *(first_tensor(call.output) for call in self.calls)]

    def num_parameters(self) -> int:
        return sum(p.numel() for block in self.blocks for p in block.parameters())

    def fault(self) -> str | None:
        """The first condition that the list fails, or None."""
        if not self.calls:
            return f"`{self.path}` is not called by the forward pass"
        # Hooks on a module that stands at two depths fire twice, and could not say at which depth.
        if len(set(map(id, self.blocks))) < len(self.blocks):
            return f"`{self.path}` holds one module at several places (put a copy.deepcopy at each, with equal weights)"
        if [id(call.module) for call in self.calls] != [id(block) for block in self.blocks]:
            return f"the modules of `{self.path}` are not called once each, in order"
        return self._fault_of_shapes() or self._fault_of_stream()

    def _fault_of_shapes(self) -> str | None:
        if self.calls[0].state is None:
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
        return None

    def _fault_of_stream(self) -> str | None:
        # A recorded state is a reference. A block that writes into its input would change the state before it.
        for layer, call in enumerate(self.calls, start=1):
            if call.in_place:
                return f"block {layer} of `{self.path}` writes into its input (`x += y` where `x = x + y` is needed)"
        for layer, (call, following) in enumerate(zip(self.calls, self.calls[1:]), start=1):
            # To the last bit: the model hands on this very tensor, unless something is done between two blocks.
            if not torch.equal(first_tensor(call.output), following.state):
                return f"block {layer + 1} of `{self.path}` does not start from block {layer}'s output"
        return None

    def nested_with(self, other: Candidate) -> bool:
        """Whether the blocks of one list run inside those of the other."""
        return self.path in other.within or other.path in self.within

    def works_on_tokens(self) -> bool:
        state = self.calls[0].state if self.calls else None
        return isinstance(state, Tensor) and state.ndim == 3

    def is_alike_in_shape(self) -> bool:
        """Whether all modules have parameters of the same shapes, as whole blocks have and the parts of one do not."""
        shapes = [[tuple(p.shape) for p in block.parameters()] for block in self.blocks]
        return bool(shapes[0]) and all(one == shapes[0] for one in shapes)


def find_candidates(model: nn.Module, path: str | None) -> list[Candidate]:
    """Lists of at least two alike modules with parameters, the largest first; only `path` when it is given."""
    if path is not None:
        return [_named_candidate(model, path)]
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        # Lists of plain layers are stems and heads; a list of several types is a block's own sequence.
        alike = len({type(child) for child in module}) == 1
        if alike and not any(_is_plain_layer(child) for child in module):
            found.append(Candidate(name, list(module)))
    return sorted(found, key=Candidate.num_parameters, reverse=True)


def _named_candidate(model: nn.Module, path: str) -> Candidate:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise ValueError(f"the model has no `{path}`: blocks= takes the dotted path of its block list") from None
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        raise ValueError(f"`{path}` is a {type(module).__name__}, not a list of blocks")
    for part in module:
        if _is_plain_layer(part):
            raise ValueError(f"`{path}` holds a {type(part).__name__} beside its blocks: move it out of the list")
    if len(module) < 2:
        raise ValueError(f"`{path}` has {len(module)} blocks: a study of depth needs two or more")
    return Candidate(path, list(module))


def _is_plain_layer(module: nn.Module) -> bool:
    # nn.TransformerEncoderLayer is of torch too and is a block: it has children.
    return type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())


def choose(candidates: list[Candidate], name: str) -> Candidate:
    """The outermost list that fulfils every condition; NotAViT where depth is not in this list alone."""
    faults = {candidate.path: candidate.fault() for candidate in candidates}
    # A block's experts or its two branches may form a sound list as well, so the outermost one is taken.
    sound = {path for path, fault in faults.items() if fault is None}
    chosen = next((c for c in candidates if c.path in sound and not c.within & sound), None)
    if chosen is None:
        fault = faults[candidates[0].path]
        raise NotAViT(f"{name}: no single residual stream of blocks: {fault}: choose a ViT of raptor models")
    for other in candidates:
        if other is chosen:
            continue
        if other.works_on_tokens() and not other.nested_with(chosen):
            raise NotAViT(f"{name}: the depth of `{chosen.path}` continues in another list, `{other.path}`")
        if other.path in sound and other.path.startswith(f"{chosen.path}.") and other.is_alike_in_shape():
            raise NotAViT(
                f"{name}: `{chosen.path}` holds groups of blocks, such as `{other.path}`: put all into one list, "
                f"or take the groups as they are with blocks='{chosen.path}'"
            )
    # A larger list beside the chosen one would be the trunk, as where a small adapter runs along a frozen model.
    for other in candidates[: candidates.index(chosen)]:
        if other.calls and not other.nested_with(chosen):
            fault = faults[other.path]
            raise NotAViT(f"{name}: `{other.path}` holds more of its weights than `{chosen.path}`, but {fault}")
    return chosen


def watch_forward(
    model: nn.Module, candidates: list[Candidate], images: Tensor, kwargs: Arguments, name: str
) -> tuple[list[Call], Tensor]:
    """One forward pass; fills the candidates' calls and returns every other call (norms, linears) and the output."""
    others: list[Call] = []
    handles = []
    running: list[str] = []

    def watch(module: nn.Module, args: tuple[Any, ...], kw: Arguments, output: Any) -> None:
        others.append(Call(module, state_argument(args, kw), output))

    def enter_of(candidate: Candidate) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kw: Arguments) -> None:
            candidate.within.update(path for path in running if path != candidate.path)
            candidate.entered.append(_kept(state_argument(args, kw)))
            running.append(candidate.path)

        return hook

    def leave_of(candidate: Candidate) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kw: Arguments, output: Any) -> None:
            running.pop()
            # The state was copied on entry. If it is another one now, the block has written into it.
            given = candidate.entered.pop()
            in_place = isinstance(given, Tensor) and not torch.equal(given, state_argument(args, kw))
            candidate.calls.append(Call(module, given, _kept(output), in_place))

        return hook

    for candidate in candidates:
        for block in candidate.blocks:
            handles.append(block.register_forward_pre_hook(enter_of(candidate), with_kwargs=True))
            handles.append(block.register_forward_hook(leave_of(candidate), with_kwargs=True))
    # The final norm and the classifier stand outside the blocks, so the norms inside need not be watched.
    in_blocks = {id(m) for c in candidates for b in c.blocks for m in b.modules()}
    for module in model.modules():
        if id(module) not in in_blocks and (is_norm(module) or isinstance(module, nn.Linear)):
            handles.append(module.register_forward_hook(watch, with_kwargs=True))
    try:
        output = model(images, **per_batch(kwargs, images))
    # A model may raise anything on a size that it was not made for.
    except Exception as error:
        raise WrongSize(
            f"{name} does not run on {images.shape[-1]} px images: give another --size, or another model "
            f"({reason_of(error)})"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return others, output_tensor(output)


def _kept(value: Any) -> Any:
    """A copy of a state, or of a block's output around it, that later writes into the state do not reach."""
    if isinstance(value, tuple | list) and value:
        return (_kept(value[0]), *value[1:])
    return value.clone() if isinstance(value, Tensor) else value


def is_norm(module: nn.Module) -> bool:
    # By name, because every library has norms of its own class.
    return "norm" in type(module).__name__.lower() and any(p.ndim == 1 for p in module.parameters(recurse=False))
