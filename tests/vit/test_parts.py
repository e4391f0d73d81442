"""Inside the blocks: patterns equal the libraries' own eager attention, and the parts add up to the states."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from families import AT_14, AT_16, CalledByDepth, Unheard, each_family, masked, opened
from timm.models.vision_transformer import ParallelScalingBlock
from tiny_models import noise_images, shake, tiny_timm
from torch import Tensor, nn

from raptor.surrogate.block import fast_switched
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.open import open_vit
from raptor.vit.parts import PARTS, choose_names, softmax_weights
from raptor.vit.view import ViT

# Fused attention, rotary positions, registers, relative bias, no cls token, groups of queries.
TIMM_FAMILIES = (
    *("augreg", "dinov2-registers", "dinov3", "eva02", "beit", "relative-bias", "rope-mixed", "siglip"),
    *("naflexvit", "grouped-queries", "branches-side-by-side"),
)
TRANSFORMERS_MODELS = {
    "ViT": lambda: transformers.ViTModel(transformers.ViTConfig(**AT_16)),
    "Dinov2WithRegisters": lambda: transformers.Dinov2WithRegistersModel(
        transformers.Dinov2WithRegistersConfig(**AT_14)
    ),
    "DINOv3ViT": lambda: transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**AT_16, num_register_tokens=3)),
    "CLIPVision": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**AT_16)),
    "SiglipVision": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**AT_16)),
}


def eager_patterns(vit: ViT, images: Tensor) -> list[Tensor]:
    """What timm's unfused attention hands to its dropout, which is the softmax itself."""
    model = copy.deepcopy(vit.model)
    found: list[Tensor] = []
    for module in model.modules():
        if hasattr(module, "fused_attn") and hasattr(module, "attn_drop"):  # not a pooling layer after the blocks
            module.fused_attn = False
            module.attn_drop.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    model(images)
    return found


@pytest.mark.parametrize("family", TIMM_FAMILIES)
@torch.no_grad()
def test_patterns_are_those_of_timms_eager_attention(family: str) -> None:
    vit = opened(family)
    images = noise_images(vit)
    _, _, inside = vit.record(images, ("attn",))
    eager = eager_patterns(vit, images)
    per_block = len(eager) // vit.num_layers
    for layer in range(1, vit.num_layers + 1):
        wanted = torch.cat(eager[(layer - 1) * per_block : layer * per_block], 1)
        assert inside.attn[layer].shape == wanted.shape
        assert torch.allclose(inside.attn[layer], wanted, atol=1e-5)
        assert wanted.std(-1).mean() > 1e-3  # a pattern that is flat everywhere would agree with anything


@pytest.mark.parametrize("name", TRANSFORMERS_MODELS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_patterns_are_those_of_transformers_eager_attention(name: str, implementation: str) -> None:
    torch.manual_seed(0)
    model = shake(TRANSFORMERS_MODELS[name]()).eval()
    model.set_attn_implementation("eager")
    vit = open_vit(model)
    images = noise_images(vit)
    wanted = model(images, output_attentions=True).attentions
    model.set_attn_implementation(implementation)
    _, _, inside = vit.record(images, ("attn",))
    assert len(inside.attn) == len(wanted) == vit.num_layers
    for layer, pattern in enumerate(wanted, start=1):
        assert torch.allclose(inside.attn[layer], pattern, atol=1e-5)


@torch.no_grad()
def test_patterns_of_torchs_own_attention() -> None:
    vit = opened("torchvision")
    images = noise_images(vit)
    states, _, inside = vit.record(images, ("attn",))
    block = vit.blocks[1]
    qkv = F.linear(block.ln_1(states[1]), block.self_attention.in_proj_weight, block.self_attention.in_proj_bias)
    q, k, _ = qkv.unflatten(-1, (3, 3, 16)).permute(2, 0, 3, 1, 4)
    assert torch.allclose(inside.attn[2], (q @ k.mT / 4).softmax(-1), atol=1e-5)


@each_family
@torch.no_grad()
def test_parts_add_up_to_the_states(family: str) -> None:
    vit = opened(family)
    images = noise_images(vit)
    states, output, inside = vit.record(images, PARTS)
    plain, plain_output = vit.record(images)
    assert torch.allclose(output, plain_output, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(states, plain))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in vit.model.modules())
    for layer in range(1, vit.num_layers + 1):
        assert torch.allclose(states[layer - 1] + inside.attn_out[layer], inside.resid_mid[layer], atol=1e-5)
        assert torch.allclose(inside.resid_mid[layer] + inside.mlp_out[layer], states[layer], atol=1e-5)
        pattern = inside.attn[layer]
        assert pattern.shape[0] == 3 and pattern.shape[2:] == (states[0].shape[1],) * 2
        assert torch.allclose(pattern.sum(-1), torch.ones(()), atol=1e-5)


