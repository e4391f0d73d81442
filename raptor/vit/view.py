"""The view over any Vision Transformer: embed, blocks, finish, token groups.

A view never forks the model. Probe forwards find the list of blocks that carries the residual stream, and hooks on
these blocks read the states, so the model keeps its own rotary arguments, drop-path and attention kernels. The state
`a_0` enters the first block and `a_l` leaves block `l`; each state has the shape `(batch, tokens, dim)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, overload

import torch
from PIL import Image
from torch import Tensor, nn

from raptor.data.given import given_images
from raptor.data.preprocess import Preprocess
from raptor.run import Record
from raptor.vit.calls import (
    LastBlockReached,
    StandIn,
    first_tensor,
    output_tensor,
    per_batch,
    reason_of,
    same_arguments,
    state_argument,
    with_state,
)
from raptor.vit.groups import TokenGroups, pool
from raptor.vit.on_demand import OnDemand, Rule, run_on_demand
from raptor.vit.origin import Arguments, Opened, Origin, Structure
from raptor.vit.parts import NamesFilter, Parts, choose_names, recording_parts
from raptor.vit.weights import fingerprint

Picture: TypeAlias = str | Path | Image.Image
Images: TypeAlias = Tensor | Picture | Sequence[Picture]
"""A batch as the model sees it, (B, 3, H, W) and normalised, or files and pictures that are prepared for it."""


class NotAViT(ValueError):
    """The model has no single residual stream of blocks; the message names the condition that failed."""


@dataclass(frozen=True)
class ModelFacts(Record):
    """The description of a model in result files.

    `fingerprint` is a short name of its weights, None for half-precision weights whose original is not known.
    """

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
    """The arguments that the model passes to its blocks beside the state, such as rotary embeddings and masks.

    calls: `(args, kwargs)` of each block.
    """

    calls: list[tuple[tuple[Any, ...], Arguments]]

    def distinct(self) -> list[int]:
        """Indices of blocks (from 0) with different arguments: of blocks that get equal ones, only the first."""
        found: list[int] = []
        # Each is compared with the first of its kind only, because most models pass the same to all blocks.
        for n, call in enumerate(self.calls):
            if not any(same_arguments(call, self.calls[earlier]) for earlier in found):
                found.append(n)
        return found


@dataclass
class ViT:
    """A view over `model`. Make one with `raptor.open_vit`.

    Attributes:
        model: the model itself, untouched, in eval mode.
        name: its name in titles, figures and files.
        blocks_path: dotted path of its block list, e.g. `blocks` or `encoder.layer`.
        groups: the token groups at the image size of `preprocess`.
        grid: patches along height and width.
        patch_size: side of a patch in pixels.
        dim: width of the residual stream.
        preprocess: how images are prepared for it.
        norm: the model's final norm (an identity when it has none).
        num_classes: number of classes of its head, 0 if it has no classifier.
        classes: names of the classes in the order of the head, if they are known.
        depth_conditioned: whether the model passes different arguments to different blocks (rope-mixed models).
        origin: how the model is built, so that a saved folder can build it again.
        opened: how it was opened, so that a surrogate can open its teacher again.
        forward_kwargs: keyword arguments of every call; a tensor among them has one row, repeated for each image.
        phases: lengths of the phases of a surrogate (a `raptor.phases.Phases`); None for other models.
        returns_tuple: whether its blocks return the state as the first entry of a tuple.
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
    origin: Origin = field(default_factory=Origin)
    opened: Opened = field(default_factory=Opened)
    forward_kwargs: Arguments = field(default_factory=dict)
    phases: Sequence[int] | None = None
    returns_tuple: bool = False

    def __repr__(self) -> str:
        parts = []
        if self.phases:
            parts.append(f"surrogate with phases {' | '.join(map(str, self.phases))}")
        parts += [f"{self.num_layers} blocks", f"dim {self.dim}"]
        for name, where in self.groups.present():
            parts.append(f"{where.stop - where.start} {name}")
        parts += [f"{self.preprocess.size} px", f"on {self.device}"]
        return f"ViT({self.name}: {', '.join(parts)})"

    @property
    def blocks(self) -> nn.ModuleList | nn.Sequential:
        """The model's own block list."""
        blocks = self.model.get_submodule(self.blocks_path)
        assert isinstance(blocks, nn.ModuleList | nn.Sequential)
        return blocks

    def block(self, layer: int) -> nn.Module:
        """The block `layer` (1..L)."""
        if not 1 <= layer <= self.num_layers:
            raise ValueError(f"layer {layer} is not a block of {self.name}: blocks are numbered 1..{self.num_layers}")
        return self.blocks[layer - 1]

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights, to which images are converted."""
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)

    def to(self, device: torch.device | str) -> ViT:
        self.model.to(device)
        # A new dictionary, because a surrogate shares its teacher's.
        self.forward_kwargs = dict(self.forward_kwargs)
        for name, value in self.forward_kwargs.items():
            if isinstance(value, Tensor):
                self.forward_kwargs[name] = value.to(device)
        return self

    def __call__(self, images: Tensor) -> Tensor:
        """The model's own output for `images` (B, 3, H, W), as a tensor."""
        try:
            output = self.model(images.to(self.dtype), **per_batch(self.forward_kwargs, images))
        except (AssertionError, RuntimeError, ValueError) as error:
            wanted = (3, self.preprocess.size, self.preprocess.size)
            # Some models take images of any size, so the error is the only sign that this one does not.
            if images.shape[1:] == wanted or isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(
                f"{self.name} takes images of the shape (B, {', '.join(map(str, wanted))}), these have "
                f"{tuple(images.shape)}: prepare them with vit.preprocess ({reason_of(error)})"
            ) from error
        return output_tensor(output)

    def embed(self, images: Tensor) -> tuple[Tensor, Context]:
        """`a_0` (B, T, D) and the arguments of the blocks, from a run of the model that skips its blocks."""
        # Stand-ins keep the model's own code for positions, prefix tokens and arguments. What comes after the last
        # block is not run: it may cost more than the embedding, and only `finish` needs it.
        last = self.num_layers
        recorders: dict[int, StandIn] = {}
        for layer in range(1, last + 1):
            recorders[layer] = StandIn(self.returns_tuple, stops=layer == last)
        with replaced_blocks(self, recorders), suppress(LastBlockReached):
            self(images)
        # Every recorder hands on a_0, so only the first one's state is meant; the arguments are each block's own.
        return recorders[1].state, Context([recorder.call for recorder in recorders.values()])

    def step(self, layer: int, x_btd: Tensor, context: Context) -> Tensor:
        """The state after block `layer` (1..L), given the state before it."""
        args, kwargs = context.calls[layer - 1]
        return first_tensor(self.blocks[layer - 1](x_btd, *args, **kwargs))

    def unroll(self, x_btd: Tensor, context: Context, start: int = 0, stop: int | None = None) -> list[Tensor]:
        """The states `start..stop`, both included, from the state at layer `start`; `stop` defaults to L."""
        if stop is None:
            stop = self.num_layers
        states = [x_btd]
        for layer in range(start + 1, stop + 1):
            states.append(self.step(layer, states[-1], context))
        return states

    def finish(self, x_btd: Tensor) -> Tensor:
        """The model's output for a last state `a_L`: all that the model does after its blocks."""
        size = self.preprocess.size
        # The blank images only set the batch size: the last block returns `a_L` whatever it is given.
        blank = torch.zeros(x_btd.shape[0], 3, size, size, device=x_btd.device, dtype=self.dtype)
        steps = {layer: StandIn(self.returns_tuple) for layer in range(1, self.num_layers)}
        steps[self.num_layers] = StandIn(self.returns_tuple, instead=x_btd)
        with replaced_blocks(self, steps):
            return self(blank)

    def prepare(self, images: Images) -> Tensor:
        """A batch (B, 3, H, W) for the model; a tensor has been prepared already."""
        if isinstance(images, Tensor):
            if images.ndim != 4 or images.shape[1] != 3:
                remedy = "give files or pictures, which are prepared for the model"
                if images.ndim == 3 and images.shape[0] == 3:
                    remedy = "use images[None] for a single image"
                elif images.ndim == 4 and images.shape[1] == 1:
                    remedy = "use images.expand(-1, 3, -1, -1) for grey images"
                elif images.ndim == 4 and images.shape[3] == 3:
                    remedy = "use images.movedim(3, 1) for images whose channels come last"
                shape = tuple(images.shape)
                raise ValueError(f"a batch of images has the shape (B, 3, H, W), this one has {shape}: {remedy}")
            # Pixels of 0..255 would run and give the states of something that is no image to the model.
            if not images.is_floating_point():
                raise ValueError(
                    f"a batch of images is normalised for the model, this one holds {str(images.dtype)[6:]} pixels: "
                    "give files or pictures, which are prepared for the model"
                )
            return images
        several = images
        if isinstance(images, Picture):
            several = [images]
        pictures = given_images(several)
        if pictures is None:
            raise ValueError(f"{images} are not image files: open a folder or a set with raptor.iterate")
        return torch.stack([self.preprocess(pictures[i]) for i in range(len(pictures))]).to(self.device)

    def run(self, images: Images, exit: Rule | str | None = None, phases: Sequence[int] | None = None) -> OnDemand:
        """One forward pass in which each image leaves its phase as soon as a rule lets it, e.g. `exit="turn<.02"`.

        `phases` are the lengths of the phases; a surrogate has its own. The result holds the model's `output` and
        `num_blocks_b`, the number of blocks that each image passed.
        """
        return run_on_demand(self, self.prepare(images), exit, phases)

    @overload
    def record(self, images: Images) -> tuple[list[Tensor], Tensor]: ...

    @overload
    def record(
        self, images: Images, parts: Sequence[str], layers: Sequence[int] | None = None
    ) -> tuple[list[Tensor], Tensor, Parts]: ...

    def record(self, images: Images, parts: Sequence[str] | None = None, layers: Sequence[int] | None = None) -> Any:
        """States `a_0..a_L` and the output of one forward pass of the model, by hooks on its own blocks.

        With `parts`, some of `attn`, `attn_out`, `resid_mid` and `mlp_out`, also these parts of the blocks `layers`
        (1..L; by default of all): `states, output, inside = vit.record(images, parts=("attn",))`.
        """
        x_bchw = self.prepare(images)
        if parts is None:
            with recording(self) as states:
                output = self(x_bchw)
            return states, output
        with recording(self) as states, recording_parts(self.blocks, self.name, parts, layers) as inside:
            output = self(x_bchw)
        return states, output, inside

    def run_with_cache(self, images: Images, names_filter: NamesFilter = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The output and the states and parts by TransformerLens' names, which count blocks from 0.

        `names_filter` chooses them: a name such as `blocks.5.attn.hook_pattern`, several, or a function of a name.
        """
        chosen = choose_names(self.num_layers, names_filter)
        # Only what is asked for is computed: attention patterns of all blocks may not fit into memory.
        parts = {part for part, _ in chosen.values() if part}
        layers = {number for part, number in chosen.values() if part}
        states, output, inside = self.record(images, sorted(parts), sorted(layers))
        found = {}
        for name, (part, number) in chosen.items():
            found[name] = getattr(inside, part)[number] if part else states[number]
        return output, found

    def patched(self, layer: int, state: Tensor, group: str = "all") -> AbstractContextManager[None]:
        """Inside the context, the tokens of `group` at layer `layer` (0..L) are set to those of `state`.

        `state` has all tokens, as `record` gives them, or the group's only; it broadcasts over images and tokens.
        """

        def put(part_btd: Tensor) -> Tensor:
            given = state.to(part_btd)
            try:
                if given.ndim > 1 and given.shape[-2] not in (1, part_btd.shape[1]):
                    given = given[..., self.groups.at(given.shape[-2]).slice(group), :]
                return given.expand_as(part_btd)
            except (RuntimeError, ValueError):
                raise ValueError(
                    f"a state of shape {tuple(state.shape)} does not fit the {group} tokens {tuple(part_btd.shape)}"
                ) from None

        return changed_state(self, layer, put, group)

    def features(self, x_btd: Tensor) -> Tensor:
        """Features of a last state, (B, D) or (B, 2 D): after the final norm, cls and mean patch concatenated."""
        return pool(self.norm(x_btd), self.groups)

    def structure(self) -> Structure:
        """The parts of the model by their paths and counts, with which the same model is inspected again."""
        # By its path: the object is of this process, and a saved model is inspected again in another.
        norm = next((name for name, module in self.model.named_modules() if module is self.norm), None)
        return Structure(blocks=self.blocks_path, norm=norm, cls=self.groups.cls, registers=self.groups.registers)

    def around(self, model: nn.Module) -> ViT:
        """The same view over a copy of its model."""
        norm_path = self.structure().norm
        norm = self.norm  # an identity outside the model, where the model has no final norm
        if norm_path is not None:
            norm = model.get_submodule(norm_path)
        return replace(self, model=model, norm=norm)

    def facts(self) -> ModelFacts:
        """The description of the model in result files."""
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
        """A short name of the weights, None if they were rounded to half precision and the original is not known."""
        if any(p.is_floating_point() and p.element_size() < 4 for p in self.model.parameters()):
            return self.opened.fingerprint
        return fingerprint(self.model)


@contextmanager
def recording(vit: ViT) -> Iterator[list[Tensor]]:
    """Inside the context, the yielded list holds the states `a_0..a_L` of the model's latest forward pass."""
    states: list[Tensor] = []

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> None:
        # The list is begun again here, so that a model that is called twice leaves the latest states.
        states[:] = [state_argument(args, kwargs)]

    def leave(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        states.append(first_tensor(output))

    with ExitStack() as hooks:
        hooks.enter_context(vit.blocks[0].register_forward_pre_hook(enter, with_kwargs=True))
        for block in vit.blocks:
            hooks.enter_context(block.register_forward_hook(leave))
        yield states


@contextmanager
def changed_state(vit: ViT, layer: int, change: Callable[[Tensor], Tensor], group: str) -> Iterator[None]:
    """Inside the context, `change` makes the tokens of `group` at layer `layer` (0..L) of what the model computes."""
    own = vit.groups.slice(group)
    if own.start == own.stop:
        raise ValueError(f"{vit.name} has no {group} tokens to change")
    if not 0 <= layer <= vit.num_layers:
        raise ValueError(f"layer {layer} is not a state of {vit.name}: states are numbered 0..{vit.num_layers}")

    def changed(x_btd: Tensor) -> Tensor:
        # The images may be of another size than the view's own.
        where = vit.groups.at(x_btd.shape[1]).slice(group)
        return torch.cat([x_btd[:, : where.start], change(x_btd[:, where]), x_btd[:, where.stop :]], dim=1)

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        if args:
            return (changed(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": changed(kwargs["hidden_states"])}

    def leave(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return with_state(output, changed(first_tensor(output)))

    # Prepended, so that a hook that records the states sees the changed one.
    if layer == 0:
        handle = vit.blocks[0].register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    else:
        handle = vit.blocks[layer - 1].register_forward_hook(leave, prepend=True)
    with handle:
        yield


@contextmanager
def replaced_blocks(vit: ViT, replacements: Mapping[int, nn.Module]) -> Iterator[None]:
    """Inside the context, other modules stand in the place of blocks (numbered 1..L) of the model."""
    # Through `_modules`, which is put back exactly as it was, names and order included.
    blocks = vit.blocks
    names = list(blocks._modules)
    saved = dict(blocks._modules)
    for layer in replacements:
        vit.block(layer)  # refuses the number of a layer that is none
    try:
        for layer, module in replacements.items():
            blocks._modules[names[layer - 1]] = module
        yield
    finally:
        blocks._modules.clear()
        blocks._modules.update(saved)
