"""What is a ViT: found by one probe forward, or refused with the condition that failed.

A model is a ViT here when one list of alike modules carries a single residual stream: each is called once, in order,
maps `(batch, tokens, dim)` to the same shape, hands its output to the next, and what the model does with the last
state depends on nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from raptor.data.preprocess import Preprocess
from raptor.vit.view import TokenGroups, ViT, first_tensor, output_tensor, per_batch

_CLS_NAMES = ("cls_token", "class_token", "class_embedding", "cls_embed", "cls")


class NotAViT(ValueError):
    """The model has no single residual stream of blocks; the message names the condition that failed."""


@dataclass
class _Call:
    module: nn.Module
    inputs: Any
    output: Any


@dataclass
class _Candidate:
    path: str
    blocks: list[nn.Module]
    calls: list[_Call] = field(default_factory=list)
    within: set[str] = field(default_factory=set)
    """Paths of the candidates whose blocks were running when this one's were called."""

    def fault(self) -> str | None:
        """The first condition the list fails, or None."""
        if not self.calls:
            return f"`{self.path}` is not called by the forward pass"
        if [id(c.module) for c in self.calls] != [id(b) for b in self.blocks]:
            return f"the modules of `{self.path}` are not called once each, in order"
        shapes = [tuple(first_tensor(c.output).shape) for c in self.calls if isinstance(first_tensor(c.output), Tensor)]
        if len(shapes) != len(self.calls) or not isinstance(self.calls[0].inputs, Tensor):
            return f"the modules of `{self.path}` do not map tensors to tensors"
        shapes = [tuple(self.calls[0].inputs.shape), *shapes]
        if len(shapes[0]) != 3:
            return f"`{self.path}` works on states of shape {shapes[0]}, not (batch, tokens, dim)"
        for layer, shape in enumerate(shapes):
            if shape != shapes[0]:
                return f"`{self.path}` changes the state's shape from {shapes[0]} to {shape} at block {layer}"
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
    forward_kwargs: dict[str, Any] | None = None,
    source: dict[str, Any] | None = None,
) -> ViT:
    """The view over `model`, found by one forward pass of two noise images of `preprocess.size`.

    Args:
        model: any module that maps images (B, 3, H, W) to a tensor or an output object; put in eval mode.
        blocks, norm, head: dotted paths of the block list, the final norm and the classifier, where the model's own
            structure should not be asked.
        cls, registers: counts of these tokens, where they should not be guessed from the token count.
    """
    model.eval()
    kwargs = forward_kwargs or {}
    candidates = _candidates(model, blocks)
    if not candidates:
        raise NotAViT(
            f"{name}: no list of alike blocks found; name it with blocks=, for example blocks='encoder.layers'"
        )
    other_calls, output = _probe_forward(model, candidates, preprocess, kwargs, name)
    faults = [c.fault() for c in candidates]
    sound = {c.path: c for c, fault in zip(candidates, faults) if fault is None}
    chosen = next((c for c in sound.values() if not c.within & sound.keys()), None)
    if chosen is None:
        raise NotAViT(f"{name}: no single residual stream of blocks: {faults[0]}")
    for other in candidates:
        if _continues_depth(other, chosen):
            raise NotAViT(f"{name}: the depth of `{chosen.path}` continues in another list, `{other.path}`")

    last_state = first_tensor(chosen.calls[-1].output)
    num_tokens, dim = last_state.shape[1:]
    patch_size = _patch_size(model, preprocess.size, num_tokens)
    grid = (preprocess.size // patch_size, preprocess.size // patch_size)
    groups = _token_groups(model, num_tokens, grid, cls, registers, name)
    vit = ViT(
        model=model,
        name=name,
        blocks_path=chosen.path,
        groups=groups,
        grid=grid,
        patch_size=patch_size,
        dim=dim,
        preprocess=preprocess,
        norm=_named_norm(model, norm, name) if norm else _final_norm(other_calls, last_state, groups),
        num_classes=_num_classes(model, other_calls, output, head),
        source=source or {},
        forward_kwargs=kwargs,
        returns_tuple=isinstance(chosen.calls[0].output, tuple | list),
    )
    _check_finish(vit, last_state, output)
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
    model: nn.Module, candidates: list[_Candidate], preprocess: Preprocess, kwargs: dict[str, Any], name: str
) -> tuple[list[_Call], Tensor]:
    """One forward pass; fills the candidates' calls and returns every other call (norms, linears) and the output."""
    others: list[_Call] = []
    handles = []

    def watch(calls: list[_Call]) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kw: dict[str, Any], output: Any) -> None:
            calls.append(_Call(module, args[0] if args else kw.get("hidden_states"), output))

        return hook

    running: list[str] = []

    def enter(candidate: _Candidate) -> Any:
        def hook(*_: Any) -> None:
            candidate.within.update(path for path in running if path != candidate.path)
            running.append(candidate.path)

        return hook

    for candidate in candidates:
        for block in candidate.blocks:
            handles.append(block.register_forward_pre_hook(enter(candidate)))
            handles.append(block.register_forward_hook(watch(candidate.calls), with_kwargs=True))
            handles.append(block.register_forward_hook(lambda *_: running.pop() and None))
    in_blocks = {id(m) for c in candidates for b in c.blocks for m in b.modules()}
    for module in model.modules():
        if id(module) not in in_blocks and (_is_norm(module) or isinstance(module, nn.Linear)):
            handles.append(module.register_forward_hook(watch(others), with_kwargs=True))
    parameter = next(model.parameters())
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, preprocess.size, preprocess.size, generator=generator).to(parameter)
    try:
        with torch.no_grad():
            output = output_tensor(model(images, **per_batch(kwargs, images)))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise NotAViT(
            f"{name} does not run on {preprocess.size} px images; give size= or another part ({reason})"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return others, output


def _is_plain_layer(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())


def _continues_depth(other: _Candidate, chosen: _Candidate) -> bool:
    """Whether `other` is a further list of token blocks, neither inside the chosen one nor around it."""
    inside = chosen.path in other.within or other.path in chosen.within
    if other is chosen or inside or not other.calls:
        return False
    inputs = other.calls[0].inputs
    return isinstance(inputs, Tensor) and inputs.ndim == 3


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and any(p.ndim == 1 for p in module.parameters(recurse=False))


def _final_norm(calls: list[_Call], last_btd: Tensor, groups: TokenGroups) -> nn.Module:
    """The first norm whose input is the last state, its cls token or its mean, else an identity."""
    pooled = [last_btd, last_btd[:, 0], last_btd.mean(1), last_btd[:, groups.slice("patches")].mean(1)]
    for call in calls:
        x = call.inputs
        if not _is_norm(call.module) or not isinstance(x, Tensor):
            continue
        if any(x.shape == p.shape and torch.allclose(x, p, atol=1e-5) for p in pooled):
            return call.module
    return nn.Identity()


def _num_classes(model: nn.Module, calls: list[_Call], output: Tensor, head: str | None) -> int:
    """Classes of the model's own classifier: the linear layer that made its output, 0 when there is none."""
    if head is not None:
        module = model.get_submodule(head)
        return module.out_features if isinstance(module, nn.Linear) else int(output.shape[-1])
    for call in calls:
        if isinstance(call.module, nn.Linear) and output.ndim == 2 and torch.equal(call.output, output):
            return call.module.out_features
    # A distilled DeiT averages two heads: no one linear layer made its output, but timm says how many classes it has.
    stated = getattr(model, "num_classes", None)
    return stated if isinstance(stated, int) and output.ndim == 2 and stated == output.shape[-1] else 0


def _patch_size(model: nn.Module, image_size: int, num_tokens: int) -> int:
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.stride[0] > 1 and module.stride == module.kernel_size:
            return int(module.stride[0])
    side = math.isqrt(num_tokens)
    return max(1, image_size // side)


def _named_norm(model: nn.Module, path: str, name: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise NotAViT(f"{name} has no module {path!r}: give the dotted path of its final norm with norm=") from None


def _token_groups(
    model: nn.Module, num_tokens: int, grid: tuple[int, int], cls: int | None, registers: int | None, name: str
) -> TokenGroups:
    """cls is 1 when the model has such a token; every other token before the patches is a register."""
    num_patches = grid[0] * grid[1]
    prefix = num_tokens - num_patches
    if prefix < 0 and (cls is None or registers is None):
        raise NotAViT(f"{name}: {num_tokens} tokens for a {grid[0]}x{grid[1]} grid: give cls= and registers=")
    if cls is None:
        named = any(n.rsplit(".", 1)[-1] in _CLS_NAMES and p is not None for n, p in model.named_parameters())
        cls = int(named and prefix > 0)
    if registers is None:
        registers = prefix - cls
    if cls not in (0, 1) or registers < 0 or cls + registers > num_tokens:
        raise ValueError(f"{name}: cls={cls}, registers={registers} do not fit {num_tokens} tokens")
    return TokenGroups(cls=cls, registers=registers, patches=num_tokens - cls - registers)


def _check_finish(vit: ViT, last_state: Tensor, output: Tensor) -> None:
    try:
        with torch.no_grad():
            again = vit.finish(last_state)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise NotAViT(f"{vit.name}: `{vit.blocks_path}` hands on more than one state ({reason})") from error
    if again.shape != output.shape or not torch.allclose(again, output, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise NotAViT(f"{vit.name}: its output depends on more than the last state of `{vit.blocks_path}`")


def _per_depth_arguments(vit: ViT) -> bool:
    """Whether any tensor argument of the blocks differs between blocks."""
    size = vit.preprocess.size
    with torch.no_grad():
        _, context = vit.embed(torch.zeros(1, 3, size, size).to(next(vit.model.parameters())))
    tensors = [[v for v in [*args, *kwargs.values()] if isinstance(v, Tensor)] for args, kwargs in context.calls]
    return any(len(t) != len(tensors[0]) or any(not torch.equal(a, b) for a, b in zip(t, tensors[0])) for t in tensors)
