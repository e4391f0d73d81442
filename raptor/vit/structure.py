"""What is a ViT: found by one probe forward, or refused with the condition that failed.

A model is a ViT here when one list of alike modules carries a single residual stream: each is called once, in order,
maps `(batch, tokens, dim)` to the same shape, depends on nothing but that state and on what the model makes of the
images before its blocks, hands its output to the next, and what the model does with the last state depends on nothing
else.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from raptor.data.preprocess import Preprocess
from raptor.vit.builders import stated_classes
from raptor.vit.view import StandIn, TokenGroups, ViT, first_tensor, output_tensor, per_batch
from raptor.vit.weights import check_weights

_NUM_PROBED = 2  # images of the probe forward
_CLS_NAMES = ("cls_token", "class_token", "class_embedding", "cls_embed", "cls")


class NotAViT(ValueError):
    """The model has no single residual stream of blocks; the message names the condition that failed."""


class WrongSize(NotAViT):
    """The model does not run on images of this size."""


@dataclass
class _Call:
    """A call of a module: what it was given and what it returned, as they were at that time."""

    module: nn.Module
    inputs: Any
    output: Any
    in_place: bool = False
    """Whether it wrote into its input."""


@dataclass
class _Candidate:
    path: str
    blocks: list[nn.Module]
    calls: list[_Call] = field(default_factory=list)
    entered: list[Any] = field(default_factory=list)
    """The inputs of the blocks that are running."""
    within: set[str] = field(default_factory=set)
    """Paths of the candidates whose blocks were running when this one's were called."""

    def fault(self) -> str | None:
        """The first condition the list fails, or None."""
        if not self.calls:
            return f"`{self.path}` is not called by the forward pass"
        if len(set(map(id, self.blocks))) < len(self.blocks):
            return f"`{self.path}` holds one module at several places (put a copy.deepcopy at each, with equal weights)"
        if [id(c.module) for c in self.calls] != [id(b) for b in self.blocks]:
            return f"the modules of `{self.path}` are not called once each, in order"
        if self.calls[0].inputs is None:
            return f"the modules of `{self.path}` are not given the state as their first argument"
        shapes = [tuple(first_tensor(c.output).shape) for c in self.calls if isinstance(first_tensor(c.output), Tensor)]
        if len(shapes) != len(self.calls) or not isinstance(self.calls[0].inputs, Tensor):
            return f"the modules of `{self.path}` do not map tensors to tensors"
        shapes = [tuple(self.calls[0].inputs.shape), *shapes]
        if len(shapes[0]) != 3:
            return f"`{self.path}` works on states of shape {shapes[0]}, not (batch, tokens, dim)"
        if shapes[0][0] != _NUM_PROBED:
            return f"`{self.path}` has {shapes[0][0]} rows of tokens for {_NUM_PROBED} images, not one for each"
        for layer, shape in enumerate(shapes):
            if shape != shapes[0]:
                return f"`{self.path}` changes the state's shape from {shapes[0]} to {shape} at block {layer}"
        for layer, call in enumerate(self.calls, start=1):
            if call.in_place:
                return f"block {layer} of `{self.path}` writes into its input (`x += y` where `x = x + y` is needed)"
        for layer, (left, right) in enumerate(zip(self.calls, self.calls[1:]), start=1):
            if not torch.equal(first_tensor(left.output), right.inputs):
                return f"block {layer + 1} of `{self.path}` does not start from block {layer}'s output"
        return None


