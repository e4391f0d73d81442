"""The view over any Vision Transformer: embed, blocks, finish, token groups.

A view never forks the model. One probe forward finds the list of blocks that carries the residual stream; states are
read with hooks on those blocks, so rotary arguments, drop-path and attention kernels stay the model's own. States are
`a_0` (what enters the first block) to `a_L` (what the last block returns), each `(batch, tokens, dim)`.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from raptor.data.preprocess import Preprocess
from raptor.run import Record
from raptor.vit.weights import fingerprint

POOLED = ("cls", "patches")  # the groups that `image_vectors` are of
GROUP_NAMES = ("cls", "registers", "patches")


class NotAViT(ValueError):
    """The model has no single residual stream of blocks; the message names the condition that failed."""


@dataclass(frozen=True)
class TokenGroups(Record):
    """How many tokens of one image are `cls` (0 or 1), `registers` and `patches`; any may be absent.

    `order` says how the groups stand along the token axis.
    """

    cls: int
    registers: int
    patches: int
    order: tuple[str, ...] = GROUP_NAMES

    @property
    def num_tokens(self) -> int:
        return self.cls + self.registers + self.patches

    def slice(self, name: str) -> slice:
        """Where the group `name` (or `all`) stands along the token axis; an empty slice when it is absent."""
        if name == "all":
            return slice(0, self.num_tokens)
        if name not in GROUP_NAMES:
            raise ValueError(f"unknown token group {name!r}: choose from all, {', '.join(GROUP_NAMES)}")
        start = sum(getattr(self, before) for before in self.order[: self.order.index(name)])
        return slice(start, start + getattr(self, name))

    def present(self) -> Iterator[tuple[str, builtins.slice]]:
        """Name and slice of each group that has tokens."""
        for name in GROUP_NAMES:
            s = self.slice(name)
            if s.stop > s.start:
                yield name, s


@dataclass(frozen=True)
class ModelFacts(Record):
    """What result files say about a model; `fingerprint` of its weights, None in older files."""

    name: str
    num_layers: int
    dim: int
    groups: TokenGroups
    grid: tuple[int, int]
    patch_size: int
    image_size: int
    num_classes: int
    num_parameters: int
    depth_conditioned: bool = False
    phases: list[int] | None = None
    fingerprint: str | None = None


@dataclass
class Context:
    """What the model passes to its blocks beside the state (rotary embeddings, masks): one `(args, kwargs)` a block."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]

    def distinct(self) -> list[int]:
        """The first block (from 0) of each kind of call: that with the same arguments."""
        found: list[int] = []
        for n, call in enumerate(self.calls):
            if not any(_same_arguments(call, self.calls[other]) for other in found):
                found.append(n)
        return found


def _same_arguments(call: Any, other: Any) -> bool:
    """Whether nested arguments are the same; objects that are no tensors, numbers or strings only if they are one."""
    (own, structure), (others, other_structure) = tree_flatten(call), tree_flatten(other)
    return structure == other_structure and all(map(_same_value, own, others))


