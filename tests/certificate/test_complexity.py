"""FLOPs against a closed form, and the terms of the Levin bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn

from raptor.certificate.complexity import (
    count_flops,
    description_bits,
    levin_bound,
    levin_bounds,
    run_times,
)
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.open import open_vit
from raptor.vit.view import ViT

DIM, DEPTH, PATCH, SIZE, NUM_REGISTERS, NUM_CLASSES = 24, 6, 8, 32, 2, 5


def tiny_vit() -> ViT:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=SIZE,
        patch_size=PATCH,
        embed_dim=DIM,
        depth=DEPTH,
        num_heads=2,
        num_classes=NUM_CLASSES,
        reg_tokens=NUM_REGISTERS,
    )
    return open_vit(model.eval())


def closed_form(dim: int, depth: int, patch: int, size: int, num_prefix: int, num_classes: int) -> int:
    """Multiply-adds times two: patch embedding, per block 12 T D^2 and 2 T^2 D, and the head."""
    num_patches = (size // patch) ** 2
    num_tokens = num_patches + num_prefix
    embedding = num_patches * dim * 3 * patch**2
    block = 12 * num_tokens * dim**2 + 2 * num_tokens**2 * dim
    return 2 * (embedding + depth * block + dim * num_classes)


def test_flops_are_the_closed_form() -> None:
    assert count_flops(tiny_vit()) == closed_form(DIM, DEPTH, PATCH, SIZE, 1 + NUM_REGISTERS, NUM_CLASSES)


def test_flops_of_deit_tiny_are_the_published_ones() -> None:
    """DeiT-Ti at 224 px: 1.26 G multiply-adds with attention counted (192 wide, 12 deep, 197 tokens)."""
    vit = open_vit("timm/vit_tiny_patch16_224", pretrained=False)
    assert count_flops(vit) == closed_form(192, 12, 16, 224, 1, 1000)
    assert count_flops(vit) / 2 == pytest.approx(1.26e9, rel=0.01)


def test_flops_of_attention_pooling_by_a_learned_query() -> None:
    """SigLIP: one query for all tokens, with its keys and values, a projection and an MLP of its own."""
    shape = dict(img_size=SIZE, patch_size=PATCH, embed_dim=DIM, depth=DEPTH, num_heads=2)
    vit = open_vit(timm.create_model("vit_base_patch16_siglip_224", **shape).eval())
    num_tokens = (SIZE // PATCH) ** 2
    pooling = DIM**2 + 2 * num_tokens * DIM**2 + 2 * num_tokens * DIM + DIM**2 + 8 * DIM**2
    assert count_flops(vit) == closed_form(DIM, DEPTH, PATCH, SIZE, 0, 0) + 2 * pooling
    assert all(parameter.requires_grad for parameter in vit.model.parameters())


def torchvision_vit() -> ViT:
    """Its blocks are of `nn.MultiheadAttention`, which runs a fused kernel in inference."""
    model = torchvision.models.VisionTransformer(
        image_size=SIZE, patch_size=PATCH, num_layers=DEPTH, num_heads=2, hidden_dim=DIM, mlp_dim=4 * DIM, num_classes=5
    )
    return open_vit(model)


class EncoderViT(nn.Module):
    """A ViT of `nn.TransformerEncoderLayer`, which runs as one fused kernel in inference."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.cls_token = nn.Parameter(torch.randn(1, 1, DIM))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 2, 4 * DIM, batch_first=True, norm_first=norm_first) for _ in range(DEPTH)
        )
        self.head = nn.Linear(DIM, NUM_CLASSES)
        self.image_size = SIZE

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


def transformers_vit(attention: str) -> ViT:
    config = transformers.ViTConfig(
        hidden_size=DIM,
        num_hidden_layers=DEPTH,
        num_attention_heads=2,
        intermediate_size=4 * DIM,
        image_size=SIZE,
        patch_size=PATCH,
        num_labels=NUM_CLASSES,
        attn_implementation=attention,
    )
    return open_vit(transformers.ViTForImageClassification(config))


@pytest.mark.parametrize(
    "build",
    [
        torchvision_vit,
        lambda: open_vit(EncoderViT(norm_first=False)),
        lambda: open_vit(EncoderViT(norm_first=True)),
        lambda: transformers_vit("sdpa"),
        lambda: transformers_vit("eager"),
    ],
    ids=["torchvision", "encoder-layer", "encoder-layer-pre-norm", "hf-sdpa", "hf-eager"],
)
def test_fused_attention_and_encoder_layers_are_counted(build: Callable[[], ViT]) -> None:
    vit, fused = build(), torch.backends.mha.get_fastpath_enabled()
    expected = closed_form(DIM, DEPTH, PATCH, SIZE, 1, NUM_CLASSES)
    assert count_flops(vit) == expected
    assert count_flops(make_surrogate(vit, (2, 4), conditioning="none")) == expected
    assert torch.backends.mha.get_fastpath_enabled() == fused


def test_a_surrogate_of_copied_blocks_costs_its_teachers_flops() -> None:
    teacher = tiny_vit()
    assert count_flops(make_surrogate(teacher, (2, 4), conditioning="none")) == count_flops(teacher)


def test_levin_terms() -> None:
    teacher = tiny_vit()
    surrogate = make_surrogate(teacher, (2, 4), conditioning="none")
    block = 12 * DIM**2 + 13 * DIM  # 3 D^2 + D^2 + 8 D^2 weights; 3 + 1 + 4 + 1 biases and 4 of the norms
    bounds = levin_bounds(surrogate, teacher)
    assert bounds["fp32"].teacher.weight_bits == 32 * DEPTH * block
    assert bounds["fp32"].surrogate.weight_bits == 32 * 2 * block
    assert bounds["fp16"].surrogate.weight_bits == 16 * 2 * block
    num_rows = 3 * DIM + DIM + 4 * DIM + DIM
    assert bounds["int8"].surrogate.weight_bits == 2 * (8 * 12 * DIM**2 + 16 * 13 * DIM + 32 * num_rows)
    ours, theirs = bounds["fp32"].surrogate, bounds["fp32"].teacher
    assert ours.schedule_bits == pytest.approx(2 * math.log2(6)) and theirs.schedule_bits == pytest.approx(
        6 * math.log2(6)
    )
    assert ours.log_time_bits == pytest.approx(math.log2(count_flops(teacher)))
    assert ours.total_bits == pytest.approx(ours.weight_bits + ours.schedule_bits + ours.log_time_bits)
    assert bounds["fp32"].ratio == pytest.approx(ours.total_bits / theirs.total_bits)
    assert levin_bound(surrogate, "fp16") == bounds["fp16"].surrogate


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="fp32, fp16, int8"):
        description_bits([torch.zeros(2)], "int5")


def test_run_time_is_the_median_of_alternating_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the models move: the first round warms up, then they take turns on the same images."""
    now, order = [0.0], []
    takes = {"deep": [90.0, 6.0, 4.0, 30.0], "shallow": [50.0, 1.0, 3.0, 2.0]}

    def model(name: str) -> Callable[[Tensor], None]:
        def forward(images: Tensor) -> None:
            order.append((name, len(images)))
            now[0] += takes[name].pop(0)

        return forward

    monkeypatch.setattr("raptor.certificate.complexity.time", SimpleNamespace(perf_counter=lambda: now[0]))
    seconds = run_times({name: model(name) for name in takes}, torch.zeros(40, 3, 4, 4), seconds=0.0)
    assert seconds == {"deep": 6.0 / 32, "shallow": 2.0 / 32}
    assert order == [("deep", 32), ("shallow", 32)] * 4