def inspect_vit(
    model: nn.Module,
    name: str,
    preprocess: Preprocess,
    *,
    blocks: str | None = None,
    norm: str | None = None,
    head: str | None = None,
    cls: int | None = None,
    registers: int | None = None,
    head_classes: int | None = None,
    forward_kwargs: dict[str, Any] | None = None,
    source: dict[str, Any] | None = None,
) -> ViT:
    """The view over `model`, found by one forward pass of two noise images of `preprocess.size`, and one of the first.

    Args:
        model: any module that maps images (B, 3, H, W) to a tensor or an output object; put in eval mode.
        blocks, norm, head: dotted paths of the block list, the final norm and the classifier, where the model's own
            structure should not be asked.
        cls, registers: counts of these tokens, where they should not be guessed from the token count.
        head_classes: number of class scores the model gives, where its configuration does not say; 0 for none.
    """
    check_weights(model.state_dict(), name)
    model.eval()
    kwargs = forward_kwargs or {}
    candidates = _candidates(model, blocks)
    if not candidates:
        raise NotAViT(
            f"{name}: no list of alike blocks found; name it with blocks=, for example blocks='encoder.layers'"
        )
    images = _noise_images(model, preprocess.size)
    other_calls, output = _probe_forward(model, candidates, images, kwargs, name)
    faults = [c.fault() for c in candidates]
    sound = {c.path: c for c, fault in zip(candidates, faults) if fault is None}
    chosen = next((c for c in sound.values() if not c.within & sound.keys()), None)
    if chosen is None:
        raise NotAViT(f"{name}: no single residual stream of blocks: {faults[0]}: choose a ViT of raptor models")
    for other in candidates:
        if _continues_depth(other, chosen):
            raise NotAViT(f"{name}: the depth of `{chosen.path}` continues in another list, `{other.path}`")
        if other.path in sound and other.path.startswith(f"{chosen.path}.") and _is_group(other):
            raise NotAViT(
                f"{name}: `{chosen.path}` holds groups of blocks, such as `{other.path}`: put all into one list, "
                f"or take the groups as they are with blocks='{chosen.path}'"
            )
    larger = itertools.takewhile(lambda pair: pair[0] is not chosen, zip(candidates, faults))
    for other, fault in larger:
        if other.calls and not _nested(other, chosen):
            raise NotAViT(f"{name}: `{other.path}` holds more of its weights than `{chosen.path}`, but {fault}")

    last_state = first_tensor(chosen.calls[-1].output)
    num_tokens, dim = last_state.shape[1:]
    vit = ViT(
        model=model,
        name=name,
        blocks_path=chosen.path,
        groups=TokenGroups(0, 0, num_tokens),
        grid=(1, num_tokens),
        patch_size=1,
        dim=dim,
        preprocess=preprocess,
        norm=nn.Identity(),
        num_classes=_num_classes(model, output, head, head_classes, name),
        source=source or {},
        forward_kwargs=kwargs,
        returns_tuple=isinstance(chosen.calls[0].output, tuple | list),
    )
    _check_finish(vit, last_state, output)
    states = [chosen.calls[0].inputs, *(first_tensor(call.output) for call in chosen.calls)]
    _check_batch(vit, images, [states[0], last_state])
    _check_steps(vit, images, states)
    _place_tokens(vit, images, chosen.calls[0].inputs, cls, registers)
    vit.norm = _named_norm(model, norm, name) if norm else _final_norm(other_calls, last_state, vit.groups)
    vit.depth_conditioned = _per_depth_arguments(vit)
    return vit


def _candidates(model: nn.Module, path: str | None) -> list[_Candidate]:
    """Lists of at least two alike modules with parameters, the largest first; only `path` when it is given."""
    if path is not None:
        try:
            module = model.get_submodule(path)
        except AttributeError:
            raise ValueError(f"the model has no `{path}`: blocks= takes the dotted path of its block list") from None
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            raise ValueError(f"`{path}` is a {type(module).__name__}, not a list of blocks")
        plain = next((type(part).__name__ for part in module if _is_plain_layer(part)), None)
        if plain is not None:
            raise ValueError(f"`{path}` holds a {plain} beside its blocks: move it out of the list")
        if len(module) < 2:
            raise ValueError(f"`{path}` has {len(module)} blocks: a study of depth needs two or more")
        return [_Candidate(path, list(module))]
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        children = list(module)
        alike = len({type(c) for c in children}) == 1
        if alike and not any(_is_plain_layer(c) for c in children):
            found.append(_Candidate(name, children))
    size = {c.path: sum(p.numel() for b in c.blocks for p in b.parameters()) for c in found}
    return sorted(found, key=lambda c: -size[c.path])


