"""The blocks of a surrogate: the paper's against its formula, the copied ones against the teacher's."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import transformers
from tiny_models import noise_images, shake, tiny_timm
from tiny_surrogates import AT_16, CONDITIONINGS, conditioned
from torch import Tensor, nn

from raptor.surrogate.block import DepthMLP, PaperBlock, film
from raptor.surrogate.surrogate import block_parameters, make_surrogate, shared_blocks
from raptor.vit.open import open_vit
from raptor.vit.view import ViT


def dinov2_like(dim: int, num_heads: int) -> ViT:
    return tiny_timm("vit_small_patch14_dinov2", depth=2, embed_dim=dim, num_heads=num_heads, shaken=False)


def test_parameter_counts_at_dim_768() -> None:
    teacher = dinov2_like(768, 12)
    assert sum(p.numel() for p in teacher.blocks[0].parameters()) == 7_089_408
    scaled = make_surrogate(teacher, [2], block="paper", conditioning="mlp")
    plain = make_surrogate(teacher, [2], block="paper", conditioning="none")
    assert block_parameters(scaled) == 9_490_976
    assert block_parameters(plain) == 9_451_776
    assert block_parameters(teacher) == 2 * 7_089_408
    assert shared_blocks(plain)[0].block.num_heads == 12
    assert round(9_490_976 / 7_089_408 - 1, 2) == 0.34


def transcribed(weights: dict[str, Tensor], x: Tensor, layer: int, num_heads: int, scaled: bool) -> Tensor:
    """The block of docs/method.md, line by line, in the precision of its inputs."""
    w = weights
    num_tokens, d = x.shape

    def layer_norm(y: Tensor, name: str) -> Tensor:
        centred = y - y.mean(-1, keepdim=True)
        variance = (centred**2).mean(-1, keepdim=True)
        return centred / torch.sqrt(variance + 1e-5) * w[f"block.{name}.weight"] + w[f"block.{name}.bias"]

    def silu(y: Tensor) -> Tensor:
        return y / (1 + torch.exp(-y))

    def linear(y: Tensor, name: str) -> Tensor:
        return y @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def attention(y: Tensor) -> Tensor:
        q, k, v = linear(y, "block.qkv").split(d, dim=-1)
        size, heads = d // num_heads, []
        for h in range(num_heads):
            part = slice(h * size, (h + 1) * size)
            scores = q[:, part] @ k[:, part].T / math.sqrt(size)
            heads.append(torch.exp(scores) / torch.exp(scores).sum(-1, keepdim=True) @ v[:, part])
        return linear(torch.cat(heads, -1), "block.proj")

    def mlp(y: Tensor) -> Tensor:
        p, q = linear(y, "block.wi").split(4 * d, dim=-1)
        return linear(silu(p) * q, "block.wo")

    t1 = t2 = t3 = torch.ones(d, dtype=x.dtype)
    if scaled:
        depth = torch.tensor([float(layer)], dtype=x.dtype)
        t = linear(silu(linear(depth, "conditioning.w1")), "conditioning.w2") + 1
        t1, t2, t3 = t[:d], t[d : 2 * d], t[2 * d :]
    u = x + t1 * w["block.g1"] * attention(layer_norm(x, "norm1"))
    v = u + t2 * w["block.g2"] * mlp(layer_norm(u, "norm2"))
    assert v.shape == (num_tokens, d)
    return t3 * v


@pytest.mark.parametrize("conditioning", ["mlp", "none"])
@torch.no_grad()
def test_paper_block_is_the_formula(teacher: ViT, conditioning: str) -> None:
    """Every state of a whole surrogate, phases 3 | 1, so that depth is the layer's own number in later phases too."""
    surrogate = conditioned(teacher, (3, 1), block="paper", conditioning=conditioning)
    surrogate.model.double()
    states, _ = surrogate.record(noise_images(surrogate).double())
    assert states[0].dtype == torch.float64
    phase_of = [0, 0, 0, 1]
    for image in range(3):
        x = states[0][image]
        for layer in range(1, 5):
            weights = shared_blocks(surrogate)[phase_of[layer - 1]].state_dict()
            x = transcribed(weights, x, layer, num_heads=3, scaled=conditioning == "mlp")
            assert torch.allclose(states[layer][image], x, rtol=1e-9, atol=1e-9)


def test_paper_block_initialisation() -> None:
    """Scales of 1e-5, W2 and b2 from N(0, 1e-4^2), LayerNorm eps 1e-5, the rest as torch's own modules start."""
    torch.manual_seed(0)
    d = 64
    block, depth = PaperBlock(d, 4), DepthMLP(d)
    assert torch.equal(block.g1, torch.full((d,), 1e-5)) and torch.equal(block.g2, torch.full((d,), 1e-5))
    assert block.norm1.eps == block.norm2.eps == 1e-5
    assert depth.w2.weight.std().item() == pytest.approx(1e-4, rel=0.1)
    assert depth.w2.bias.std().item() == pytest.approx(1e-4, rel=0.3)
    assert depth.w2.weight.mean().abs() < 1e-5
    assert depth.w1.weight.shape == (16, 1) and depth.w2.weight.shape == (3 * d, 16)
    reference = nn.MultiheadAttention(d, 4)
    assert torch.count_nonzero(block.qkv.bias) == torch.count_nonzero(reference.in_proj_bias) == 0
    assert torch.count_nonzero(block.proj.bias) == torch.count_nonzero(reference.out_proj.bias) == 0
    pairs = [
        (block.qkv.weight, reference.in_proj_weight),
        (block.proj.weight, reference.out_proj.weight),
        (block.wi.weight, nn.Linear(d, 8 * d).weight),
        (block.wi.bias, nn.Linear(d, 8 * d).bias),
        (block.wo.weight, nn.Linear(4 * d, d).weight),
    ]
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape
        assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.1)
        assert ours.abs().max().item() == pytest.approx(theirs.abs().max().item(), rel=0.05)