def _same_value(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
    return a is b or (type(a) is type(b) and isinstance(a, bool | int | float | complex | str) and a == b)


@dataclass
class ViT:
    """A view over `model`. Make one with `raptor.open_vit`.

    Attributes:
        model: the model itself, untouched, in eval mode.
        name: what it was opened as.
        blocks_path: where its block list is, e.g. `blocks` or `encoder.layer`.
        groups: the token groups at the image size of `preprocess`.
        grid: patches along height and width.
        patch_size: side of a patch in pixels.
        dim: width of the residual stream.
        preprocess: how images are prepared for it.
        norm: the model's final norm (an identity when it has none).
        num_classes: classes of its head, 0 when it has no classifier.
        classes: their names in the head's order, where the model keeps them.
        depth_conditioned: whether the model passes different arguments to different blocks (rope-mixed models).
        source: how to open it again; empty for a module of the user's own.
        opened: what `open_vit` was called with, for a teacher that a surrogate has to name.
        forward_kwargs: keyword arguments of every call; a tensor among them has one row, repeated for each image.
        phases: of a surrogate (a `raptor.phases.Phases`, which is the sequence of its lengths), else None.
        returns_tuple: whether its blocks return a tuple around the state.
    """

    model: nn.Module
    name: str
    blocks_path: str
    groups: TokenGroups
    grid: tuple[int, int]
    patch_size: int
    dim: int
    preprocess: Preprocess
    norm: nn.Module
    num_classes: int = 0
    classes: list[str] | None = None
    depth_conditioned: bool = False
    source: dict[str, Any] = field(default_factory=dict)
    opened: dict[str, Any] = field(default_factory=dict)
    forward_kwargs: dict[str, Any] = field(default_factory=dict)
    phases: Sequence[int] | None = None
    returns_tuple: bool = False

    def __repr__(self) -> str:
        tokens = ", ".join(f"{s.stop - s.start} {name}" for name, s in self.groups.present())
        kind = f"surrogate with phases {' | '.join(map(str, self.phases))}, " if self.phases else ""
        size = f"{self.num_layers} blocks, dim {self.dim}, {tokens}, {self.preprocess.size} px"
        return f"ViT({self.name}: {kind}{size}, on {self.device})"

    @property
    def blocks(self) -> nn.ModuleList | nn.Sequential:
        """The model's own block list."""
        blocks = self.model.get_submodule(self.blocks_path)
        assert isinstance(blocks, nn.ModuleList | nn.Sequential)
        return blocks

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights, which images are turned into."""
        return _input_dtype(self.model)

    def to(self, device: torch.device | str) -> ViT:
        self.model.to(device)
        tensors = {k: v.to(device) for k, v in self.forward_kwargs.items() if isinstance(v, Tensor)}
        self.forward_kwargs = {**self.forward_kwargs, **tensors}
        return self

    def __call__(self, images: Tensor) -> Tensor:
        """The model's own output for `images` (B, 3, H, W), as a tensor."""
        return output_tensor(self.model(images.to(self.dtype), **per_batch(self.forward_kwargs, images)))

    def embed(self, images: Tensor) -> tuple[Tensor, Context]:
        """`a_0` (B, T, D) and what the blocks are called with, by running the model with its blocks skipped."""
        last = self.num_layers
        recorders = [_Recorder(self.returns_tuple, last=layer == last) for layer in range(1, last + 1)]
        with replaced_blocks(self, dict(enumerate(recorders, start=1))):
            with suppress(_LastBlockReached):
                self.model(images.to(self.dtype), **per_batch(self.forward_kwargs, images))
        return recorders[0].state, Context([recorder.call for recorder in recorders])

    def step(self, layer: int, x_btd: Tensor, context: Context) -> Tensor:
        """State after block `layer` (1..L) given the state before it."""
        args, kwargs = context.calls[layer - 1]
        return first_tensor(self.blocks[layer - 1](x_btd, *args, **kwargs))

    def unroll(self, x_btd: Tensor, context: Context, start: int = 0, stop: int | None = None) -> list[Tensor]:
        """States `start..stop` (both included; `stop` defaults to L) from the state at layer `start`."""
        states = [x_btd]
        for layer in range(start + 1, (self.num_layers if stop is None else stop) + 1):
            states.append(self.step(layer, states[-1], context))
        return states

    def finish(self, x_btd: Tensor) -> Tensor:
        """The model's output for a last state `a_L`: whatever the model does after its blocks."""
        size = self.preprocess.size
        blank = torch.zeros(x_btd.shape[0], 3, size, size, device=x_btd.device, dtype=self.dtype)
        steps: dict[int, nn.Module] = {layer: _Recorder(self.returns_tuple) for layer in range(1, self.num_layers)}
        steps[self.num_layers] = _Constant(x_btd, self.returns_tuple)
        with replaced_blocks(self, steps):
            return self(blank)

    def record(self, images: Tensor) -> tuple[list[Tensor], Tensor]:
        """States `a_0..a_L` and the output of one forward pass of the model, by hooks on its own blocks."""
        with recording(self) as states:
            output = self(images)
        return states, output

    def features(self, x_btd: Tensor) -> Tensor:
        """Pooled features of a last state, `(B, D)` or `(B, 2 D)`: final norm, then cls and mean patch concatenated."""
        return pool(self.norm(x_btd), self.groups)

    def facts(self) -> ModelFacts:
        """What result files say about the model."""
        return ModelFacts(
            name=self.name,
            num_layers=self.num_layers,
            dim=self.dim,
            groups=self.groups,
            grid=self.grid,
            patch_size=self.patch_size,
            image_size=self.preprocess.size,
            num_classes=self.num_classes,
            num_parameters=sum(p.numel() for p in self.model.parameters()),
            depth_conditioned=self.depth_conditioned,
            phases=list(self.phases) if self.phases else None,
            fingerprint=self.fingerprint(),
        )

    def fingerprint(self) -> str | None:
        """A short name of the weights; in half precision that of the weights before, None where they are not known."""
        is_half = any(p.is_floating_point() and p.element_size() < 4 for p in self.model.parameters())
        return self.opened.get("fingerprint") if is_half else fingerprint(self.model)

    def describe(self) -> dict[str, Any]:
        """`facts` as JSON."""
        return self.facts().to_dict()


@contextmanager
def recording(vit: ViT) -> Iterator[list[Tensor]]:
    """Inside the context, each forward pass of the model leaves its states `a_0..a_L` in the yielded list."""
    states: list[Tensor] = []

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[:] = [_state_argument(args, kwargs)]

    def leave(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        states.append(first_tensor(output))

    blocks = vit.blocks
    handles = [blocks[0].register_forward_pre_hook(enter, with_kwargs=True)]
    handles += [block.register_forward_hook(leave) for block in blocks]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replaced_blocks(vit: ViT, replacements: Mapping[int, nn.Module]) -> Iterator[None]:
    """Put other modules in place of blocks (numbered 1..L) and always put the model's own back."""
    blocks = vit.blocks
    names = list(blocks._modules)
    saved = dict(blocks._modules)
    for layer in replacements:
        if not 1 <= layer <= len(names):
            raise ValueError(f"layer {layer} is not a block of {vit.name}: blocks are numbered 1..{len(names)}")
    try:
        for layer, module in replacements.items():
            blocks._modules[names[layer - 1]] = module
        yield
    finally:
        blocks._modules.clear()
        blocks._modules.update(saved)


def pool(x_btd: Tensor, groups: TokenGroups) -> Tensor:
    """The image vectors concatenated: `(B, D)` or `(B, 2 D)`."""
    return torch.cat(list(image_vectors(x_btd, groups).values()), dim=-1)


def image_vectors(x_btd: Tensor, groups: TokenGroups, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """`cls` and `patches` (the mean patch) of each image, those that exist, each (B, D).

    The patches are all tokens but cls and registers, so the image size may differ from that of `groups`.
    """
    groups = replace(groups, patches=x_btd.shape[1] - groups.cls - groups.registers)
    vectors = {"cls": x_btd[:, groups.slice("cls").start].to(dtype or x_btd.dtype)} if groups.cls else {}
    patches_bpd = x_btd[:, groups.slice("patches")]
    return vectors | {"patches": patches_bpd.mean(1, dtype=dtype)} if patches_bpd.shape[1] else vectors


def per_batch(kwargs: Mapping[str, Any], images: Tensor) -> dict[str, Any]:
    """`kwargs` for a call with `images`: each tensor's single row repeated per image, on the images' device."""
    num_images = images.shape[0]
    return {
        k: v.to(images.device).expand(num_images, *v.shape[1:]) if isinstance(v, Tensor) else v
        for k, v in kwargs.items()
    }


def first_tensor(output: Any) -> Tensor:
    """A block's state: its output, or the first entry of the tuple some libraries return."""
    return output[0] if isinstance(output, tuple | list) else output


def with_state(output: Any, state: Tensor) -> Any:
    """A block's output with another state in its place; see `first_tensor`."""
    return type(output)((state, *output[1:])) if type(output) in (tuple, list) else state


def output_tensor(output: Any) -> Tensor:
    """A model's output as one tensor: logits, else pooled features, else token states."""
    if isinstance(output, Tensor):
        return output
    for key in ("logits", "pooler_output", "last_hidden_state"):
        value = getattr(output, key, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(output, Mapping):
        for key in ("x_norm_clstoken", "logits", "out", "pooler_output", "last_hidden_state"):
            if isinstance(output.get(key), Tensor):
                return output[key]
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    raise ValueError(
        f"cannot read a tensor out of the model's output of type {type(output).__name__}: return a tensor, or a dict "
        "with logits or last_hidden_state"
    )


class _LastBlockReached(Exception):
    """Stops a forward pass once the last block's arguments are known."""


class StandIn(nn.Module):
    """A module in the place of a block."""


class _Recorder(StandIn):
    """Stands in for a block: keeps what it is called with and passes the state on."""

    def __init__(self, returns_tuple: bool, last: bool = False):
        super().__init__()
        self.returns_tuple = returns_tuple
        self.last = last
        self.call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.state: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.state = _state_argument(args, kwargs)
        self.call = (args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"})
        if self.last:
            raise _LastBlockReached
        return (self.state,) if self.returns_tuple else self.state


class _Constant(StandIn):
    """Stands in for the last block: returns a given state."""

    def __init__(self, state: Tensor, returns_tuple: bool):
        super().__init__()
        self.output = (state,) if returns_tuple else state

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        return self.output


def _state_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _input_dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