@torch.no_grad()
def test_branches_are_what_the_models_own_modules_give(teacher: ViT) -> None:
    images = noise_images(teacher)
    states, _, inside = teacher.record(images, ("resid_mid", "attn_out", "mlp_out"))
    for layer, block in enumerate(teacher.blocks, start=1):
        attention = block.ls1(block.attn(block.norm1(states[layer - 1])))
        assert torch.equal(inside.attn_out[layer], attention)
        assert torch.equal(inside.resid_mid[layer], states[layer - 1] + attention)
        assert torch.equal(inside.mlp_out[layer], block.ls2(block.mlp(block.norm2(inside.resid_mid[layer]))))


@pytest.mark.parametrize("conditioning", ["none", "table"])
@pytest.mark.parametrize("block", ["teacher", "paper"])
@torch.no_grad()
def test_parts_of_a_surrogate(teacher: ViT, block: str, conditioning: str) -> None:
    """Tied blocks run several times, and through their fast view or not."""
    surrogate = make_surrogate(teacher, [1, 3], block=block, conditioning=conditioning)
    shake(surrogate.model)
    images = noise_images(surrogate)
    states, _, inside = surrogate.record(images, PARTS)
    with fast_switched(False):
        _, _, plain = surrogate.record(images, PARTS)
    for layer in range(1, 5):
        assert torch.allclose(states[layer - 1] + inside.attn_out[layer], inside.resid_mid[layer], atol=1e-4)
        assert torch.allclose(inside.resid_mid[layer] + inside.mlp_out[layer], states[layer], atol=1e-4)
        for part in PARTS:
            assert torch.allclose(getattr(inside, part)[layer], getattr(plain, part)[layer], atol=1e-4)
    assert not torch.allclose(inside.attn[2], inside.attn[3], atol=1e-4)