def _probe_forward(
    model: nn.Module, candidates: list[_Candidate], images: Tensor, kwargs: dict[str, Any], name: str
) -> tuple[list[_Call], Tensor]:
    """One forward pass; fills the candidates' calls and returns every other call (norms, linears) and the output."""
    others: list[_Call] = []
    handles = []

    def watch(calls: list[_Call]) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kw: dict[str, Any], output: Any) -> None:
            calls.append(_Call(module, _state_argument(args, kw), output))

        return hook

    running: list[str] = []

    def enter(candidate: _Candidate) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kw: dict[str, Any]) -> None:
            candidate.within.update(path for path in running if path != candidate.path)
            candidate.entered.append(_kept(_state_argument(args, kw)))
            running.append(candidate.path)

        return hook

    def leave(candidate: _Candidate) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kw: dict[str, Any], output: Any) -> None:
            running.pop()
            given, now = candidate.entered.pop(), _state_argument(args, kw)
            in_place = isinstance(given, Tensor) and not torch.equal(given, now)
            candidate.calls.append(_Call(module, given, _kept(output), in_place))

        return hook

    for candidate in candidates:
        for block in candidate.blocks:
            handles.append(block.register_forward_pre_hook(enter(candidate), with_kwargs=True))
            handles.append(block.register_forward_hook(leave(candidate), with_kwargs=True))
    in_blocks = {id(m) for c in candidates for b in c.blocks for m in b.modules()}
    for module in model.modules():
        if id(module) not in in_blocks and (_is_norm(module) or isinstance(module, nn.Linear)):
            handles.append(module.register_forward_hook(watch(others), with_kwargs=True))
    try:
        with torch.no_grad():
            output = model(images, **per_batch(kwargs, images))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise WrongSize(
            f"{name} does not run on {images.shape[-1]} px images: give another --size, or another model ({reason})"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return others, output_tensor(output)


def _state_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("hidden_states")


def _kept(value: Any) -> Any:
    """A state, or a block's output around it, as it is now, whatever is written into it later."""
    if isinstance(value, tuple | list) and value:
        return (_kept(value[0]), *value[1:])
    return value.clone() if isinstance(value, Tensor) else value


def _noise_images(model: nn.Module, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_NUM_PROBED, 3, size, size, generator=generator).to(next(model.parameters()))


def _is_plain_layer(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())


def _continues_depth(other: _Candidate, chosen: _Candidate) -> bool:
    """Whether `other` is a further list of token blocks, neither inside the chosen one nor around it."""
    if other is chosen or _nested(other, chosen) or not other.calls:
        return False
    inputs = other.calls[0].inputs
    return isinstance(inputs, Tensor) and inputs.ndim == 3


def _is_group(inner: _Candidate) -> bool:
    """Whether a list inside a block holds whole blocks, of the same shapes, and not the parts of one."""
    shapes = [[tuple(p.shape) for p in block.parameters()] for block in inner.blocks]
    return bool(shapes[0]) and all(one == shapes[0] for one in shapes)


def _nested(one: _Candidate, other: _Candidate) -> bool:
    """Whether the blocks of one list run inside those of the other."""
    return one.path in other.within or other.path in one.within


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and any(p.ndim == 1 for p in module.parameters(recurse=False))


def _final_norm(calls: list[_Call], last_btd: Tensor, groups: TokenGroups) -> nn.Module:
    """The first norm whose input is the last state or what tokens are pooled to, else an identity.

    Pooled are the cls token, or the mean, the maximum or half the sum of both of all tokens or of the patches.
    """
    pooled = [last_btd, last_btd[:, groups.slice("cls").start]]
    for tokens_btd in (last_btd, last_btd[:, groups.slice("patches")]):
        mean_bd, largest_bd = tokens_btd.mean(1), tokens_btd.amax(1)
        pooled += [mean_bd, largest_bd, (mean_bd + largest_bd) / 2]
    for call in calls:
        x = call.inputs
        if not _is_norm(call.module) or not isinstance(x, Tensor):
            continue
        if any(x.shape == p.shape and torch.allclose(x, p, atol=1e-5) for p in pooled):
            return call.module
    return nn.Identity()


def _num_classes(model: nn.Module, output: Tensor, head: str | None, head_classes: int | None, name: str) -> int:
    """Classes of the model's own classifier, by the user's word or as the model states them; 0 when there is none.

    A linear layer at the end is not enough: the projections of CLIP and AIMv2 have no classes.
    """
    width = int(output.shape[-1]) if output.ndim == 2 else 0
    if head_classes is not None:
        if head_classes and head_classes != width:
            gives = f"{width} numbers per image" if width else f"an output of shape {tuple(output.shape)}"
            raise ValueError(f"{name} gives {gives}, not {head_classes} class scores: correct --head_classes")
        return head_classes
    if head is not None:
        try:
            module = model.get_submodule(head)
        except AttributeError:
            raise ValueError(f"{name} has no `{head}`: head= takes the dotted path of its classifier") from None
        return module.out_features if isinstance(module, nn.Linear) else width
    return width if width and width == stated_classes(model) else 0


def _check_batch(vit: ViT, images: Tensor, states: list[Tensor]) -> None:
    """Refuse a model in which the states of an image depend on the other images of its batch."""
    with torch.no_grad():
        alone, _ = vit.record(images[:1])
    for of_batch, of_one in zip(states, (alone[0], alone[-1])):
        scale = float(of_batch.abs().max())
        if of_one.shape != of_batch[:1].shape or not torch.allclose(
            of_one, of_batch[:1], rtol=1e-2, atol=1e-2 * scale if of_one.element_size() < 4 else 1e-3 * scale
        ):
            raise NotAViT(f"{vit.name}: the states of an image depend on the other images of its batch")


def _check_steps(vit: ViT, images: Tensor, states: list[Tensor]) -> None:
    """Refuse a model whose blocks, called one by one and from the last to the first, give other states.

    The states are of the second image and the last forward pass was of the first one, so that a block that takes
    something from another block is noticed as well.
    """
    with torch.no_grad():
        _, context = vit.embed(images[1:])
        for layer in range(vit.num_layers, 0, -1):
            before, after = (states[i][1:].float() for i in (layer - 1, layer))
            error = (vit.step(layer, states[layer - 1][1:], context).float() - after).norm()
            exact, rounding = (1e-2, 1e-5) if states[0].element_size() >= 4 else (1e-1, 1e-2)
            if not error <= exact * (after - before).norm() + rounding * after.norm():
                raise NotAViT(
                    f"{vit.name}: block {layer} of `{vit.blocks_path}` takes more from other blocks than the state "
                    "before it, which is not supported"
                )


def _place_tokens(vit: ViT, images: Tensor, first_btd: Tensor, cls: int | None, registers: int | None) -> None:
    """Find the patches among the tokens: those that depend on the image. Sets `groups`, `grid` and `patch_size`."""
    num_tokens, size = first_btd.shape[1], vit.preprocess.size
    depends_t = (first_btd[0] - first_btd[1]).abs().amax(-1) > 1e-6 * first_btd.abs().max()
    found = depends_t.nonzero().flatten().tolist()
    if not found:
        raise NotAViT(f"{vit.name}: no token depends on the image")
    start, stop = found[0], found[-1] + 1
    if len(found) != stop - start:
        raise NotAViT(f"{vit.name}: the tokens that depend on the image do not stand together, which is not supported")
    stated = _stated_grid(vit.model, size)
    if cls is not None and registers is not None:
        num_patches = num_tokens - cls - registers
    else:
        num_patches = len(found) if math.isqrt(len(found)) ** 2 == len(found) else stated**2 or len(found)
    if num_patches < 1 or cls not in (None, 0, 1) or (registers or 0) < 0:
        raise ValueError(f"{vit.name}: cls={cls}, registers={registers} do not fit {num_tokens} tokens")
    if num_patches > len(found):
        raise NotAViT(
            f"{vit.name}: {len(found)} of {num_tokens} tokens depend on the image, not {num_patches}: "
            "correct cls= and registers="
        )
    start = stop - num_patches  # tokens before the patches may depend on the image too
    side = math.isqrt(num_patches)
    if side**2 != num_patches:
        raise NotAViT(f"{vit.name}: {num_patches} patches are no square grid: give cls= and registers=")
    vit.grid = (side, side)
    vit.patch_size = _patch_size(vit.model) if stated == side else max(1, size // side)
    vit.groups = _token_groups(vit, images, num_patches, start, num_tokens - stop, cls, registers)
    _check_order(vit, images, start)


def _token_groups(
    vit: ViT, images: Tensor, num_patches: int, before: int, after: int, cls: int | None, registers: int | None
) -> TokenGroups:
    """cls is 1 when a parameter of such a name is a token; every other token beside the patches is a register."""
    if cls is None:
        place = _cls_place(vit, images) if before + after > 0 and registers != before + after else None
        if place is not None and place != (0 if before else num_patches):
            raise NotAViT(
                f"{vit.name}: its cls token is number {place + 1} of {before + after + num_patches} tokens: put it "
                "first, or give cls=0 to take it for a register"
            )
        cls = int(place is not None)
    if registers is None:
        registers = before + after - cls
    if registers < 0 or cls + registers != before + after:
        raise ValueError(
            f"{vit.name}: cls={cls}, registers={registers} do not fit {before + after + num_patches} tokens, "
            f"{num_patches} of them patches"
        )
    if after == 0:
        return TokenGroups(cls, registers, num_patches)
    if before == cls:
        return TokenGroups(cls, registers, num_patches, ("cls", "patches", "registers"))
    if before == 0 and registers == 0:
        return TokenGroups(cls, registers, num_patches, ("patches", "cls", "registers"))
    raise NotAViT(
        f"{vit.name}: {before} tokens stand before the patches and {after} after them, which cannot be told apart"
    )


@torch.no_grad()
def _cls_place(vit: ViT, images: Tensor) -> int | None:
    """Which token moves when the parameter that is named as a cls token does; None where none does, or none is named.

    A model may have one that is used only after its blocks, such as the query of a pooling layer.
    """
    for name, parameter in vit.model.named_parameters():
        if name.rsplit(".", 1)[-1] in _CLS_NAMES:
            before_btd, kept = vit.embed(images[:1])[0], parameter.data
            parameter.data = kept + torch.linspace(0.1, 1, kept.numel()).to(kept).view_as(kept)
            try:
                moved_t = (vit.embed(images[:1])[0] - before_btd).abs().amax((0, 2)) > 0
            finally:
                parameter.data = kept
            if moved_t.any():
                return int(moved_t.nonzero()[0])
    return None


def _check_order(vit: ViT, images: Tensor, start: int) -> None:
    """Refuse a model whose patches do not stand in reading order: a changed patch changes its own token most."""
    rows, columns = vit.grid
    cells = list(dict.fromkeys([(0, 0), (0, columns - 1), (rows - 1, 0), (rows - 1, columns - 1)]))
    changed = images[:1].repeat(len(cells) + 1, 1, 1, 1)
    side = min(vit.patch_size, vit.preprocess.size // rows)
    for i, (row, column) in enumerate(cells, start=1):
        changed[i, :, row * side : (row + 1) * side, column * side : (column + 1) * side] += images[1, :, :side, :side]
    with torch.no_grad():
        states, _ = vit.embed(changed)
    moved = (states[1:] - states[:1]).float().norm(dim=-1).argmax(-1).tolist()
    for (row, column), token in zip(cells, moved):
        if token != start + row * columns + column:
            raise NotAViT(
                f"{vit.name}: its patches do not stand row by row: the patch in row {row + 1}, column {column + 1} "
                f"is token {token + 1} of {vit.groups.num_tokens}"
            )


def _patch_size(model: nn.Module) -> int:
    """The side of the patches of the model's first convolution that cuts an image into pieces; 0 where it has none."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.stride[0] > 1 and module.stride == module.kernel_size:
            return int(module.stride[0])
    return 0


def _stated_grid(model: nn.Module, size: int) -> int:
    """Patches along a side as the model's patch embedding has them; 0 where it does not say."""
    patch_size = _patch_size(model)
    return size // patch_size if patch_size else 0


def _named_norm(model: nn.Module, path: str, name: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise NotAViT(f"{name} has no module {path!r}: give the dotted path of its final norm with norm=") from None


def _check_finish(vit: ViT, last_state: Tensor, output: Tensor) -> None:
    try:
        with torch.no_grad():
            again = vit.finish(last_state)
    except Exception as error:
        if isinstance(error, AttributeError) and isinstance(error.obj, StandIn):
            raise NotAViT(
                f"{vit.name}: its forward reads `{error.name}` of its blocks, as nn.TransformerEncoder does: loop over "
                f"`{vit.blocks_path}` in your forward and only call them"
            ) from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise NotAViT(f"{vit.name}: `{vit.blocks_path}` hands on more than one state ({reason})") from error
    if again.shape != output.shape or not torch.allclose(again, output, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise NotAViT(f"{vit.name}: its output depends on more than the last state of `{vit.blocks_path}`")


def _per_depth_arguments(vit: ViT) -> bool:
    """Whether any argument beside the state differs between blocks."""
    size = vit.preprocess.size
    with torch.no_grad():
        _, context = vit.embed(torch.zeros(1, 3, size, size).to(next(vit.model.parameters())))
    return len(context.distinct()) > 1
