"""What is a ViT: found by probe forwards, or refused with the condition that failed.

A model is a ViT here when one list of alike modules carries a single residual stream: each is called once, in order,
maps `(batch, tokens, dim)` to the same shape, depends on nothing but that state and on what the model makes of the
images before its blocks, hands its output to the next, and what the model does with the last state depends on nothing
else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from raptor.data.preprocess import Preprocess
from raptor.devices import torch_defaults
from raptor.vit.block_list import NUM_PROBED, choose, find_candidates, watch_forward
from raptor.vit.calls import StandIn, reason_of
from raptor.vit.groups import TokenGroups
from raptor.vit.origin import Origin, Structure
from raptor.vit.stated import forward_arguments, stated_classes
from raptor.vit.tokens import place_tokens
from raptor.vit.view import NotAViT, ViT
from raptor.vit.weights import check_weights


@torch_defaults()
@torch.no_grad()
def inspect_vit(
    model: nn.Module,
    name: str,
    preprocess: Preprocess,
    structure: Structure,
    origin: Origin,
) -> ViT:
    """The view over `model`, found by forward passes of two noise images of `preprocess.size`.

    Args:
        model: any module that maps images (B, 3, H, W) to a tensor or an output object; put in eval mode.
        structure: the parts for which the model's own structure should not be asked.
        origin: how the model is built; empty for a module of the user's own.
    """
    # NaN passes every comparison below as a difference, with a message about the structure.
    check_weights(model.state_dict(), name)
    # Dropout and drop-path would make two forward passes differ.
    model.eval()
    candidates = find_candidates(model, structure.blocks)
    if not candidates:
        raise NotAViT(
            f"{name}: no list of alike blocks found; name it with blocks=, for example blocks='encoder.layers'"
        )
    forward_kwargs = forward_arguments(model, preprocess.size)
    # Noise, because a blank image has equal patches, and then the order of patches cannot be seen.
    images = torch.randn(NUM_PROBED, 3, preprocess.size, preprocess.size, generator=torch.Generator().manual_seed(0))
    images = images.to(next(model.parameters()))
    norms, output = watch_forward(model, candidates, images, forward_kwargs, name)
    depth = choose(candidates, name)
    states = depth.states()
    num_tokens, dim = states[-1].shape[1:]
    vit = ViT(
        model=model,
        name=name,
        blocks_path=depth.path,
        groups=TokenGroups(0, 0, num_tokens),
        grid=(1, num_tokens),
        patch_size=1,
        dim=dim,
        preprocess=preprocess,
        norm=nn.Identity(),
        num_classes=_num_classes(model, output, structure, name),
        origin=origin,
        forward_kwargs=forward_kwargs,
        returns_tuple=depth.calls[0].returns_tuple,
    )
    # The order matters: this one runs the model on the first image alone, so that whatever the model remembers
    # of an earlier forward pass is wrong for the images of the next two.
    _check_batch(vit, images, states)
    _check_finish(vit, states[-1], output)
    _check_steps(vit, images, states)
    place_tokens(vit, images, states[0], structure.cls, structure.registers)
    vit.norm = _final_norm(vit, norms, states[-1], structure.norm)
    vit.depth_conditioned = len(vit.embed(images[:1])[1].distinct()) > 1
    return vit


def _final_norm(vit: ViT, norms: list[tuple[nn.Module, Any]], last_btd: Tensor, path: str | None) -> nn.Module:
    """The norm at `path` or, without one, the first norm of the last state or of what tokens are pooled to.

    Pooled are the cls token, or the mean, the maximum or half the sum of both of all tokens or of the patches. Where no
    norm is given any of these, the result is an identity.
    """
    if path is not None:
        try:
            return vit.model.get_submodule(path)
        except AttributeError:
            raise NotAViT(
                f"{vit.name} has no module {path!r}: give the dotted path of its final norm with norm="
            ) from None
    # Some models norm all tokens and some only what their head reads.
    pooled = [last_btd, last_btd[:, vit.groups.slice("cls").start]]
    for tokens_btd in (last_btd, last_btd[:, vit.groups.slice("patches")]):
        mean_bd = tokens_btd.mean(1)
        largest_bd = tokens_btd.amax(1)
        pooled += [mean_bd, largest_bd, (mean_bd + largest_bd) / 2]
    for norm, x in norms:
        if isinstance(x, Tensor) and any(x.shape == p.shape and torch.allclose(x, p, atol=1e-5) for p in pooled):
            return norm
    return nn.Identity()


def _num_classes(model: nn.Module, output: Tensor, structure: Structure, name: str) -> int:
    """Classes of the model's own classifier, by the user's word or as the model states them; 0 when there is none.

    A linear layer at the end is not enough: the projections of CLIP and AIMv2 have no classes.
    """
    width = 0
    gives = f"an output of shape {tuple(output.shape)}"
    if output.ndim == 2:
        width = int(output.shape[-1])
        gives = f"{width} numbers per image"
    if structure.head_classes is not None:
        if structure.head_classes not in (0, width):
            raise ValueError(f"{name} gives {gives}, not {structure.head_classes} class scores: correct head_classes")
        return structure.head_classes
    if structure.head is not None:
        try:
            module = model.get_submodule(structure.head)
        except AttributeError:
            raise ValueError(
                f"{name} has no `{structure.head}`: head= takes the dotted path of its classifier"
            ) from None
        if isinstance(module, nn.Linear):
            return module.out_features
        return width
    if width == stated_classes(model):
        return width
    return 0


def _check_batch(vit: ViT, images: Tensor, states: list[Tensor]) -> None:
    """Refuse a model in which the states of an image depend on the other images of its batch."""
    # Every analysis takes the images of a batch as independent.
    alone, _ = vit.record(images[:1])
    for layer in (0, -1):
        of_one, of_batch = alone[layer], states[layer]
        tolerance = 1e-3 * float(of_batch.abs().max())
        # Half-precision products differ with the size of the batch.
        if of_one.element_size() < 4:
            tolerance *= 10
        if of_one.shape != of_batch[:1].shape or not torch.allclose(of_one, of_batch[:1], rtol=1e-2, atol=tolerance):
            raise NotAViT(f"{vit.name}: the states of an image depend on the other images of its batch")


def _check_finish(vit: ViT, last_btd: Tensor, output: Tensor) -> None:
    """Refuse a model whose output is not a function of its last state.

    The last forward pass was of another batch: what the model kept of it, such as a state that a hook on an inner block
    has stored, does not fit the output of this one.
    """
    try:
        again = vit.finish(last_btd)
    except Exception as error:
        if isinstance(error, AttributeError) and isinstance(error.obj, StandIn):
            raise NotAViT(
                f"{vit.name}: its forward reads `{error.name}` of its blocks, as nn.TransformerEncoder does: loop over "
                f"`{vit.blocks_path}` in your forward and only call them"
            ) from error
        raise NotAViT(f"{vit.name}: `{vit.blocks_path}` hands on more than one state ({reason_of(error)})") from error
    # The same operations on the same numbers: what differs by more than rounding has another source.
    if again.shape != output.shape or not torch.allclose(again, output, rtol=1e-4, atol=1e-5, equal_nan=True):
        raise NotAViT(f"{vit.name}: its output depends on more than the last state of `{vit.blocks_path}`")


def _check_steps(vit: ViT, images: Tensor, states: list[Tensor]) -> None:
    """Refuse a model whose blocks, called one by one and from the last to the first, give other states.

    The states are of the second image and the last whole forward pass was of the first one, so that a block that takes
    something from another block is noticed as well.
    """
    exact = 1e-2
    rounding = 1e-5
    if states[0].element_size() < 4:
        exact = 1e-1
        rounding = 1e-2
    _, context = vit.embed(images[1:])
    for layer in range(vit.num_layers, 0, -1):
        before_btd = states[layer - 1][1:]
        after_btd = states[layer][1:].float()
        error = (vit.step(layer, before_btd, context).float() - after_btd).norm()
        # Against the update of the block: beside the whole state a missing part of it would pass.
        if not error <= exact * (after_btd - before_btd.float()).norm() + rounding * after_btd.norm():
            raise NotAViT(
                f"{vit.name}: block {layer} of `{vit.blocks_path}` takes more from other blocks than the state "
                "before it, which is not supported"
            )