@pytest.mark.parametrize("mask", ["none", "boolean", "added", "causal"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_weights_against_fused_attention_over_an_identity(mask: str, scale: float | None) -> None:
    """With the identity as values, attention gives its own weights."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 7, 16, generator=generator)
    k = torch.randn(2, 2, 7, 16, generator=generator)
    eye = torch.eye(7).expand(2, 2, 7, 7)
    options = {
        "none": {},
        "boolean": {"attn_mask": torch.rand(7, 7, generator=generator) + torch.eye(7) > 0.5},
        "added": {"attn_mask": torch.randn(1, 4, 7, 7, generator=generator)},
        "causal": {"is_causal": True},
    }[mask]
    wanted = F.scaled_dot_product_attention(q, k, eye, scale=scale, enable_gqa=True, **options)
    found = softmax_weights(q, k, eye, scale=scale, enable_gqa=True, **options)
    assert torch.allclose(found, wanted, atol=1e-6)


@torch.no_grad()
def test_masks_that_the_model_passes_are_kept() -> None:
    vit = open_vit(masked(2), size=32)
    _, _, inside = vit.record(noise_images(vit), ("attn",))
    assert (inside.attn[2][..., 0, 3:] == 0).all()
    assert (inside.attn[1][..., 0, 3:] != 0).any()


@torch.no_grad()
def test_only_what_is_asked_for_is_kept(teacher: ViT) -> None:
    _, _, inside = teacher.record(noise_images(teacher), ("attn", "mlp_out"), layers=[2, 4])
    assert list(inside.attn) == list(inside.mlp_out) == [2, 4]
    assert not inside.attn_out and not inside.resid_mid
    with pytest.raises(ValueError, match="unknown part 'attention': choose from attn, attn_out"):
        teacher.record(noise_images(teacher), ("attention",))
    with pytest.raises(ValueError, match=r"write parts=\('attn',\)"):
        teacher.record(noise_images(teacher), "attn")


@torch.no_grad()
def test_patterns_are_of_full_precision_under_autocast(teacher: ViT) -> None:
    images = noise_images(teacher)
    _, _, wanted = teacher.record(images, ("attn",))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, _, inside = teacher.record(images, ("attn",))
    assert inside.attn[1].dtype == torch.float32
    assert torch.allclose(inside.attn[1].sum(-1), torch.ones(()), atol=1e-6)  # bf16 rows miss 1 by up to 1 %
    assert torch.allclose(inside.attn[1], wanted.attn[1], atol=0.05)


def test_patterns_have_gradients(teacher: ViT) -> None:
    images = noise_images(teacher).requires_grad_()
    _, _, inside = teacher.record(images, ("attn",))
    inside.attn[3][:, :, 0].square().sum().backward()
    assert images.grad.abs().sum() > 0


@torch.no_grad()
def test_both_branches_in_one_sum_have_no_state_between_them() -> None:
    vit = tiny_timm(block_fn=ParallelScalingBlock)
    _, _, inside = vit.record(noise_images(vit), ("attn",))
    assert inside.attn[1].shape == (3, 3, 5, 5)
    with pytest.raises(match=r"block 1 of .* has no state between its attention and its MLP: only its attn"):
        vit.record(noise_images(vit), ("resid_mid",))


@torch.no_grad()
def test_blocks_without_attention_are_refused_and_left_as_they_were() -> None:
    vit = open_vit(Unheard(), size=32)
    with pytest.raises(match="block 1 of Unheard has no attention that torch computes"):
        vit.record(noise_images(vit), ("attn",))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in vit.model.modules())
    assert len(vit.record(noise_images(vit))[0]) == 6


class Router(nn.Module):
    """A block whose MLP mixes experts by a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)
        self.gate = nn.Linear(24, 5)
        self.out = nn.Linear(5, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.out(self.gate(x).softmax(-1))


@torch.no_grad()
def test_a_softmax_over_experts_is_no_attention() -> None:
    vit = open_vit(CalledByDepth(lambda _layer, _tokens: {}, Router), size=32)
    _, _, inside = vit.record(noise_images(vit), ("attn", "mlp_out"))
    assert inside.attn[1].shape == (3, 2, 17, 17)


@torch.no_grad()
def test_every_name(teacher: ViT) -> None:
    images = noise_images(teacher)
    output, cache = teacher.run_with_cache(images)
    states, plain, inside = teacher.record(images, PARTS)
    assert torch.equal(output, plain)
    assert len(cache) == 4 * 6
    assert torch.equal(cache["blocks.0.hook_resid_pre"], states[0])
    assert torch.equal(cache["blocks.3.hook_resid_post"], states[4])
    assert torch.equal(cache["blocks.2.attn.hook_pattern"], inside.attn[3])
    assert torch.equal(cache["blocks.2.hook_attn_out"], inside.attn_out[3])
    assert torch.equal(cache["blocks.2.hook_mlp_out"], inside.mlp_out[3])
    for block in range(4):
        middle = cache[f"blocks.{block}.hook_resid_pre"] + cache[f"blocks.{block}.hook_attn_out"]
        assert torch.equal(cache[f"blocks.{block}.hook_resid_mid"], middle)
        assert torch.equal(cache[f"blocks.{block}.hook_resid_post"], middle + cache[f"blocks.{block}.hook_mlp_out"])


@torch.no_grad()
def test_names_are_chosen_by_name_by_list_and_by_function(teacher: ViT) -> None:
    surrogate = make_surrogate(teacher, [1, 3])
    images = noise_images(surrogate)
    name = "blocks.1.attn.hook_pattern"
    for names_filter in (name, [name], lambda text: text == name):
        _, cache = surrogate.run_with_cache(images, names_filter)
        assert list(cache) == [name]
    assert cache[name].shape == (3, 3, 7, 7)
    _, cache = surrogate.run_with_cache(images, names_filter=lambda text: text.endswith("hook_resid_post"))
    assert list(cache) == [f"blocks.{block}.hook_resid_post" for block in range(4)]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"did you mean blocks\.1\.hook_resid_p"):
        choose_names(4, "blocks.1.hook_resid_past")
    with pytest.raises(ValueError, match="unknown name 'ln_final'"):
        choose_names(4, ["blocks.0.hook_resid_pre", "ln_final"])
