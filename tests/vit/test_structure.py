"""What is a ViT, and what is refused, for every supported family."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision
import transformers
from families import (
    ZOO,
    Unheard,
    each_family,
    opened,
)
from tiny_models import noise_images, shake
from torch import Tensor, nn

from raptor.data.preprocess import Preprocess
from raptor.open import open_vit
from raptor.vit.structure import NotAViT
from raptor.vit.view import TokenGroups


@each_family
def test_blocks_groups_and_preprocessing(family: str) -> None:
    vit, expected = opened(family), ZOO[family]
    assert vit.num_layers == len(vit.blocks) == 3
    assert (vit.groups.cls, vit.groups.registers, vit.groups.patches) == expected.groups
    assert vit.grid == (2, 2)
    assert vit.patch_size == vit.preprocess.size // 2
    assert vit.dim == 48
    assert vit.num_classes == expected.num_classes
    assert vit.preprocess.mean == pytest.approx(expected.mean)
    assert vit.depth_conditioned is (family == "rope-mixed")
    assert not vit.model.training


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("resnet18", r"not \(batch, tokens, dim\)"),
        ("swin_tiny_patch4_window7_224", r"not \(batch, tokens, dim\)"),
        ("samvit_base_patch16", r"not \(batch, tokens, dim\)"),
        ("cait_xxs24_224", "continues in another list, `blocks_token_only`"),
        ("xcit_nano_12_p16_224", "continues in another list"),
        ("hiera_tiny_224", "changes the state's shape"),
        ("pit_ti_224", "continues in another list"),
        ("levit_128s", "continues in another list"),
    ],
)
def test_refused(name: str, condition: str) -> None:
    kwargs = dict(depth=2, embed_dim=48, num_heads=2, img_size=224) if name.startswith("samvit") else {}
    kwargs |= dict(depth=2) if name.startswith(("cait", "xcit")) else {}
    with pytest.raises(NotAViT, match=condition) as error:
        open_vit(f"timm/{name}", pretrained=False, **kwargs)
    assert "\n" not in str(error.value)
    assert name in str(error.value)


def test_refused_modules() -> None:
    swin = transformers.SwinModel(
        transformers.SwinConfig(image_size=64, embed_dim=12, depths=[2, 2], num_heads=[2, 2], window_size=4)
    )
    for model in (torchvision.models.resnet18(), swin, nn.Conv2d(3, 8, 3)):
        with pytest.raises(NotAViT) as error:
            open_vit(model)
        assert "\n" not in str(error.value)


class Skipping(nn.Module):
    """A U-shaped stream: the output uses a middle state beside the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = timm.create_model(
            "vit_tiny_patch16_224", depth=3, embed_dim=48, num_heads=3, img_size=32, num_classes=0
        )
        shake(self.inner)
        self.image_size = 32

    def forward(self, images: Tensor) -> Tensor:
        x, middle = self.inner.forward_intermediates(images, indices=[1], output_fmt="NLC")
        return x.mean(1) + middle[0].mean(1)


def test_output_of_more_than_the_last_state_is_refused() -> None:
    with pytest.raises(NotAViT, match="depends on more than the last state"):
        open_vit(Skipping())


@torch.no_grad()
def test_unheard_of_module_with_everything_given() -> None:
    model, images = Unheard(), Preprocess(size=32, resize=32)
    vit = open_vit(model, blocks="trunk.stack", norm="last", head="answer", cls=1, registers=1, preprocess=images)
    assert vit.groups == TokenGroups(1, 1, 16)
    assert (vit.num_layers, vit.blocks_path, vit.num_classes, vit.dim) == (5, "trunk.stack", 4, 24)
    assert vit.norm is model.last
    x = noise_images(vit)
    states, output = vit.record(x)
    assert torch.equal(vit.finish(states[-1]), output)
    normed = model.last(states[-1])
    assert torch.equal(vit.features(states[-1]), torch.cat([normed[:, 0], normed[:, 2:].mean(1)], -1))


def test_unheard_of_module_found_by_its_structure() -> None:
    vit = open_vit(Unheard(), preprocess=Preprocess(size=32, resize=32))
    assert (vit.blocks_path, vit.num_layers, vit.groups.num_tokens, vit.num_classes) == ("trunk.stack", 5, 18, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(blocks="trunk.nope"), "has no `trunk.nope`"),
        (dict(blocks="last"), "not a list of blocks"),
        (dict(cls=2), "do not fit"),
        (dict(cls=1, registers=99), "do not fit"),
    ],
)
def test_wrong_structure_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_vit(Unheard(), preprocess=Preprocess(size=32, resize=32), **options)
