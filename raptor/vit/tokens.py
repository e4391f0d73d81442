"""Which tokens are patches, cls and registers: found by what moves when the image, a patch or a parameter does."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from raptor.vit.groups import TokenGroups
from raptor.vit.view import NotAViT, ViT

_CLS_NAMES = ("cls_token", "class_token", "class_embedding", "cls_embed", "cls")


def place_tokens(vit: ViT, images: Tensor, first_btd: Tensor, cls: int | None, registers: int | None) -> None:
    """Find the patches among the tokens: those that depend on the image. Sets `groups`, `grid` and `patch_size`."""
    num_tokens = first_btd.shape[1]
    size = vit.preprocess.size
    # cls and registers enter the first block as parameters, equal for all images.
    depends_t = (first_btd[0] - first_btd[1]).abs().amax(-1) > 1e-6 * first_btd.abs().max()
    found = depends_t.nonzero().flatten().tolist()
    if not found:
        raise NotAViT(f"{vit.name}: no token depends on the image")
    start, stop = found[0], found[-1] + 1
    if len(found) != stop - start:
        raise NotAViT(f"{vit.name}: the tokens that depend on the image do not stand together, which is not supported")
    # The model's first convolution that cuts an image into pieces states their side.
    stated_size = 0
    for module in vit.model.modules():
        if isinstance(module, nn.Conv2d) and module.stride[0] > 1 and module.stride == module.kernel_size:
            stated_size = int(module.stride[0])
            break
    stated = size // stated_size if stated_size else 0  # patches along a side
    if cls is not None and registers is not None:
        num_patches = num_tokens - cls - registers
    elif stated and math.isqrt(len(found)) ** 2 != len(found):
        num_patches = stated**2
    else:
        num_patches = len(found)
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
    # A convolution with overlap, or patches of another size, is described by the side of the grid.
    vit.patch_size = max(1, size // side)
    if stated == side:
        vit.patch_size = stated_size
    vit.groups = _token_groups(vit, images, num_patches, start, num_tokens - stop, cls, registers)
    _check_order(vit, images, start)


def _token_groups(
    vit: ViT, images: Tensor, num_patches: int, before: int, after: int, cls: int | None, registers: int | None
) -> TokenGroups:
    """cls is 1 when a parameter of such a name is a token; every other token beside the patches is a register."""
    if cls is None:
        place = None
        if before + after > 0 and registers != before + after:
            place = _cls_place(vit, images)
        first_other = 0 if before else num_patches  # the first token that is not a patch
        if place is not None and place != first_other:
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


def _cls_place(vit: ViT, images: Tensor) -> int | None:
    """Which token moves when the parameter that is named as a cls token does; None where none does, or none is named.

    A model may have one that is used only after its blocks, such as the query of a pooling layer.
    """
    for name, parameter in vit.model.named_parameters():
        if name.rsplit(".", 1)[-1] in _CLS_NAMES:
            before_btd, _ = vit.embed(images[:1])
            # A changed parameter shows which token it is, whatever the model does with its positions.
            kept = parameter.data
            # A ramp, because a norm behind the embedding would take a constant away.
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
    # Four corners tell rows from columns, and either from their reverse.
    cells = list(dict.fromkeys([(0, 0), (0, columns - 1), (rows - 1, 0), (rows - 1, columns - 1)]))
    changed = images[:1].repeat(len(cells) + 1, 1, 1, 1)
    side = min(vit.patch_size, vit.preprocess.size // rows)
    for i, (row, column) in enumerate(cells, start=1):
        changed[i, :, row * side : (row + 1) * side, column * side : (column + 1) * side] += images[1, :, :side, :side]
    states, _ = vit.embed(changed)
    moved = (states[1:] - states[:1]).float().norm(dim=-1).argmax(-1).tolist()
    for (row, column), token in zip(cells, moved):
        if token != start + row * columns + column:
            raise NotAViT(
                f"{vit.name}: its patches do not stand row by row: the patch in row {row + 1}, column {column + 1} "
                f"is token {token + 1} of {vit.groups.num_tokens}"
            )
