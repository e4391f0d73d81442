"""`raptor.vit.tokens`: where cls, registers and patches stand."""

from __future__ import annotations

import pytest
import torch
import transformers
from families import (
    Unheard,
)
from tiny_models import shake
from torch import Tensor, nn

from raptor.data.preprocess import Preprocess
from raptor.vit.groups import TokenGroups, image_vectors
from raptor.vit.open import open_vit
from raptor.vit.view import NotAViT

SMALL = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=96, patch_size=16)


class Laid(Unheard):
    """Its tokens in an order of one's choice; `image` is a token that depends on the whole image."""

    def __init__(self, order: str, rows_first: bool = True) -> None:
        super().__init__()
        self.order, self.rows_first = order.split(), rows_first
        if "cls_token" in order:
            self.cls_token = self.summary
        del self.summary

    def forward(self, images: Tensor) -> Tensor:
        patches = nn.functional.unfold(images, 8, stride=8).transpose(1, 2)
        if not self.rows_first:
            patches = patches.unflatten(1, (4, 4)).transpose(1, 2).flatten(1, 2)
        patches = self.lift(patches)
        parts = {"patches": patches, "image": patches.mean(1, keepdim=True) + 3}
        x = torch.cat(
            [parts[n] if n in parts else getattr(self, n).expand(len(images), -1, -1) for n in self.order], dim=1
        )
        for block in self.trunk.stack:
            x = block(x)
        return self.answer(self.last(x).mean(1))


@pytest.mark.parametrize(
    ("order", "counts", "patches"),
    [
        ("cls_token scratch patches", (1, 1), slice(2, 18)),
        ("cls_token patches scratch scratch", (1, 2), slice(1, 17)),
        ("patches scratch", (0, 1), slice(0, 16)),
        ("patches cls_token", (1, 0), slice(0, 16)),
        ("scratch patches", (0, 1), slice(1, 17)),
        ("patches", (0, 0), slice(0, 16)),
    ],
)
@torch.no_grad()
def test_tokens_are_placed_where_they_stand(order: str, counts: tuple[int, int], patches: slice) -> None:
    vit = open_vit(Laid(order), preprocess=Preprocess(size=32, resize=32))
    groups = vit.groups
    assert (groups.cls, groups.registers, groups.patches) == (*counts, 16) and groups.slice("patches") == patches
    x = torch.randn(2, groups.num_tokens, 24)
    expected = {"patches": x[:, patches].mean(1)}
    if groups.cls:
        expected["cls"] = x[:, order.split().index("cls_token") * (16 if order.startswith("patches") else 1)]
    found = image_vectors(x, groups)
    assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in found)
    assert TokenGroups.from_dict(groups.to_dict()) == groups


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (lambda: Laid("scratch patches scratch"), {}, "1 tokens stand before the patches and 1 after them"),
        (lambda: Laid("patches image"), {}, "17 patches are no square grid"),
        (lambda: Laid("patches scratch image"), {}, "do not stand together"),
        (lambda: Laid("scratch patches"), dict(cls=0, registers=0), "16 of 17 tokens depend on the image, not 17"),
        (lambda: Laid("scratch patches"), dict(cls=1, registers=1), "no square grid"),
        (lambda: Laid("patches", rows_first=False), {}, "do not stand row by row"),
        (
            lambda: Laid("scratch cls_token patches"),
            {},
            "cls token is number 2 of 18 tokens: put it first, or give cls=0",
        ),
        (lambda: Laid("patches scratch cls_token"), {}, "cls token is number 18 of 18 tokens"),
    ],
)
def test_tokens_that_cannot_be_placed_are_refused(model, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        open_vit(model(), preprocess=Preprocess(size=32, resize=32), **options)
    assert "\n" not in str(error.value)


def test_a_cls_token_that_is_no_token_of_the_blocks_is_none() -> None:
    """The query of a pooling layer after the blocks may have such a name, too; weights stay as they are."""
    model = Laid("scratch patches")
    model.cls_token = nn.Parameter(torch.zeros(1, 1, 24))
    vit = open_vit(model, preprocess=Preprocess(size=32, resize=32))
    assert (vit.groups.cls, vit.groups.registers) == (0, 1) and not model.cls_token.any()
    held = Laid("cls_token patches")
    kept, pointer = held.cls_token.detach().clone(), held.cls_token.data_ptr()
    assert open_vit(held, preprocess=Preprocess(size=32, resize=32)).groups.cls == 1
    assert torch.equal(held.cls_token, kept) and held.cls_token.data_ptr() == pointer and held.cls_token.requires_grad


def test_tokens_before_the_patches_may_depend_on_the_image() -> None:
    options = dict(cls=0, registers=1, preprocess=Preprocess(size=32, resize=32))
    assert open_vit(Laid("image patches"), **options).groups == TokenGroups(0, 1, 16)


def test_trailing_detection_tokens_are_registers_and_packed_batches_are_refused() -> None:
    config = transformers.YolosConfig(
        **SMALL, image_size=[32, 32], num_detection_tokens=5, use_mid_position_embeddings=False
    )
    vit = open_vit(shake(transformers.YolosModel(config)), size=32)
    assert vit.groups == TokenGroups(1, 5, 4, ("cls", "patches", "registers"))
    assert vit.groups.slice("patches") == slice(1, 5) and vit.groups.slice("registers") == slice(5, 10)
    pixtral = transformers.PixtralVisionModel(transformers.PixtralVisionConfig(**SMALL, image_size=32))
    with pytest.raises(NotAViT, match="1 rows of tokens for 2 images"):
        open_vit(pixtral, size=32)
