"""`raptor.vit.structure`: what is a ViT, for every supported family, and what the view repeats exactly."""

from __future__ import annotations

import pytest
import timm
import torch
import transformers
from families import (
    ZOO,
    Unheard,
    each_family,
    opened,
)
from tiny_models import noise_images, shake, tiny_timm
from torch import Tensor, nn

from raptor.data.preprocess import Preprocess
from raptor.vit.groups import TokenGroups
from raptor.vit.open import open_vit
from raptor.vit.view import NotAViT

SMALL = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=96, patch_size=16)


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


class ReadsByHook(Unheard):
    """Its output adds the state after an inner block, which a hook on that block has stored."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.middle: Tensor | None = None
        self.trunk.stack[2].register_forward_hook(self.store)

    def store(self, _block: nn.Module, _args: tuple, output: Tensor) -> None:
        self.middle = output

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + self.share * self.middle.mean((1, 2))[:, None]


@pytest.mark.parametrize("share", [1.0, 1e-3])
def test_an_output_that_reads_an_inner_block_through_a_hook_is_refused(share: float) -> None:
    """`finish` would answer with the state that an earlier image has left behind."""
    with pytest.raises(NotAViT, match="depends on more than the last state"):
        open_vit(ReadsByHook(share), size=32)


@torch.no_grad()
def test_a_model_opened_inside_autocast_has_the_weights_of_its_file() -> None:
    """Autocast keeps half-precision copies of weights; the probe must not leave any of the random initial ones."""
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    outside = open_vit("scenes")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = open_vit("scenes")
        found = inside.record(images)[0][-1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = outside.record(images)[0][-1]
    assert torch.equal(found, expected)


class Encoder(nn.Module):
    """Uses torch's own container, which reads attributes of its layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.patches, self.cls = nn.Conv2d(3, 16, 8, 8), nn.Parameter(torch.randn(1, 1, 16))
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).mT
        return self.encoder(torch.cat([self.cls.expand(len(patches), -1, -1), patches], dim=1))[:, 0]


def test_a_forward_that_looks_inside_its_blocks_is_refused_with_the_remedy() -> None:
    with pytest.raises(NotAViT, match=r"reads `self_attn` of its blocks.*loop over `encoder\.layers`"):
        open_vit(Encoder(), size=32)


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


@pytest.mark.parametrize("pool", ["avg", "max", "avgmax"])
def test_the_final_norm_after_pooling(pool: str) -> None:
    vit = tiny_timm(global_pool=pool, depth=2)
    assert vit.norm is vit.model.fc_norm


def test_unheard_of_module_found_by_its_structure() -> None:
    vit = open_vit(Unheard(), preprocess=Preprocess(size=32, resize=32))
    assert (vit.blocks_path, vit.num_layers, vit.groups.num_tokens) == ("trunk.stack", 5, 18)
    assert vit.groups.patches == 16 and vit.grid == (4, 4)


def test_a_last_linear_layer_is_a_classifier_only_by_the_users_word() -> None:
    images = Preprocess(size=32, resize=32)
    assert open_vit(Unheard(), preprocess=images).num_classes == 0
    assert open_vit(Unheard(), preprocess=images, head_classes=4).num_classes == 4
    with pytest.raises(ValueError, match="gives 4 numbers per image, not 5 class scores: correct head_classes"):
        open_vit(Unheard(), preprocess=images, head_classes=5)
    with pytest.raises(ValueError, match="has no `nope`"):
        open_vit(Unheard(), preprocess=images, head="nope")
    classifier = timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=48, num_heads=3, img_size=32)
    assert open_vit(classifier).num_classes == 1000
    assert open_vit(classifier, head_classes=0).num_classes == 0
    clip = transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**SMALL, image_size=32))
    assert open_vit(clip).num_classes == 0


class Mixing(Unheard):
    """Normalises over the batch, as a batch norm in training mode would."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images - images.mean(0, keepdim=True) + images.mean())


def test_states_that_depend_on_the_batch_are_refused() -> None:
    with pytest.raises(NotAViT, match="depend on the other images of its batch"):
        open_vit(Mixing(), preprocess=Preprocess(size=32, resize=32))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_a_module_in_half_precision_is_opened_in_fp32_and_left_as_it_is(half: torch.dtype) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=48, num_heads=3, img_size=32).to(half)
    vit = open_vit(model)
    assert vit.dtype == torch.float32 and next(model.parameters()).dtype == half
    assert vit(noise_images(vit)).dtype == torch.float32
    kept = open_vit(model, dtype="bf16")
    assert kept.dtype == torch.bfloat16 and kept(noise_images(kept)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="unknown dtype 'int8': choose from fp32, bf16, fp16"):
        open_vit(model, dtype="int8")