@torch.no_grad()
def test_table_acts_where_it_says(teacher: ViT) -> None:
    """A dinov2 block written out, with the row of scales and shifts at its places."""
    surrogate = conditioned(teacher, (4,), conditioning="table", copy="first")
    tied = shared_blocks(surrogate)[0]
    block = copy.deepcopy(teacher.blocks[0])
    values = {k.replace("inner.", ""): v for k, v in tied.block.block.state_dict().items()}
    block.load_state_dict(values)
    x = torch.randn(2, 7, 48)
    for layer in (1, 3, 4):
        t1, t2, t3, scale1, shift1, scale2, shift2, shift3 = tied.conditioning.rows[layer - 1].chunk(8)
        u = x + (1 + t1) * block.ls1(block.attn(block.norm1(x) * (1 + scale1) + shift1))
        v = u + (1 + t2) * block.ls2(block.mlp(block.norm2(u) * (1 + scale2) + shift2))
        assert torch.allclose(tied(x, torch.tensor(float(layer))), (1 + t3) * v + shift3, atol=1e-5)


@pytest.mark.parametrize("build", ["timm", "hf"])
@torch.no_grad()
def test_copied_blocks_never_drop(build: str) -> None:
    if build == "timm":
        drops = dict(drop_path_rate=0.5, proj_drop_rate=0.5, attn_drop_rate=0.5)
        teacher = tiny_timm("vit_small_patch14_reg4_dinov2", **drops)
    else:
        drops = dict(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
        teacher = open_vit(shake(transformers.ViTModel(transformers.ViTConfig(**AT_16, **drops))))
    a_0, context = teacher.embed(noise_images(teacher))
    assert not torch.equal(_trained(teacher).unroll(a_0, context)[-1], teacher.unroll(a_0, context)[-1])
    for conditioning in CONDITIONINGS:
        surrogate = make_surrogate(teacher, [2, 2], conditioning=conditioning)
        still = surrogate.unroll(a_0, context)
        surrogate.model.train()
        moving = surrogate.unroll(a_0, context)
        assert all(torch.equal(a, b) for a, b in zip(still, moving))
        copied = copy.deepcopy(surrogate.model).train()
        assert not any(m.training for tied in copied.shared_blocks for m in tied.block.block.modules())


def _trained(teacher: ViT) -> ViT:
    other = copy.copy(teacher)
    other.model = copy.deepcopy(teacher.model).train()
    return other


@pytest.mark.parametrize("conditioning", ["mlp", "table"])
@torch.no_grad()
def test_depth_factors_keep_full_precision_under_autocast(teacher: ViT, conditioning: str) -> None:
    """Near 1, bfloat16 knows no factor closer than 1/256: depths would share their factors."""
    depth_factors = shared_blocks(conditioned(teacher, (4,), conditioning=conditioning))[0].conditioning
    for layer in (1.0, 3.0):
        exact = depth_factors(torch.tensor(layer))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = depth_factors(torch.tensor(layer))
        for a, b in zip(exact, mixed):
            assert (a is None and b is None) or torch.allclose(a, b.float(), atol=1e-6)


def test_a_failed_forward_leaves_nothing_behind(teacher: ViT) -> None:
    surrogate = conditioned(teacher, (4,))
    with pytest.raises(RuntimeError):
        shared_blocks(surrogate)[0](torch.randn(2, 7, 47), torch.tensor(1.0))
    copy.deepcopy(surrogate.model)


def test_factors_are_never_rounded_to_the_states_precision() -> None:
    scaled = film(torch.ones(1, 1, 4).bfloat16(), torch.full((4,), 1.001), torch.full((4,), 1e-4))
    assert torch.allclose(scaled, torch.full((1, 1, 4), 1.0011), atol=1e-6)


@pytest.mark.parametrize("block", ["teacher", "paper"])
@torch.no_grad()
def test_under_autocast_the_stream_stays_in_fp32(teacher: ViT, block: str) -> None:
    surrogate = conditioned(teacher, (3, 1), block=block)
    images = noise_images(surrogate)
    exact, _ = surrogate.record(images)
    with torch.autocast("cpu", torch.bfloat16):
        states, _ = surrogate.record(images)
    for state, wanted in zip(states[1:], exact[1:]):
        assert state.dtype == torch.float32
        assert (state - wanted).norm() < 0.02 * wanted.norm()
