"""The surrogate: a ViT like any other, over k blocks that are stored once."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import timm
import torch
import torchvision
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import noise_images, same_tensors, shake, tiny_timm
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from raptor.open import open_vit, save_vit
from raptor.phases import Phases
from raptor.surrogate.blocks import DepthMLP, PaperBlock, _film
from raptor.surrogate.surrogate import block_parameters, make_surrogate, shared_blocks, surrogate_spec
from raptor.vit.trajectory import perturb, swap_blocks
from raptor.vit.view import ViT

BLOCKS = ("teacher", "paper")
CONDITIONINGS = ("none", "mlp", "table")
every_kind = pytest.mark.parametrize(("block", "conditioning"), [(b, c) for b in BLOCKS for c in CONDITIONINGS])


def conditioned(teacher: ViT, phases: tuple[int, ...], **options) -> ViT:
    """A surrogate with all its trainable weights moved, so that each depth does something else."""
    surrogate = make_surrogate(teacher, phases, **options)
    shake(shared_blocks(surrogate), seed=5)
    return surrogate


def dinov2_like(dim: int, num_heads: int) -> ViT:
    return tiny_timm("vit_small_patch14_dinov2", depth=2, embed_dim=dim, num_heads=num_heads, shaken=False)


# --- the paper's block -------------------------------------------------------------------------------------------


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
    """SPEC section 3, line by line, in the precision of its inputs."""
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


def test_seed(teacher: ViT) -> None:
    state = torch.random.get_rng_state()
    first, second, other = (make_surrogate(teacher, [2, 2], block="paper", seed=s) for s in (3, 3, 4))
    assert torch.equal(state, torch.random.get_rng_state())
    assert same_tensors(first.model.state_dict(), second.model.state_dict())
    assert not same_tensors(first.model.state_dict(), other.model.state_dict())
    one, two = shared_blocks(first)
    assert not torch.equal(one.block.qkv.weight, two.block.qkv.weight)


# --- copies of the teacher's blocks ------------------------------------------------------------------------------

AT_16 = dict(
    hidden_size=48, num_hidden_layers=4, num_attention_heads=3, intermediate_size=96, image_size=32, patch_size=16
)


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=16, num_layers=4, num_heads=3, hidden_dim=48, mlp_dim=96, num_classes=6
    )


TEACHERS = {
    "dinov2-registers": lambda: tiny_timm("vit_small_patch14_reg4_dinov2"),
    "dinov3": lambda: tiny_timm("vit_small_patch16_dinov3"),
    "eva02": lambda: tiny_timm("eva02_tiny_patch14_224"),
    "rope-mixed": lambda: tiny_timm("vit_small_patch16_rope_mixed_224"),
    "clip": lambda: tiny_timm("vit_base_patch16_clip_224"),
    "siglip": lambda: tiny_timm("vit_base_patch16_siglip_224"),
    "beit": lambda: tiny_timm("beit_base_patch16_224", img_size=32),
    "swiglu-giant": lambda: tiny_timm("vit_giant_patch14_dinov2"),
    "torchvision": lambda: open_vit(shake(torchvision_vit())),
    "hf-vit": lambda: open_vit(shake(transformers.ViTModel(transformers.ViTConfig(**AT_16)))),
    "hf-dinov3": lambda: open_vit(shake(transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**AT_16)))),
    "hf-clip": lambda: open_vit(shake(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**AT_16)))),
}


@pytest.mark.parametrize("name", TEACHERS)
@pytest.mark.parametrize("conditioning", ["none", "table"])
@torch.no_grad()
def test_as_many_blocks_as_layers_is_the_teacher(name: str, conditioning: str) -> None:
    teacher = TEACHERS[name]()
    surrogate = make_surrogate(teacher, [1, 1, 1, 1], block="teacher", conditioning=conditioning)
    images = noise_images(teacher)
    wanted, output = teacher.record(images)
    found, surrogate_output = surrogate.record(images)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found))
    assert torch.equal(output, surrogate_output)
    assert torch.equal(surrogate.finish(found[-1]), output)


@pytest.mark.parametrize("name", TEACHERS)
def test_every_teacher_trains_at_every_conditioning(name: str) -> None:
    """k = 2: each shared weight has a gradient from the last state, and the table's rows differ by depth."""
    teacher = TEACHERS[name]()
    for conditioning in CONDITIONINGS:
        surrogate = make_surrogate(teacher, [3, 1], conditioning=conditioning)
        states, _ = surrogate.record(noise_images(teacher))
        sum((s**2).mean() for s in states).backward()
        missing = [n for n, p in shared_blocks(surrogate).named_parameters() if p.grad is None]
        assert not missing
        if conditioning == "table":
            rows = shared_blocks(surrogate)[0].conditioning.rows.grad
            assert rows.shape == (3, 8 * 48)
            # t1, t2, t3, and the scale and shift after each norm: none is left out of the block
            assert (rows.reshape(3, 8, 48).abs().sum(-1) > 0).all()


@pytest.mark.parametrize(("which", "layers"), [("first", (1, 4)), ("middle", (2, 4)), ("last", (3, 4))])
@torch.no_grad()
def test_which_block_is_copied(teacher: ViT, which: str, layers: tuple[int, int]) -> None:
    surrogate = make_surrogate(teacher, [3, 1], conditioning="none", copy=which)
    x = torch.randn(2, 7, 48)
    for tied, layer in zip(shared_blocks(surrogate), layers):
        assert torch.equal(tied(x, torch.tensor(1.0)), teacher.blocks[layer - 1](x))


@torch.no_grad()
def test_surrogate_states_are_the_powers_of_its_blocks(teacher: ViT) -> None:
    surrogate = make_surrogate(teacher, [3, 1], conditioning="none", copy="first")
    images = noise_images(teacher)
    x = teacher.record(images)[0][0]
    states, output = surrogate.record(images)
    for layer, block in zip(range(1, 5), [0, 0, 0, 3]):
        x = teacher.blocks[block](x)
        assert torch.equal(states[layer], x)
    assert torch.equal(output, teacher.finish(x))


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


# --- tied storage ------------------------------------------------------------------------------------------------


@every_kind
def test_tied_weights_are_one_tensor(teacher: ViT, block: str, conditioning: str) -> None:
    """A step on the loss of layer 1 alone moves what every depth of the phase does, and no other phase."""
    surrogate = conditioned(teacher, (3, 1), block=block, conditioning=conditioning)
    images = noise_images(teacher)
    a_0, context = surrogate.embed(images)
    with torch.no_grad():
        before = [surrogate.step(layer, a_0, context) for layer in range(1, 5)]
    optimizer = torch.optim.SGD([p for p in surrogate.model.parameters() if p.requires_grad], lr=1.0)
    surrogate.step(1, a_0, context).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        after = [surrogate.step(layer, a_0, context) for layer in range(1, 5)]
    assert [torch.equal(a, b) for a, b in zip(before, after)] == [False, False, False, True]
    assert len({id(step.tied) for step in surrogate.blocks}) == 2


@every_kind
def test_safetensors_takes_the_state_dict(teacher: ViT, block: str, conditioning: str, tmp_path: Path) -> None:
    surrogate = conditioned(teacher, (2, 2), block=block, conditioning=conditioning)
    save_file(surrogate.model.state_dict(), tmp_path / "model.safetensors")
    stored = load_file(tmp_path / "model.safetensors")
    assert sum(v.numel() for v in stored.values()) == sum(p.numel() for p in surrogate.model.parameters())
    assert not [k for k in stored if k.startswith("blocks.")]
    assert len({p.data_ptr() for p in surrogate.model.parameters()}) == len(list(surrogate.model.parameters()))
    names = [n for n, p in surrogate.model.named_parameters() if p.requires_grad]
    assert names and all(n.startswith("shared_blocks.") for n in names)
    assert len(names) == len(list(shared_blocks(surrogate).parameters()))


@torch.no_grad()
def test_hooks_fire_once_a_layer(teacher: ViT) -> None:
    surrogate = make_surrogate(teacher, [3, 1])
    fired: list[str] = []
    for i, step in enumerate(surrogate.blocks):
        step.register_forward_hook(lambda *_, i=i: fired.append(f"layer {i + 1}"))
    for j, tied in enumerate(shared_blocks(surrogate)):
        tied.register_forward_hook(lambda *_, j=j: fired.append(f"phase {j + 1}"))
    surrogate(noise_images(surrogate))
    assert [f for f in fired if "layer" in f] == ["layer 1", "layer 2", "layer 3", "layer 4"]
    assert [f for f in fired if "phase" in f] == ["phase 1", "phase 1", "phase 1", "phase 2"]
    assert len({id(b) for b in surrogate.blocks}) == 4


@every_kind
@torch.no_grad()
def test_deepcopy_is_tied_and_detached(teacher: ViT, block: str, conditioning: str) -> None:
    surrogate = conditioned(teacher, (3, 1), block=block, conditioning=conditioning)
    images = noise_images(surrogate)
    output = surrogate(images)
    model = copy.deepcopy(surrogate.model)
    assert torch.equal(model(images), output)
    assert [step.tied is model.shared_blocks[j] for step, j in zip(model.blocks, [0, 0, 0, 1])] == [True] * 4
    shake(model.shared_blocks, seed=8)
    assert not torch.allclose(model(images), output)
    assert torch.equal(surrogate(images), output)
    own = {p.data_ptr() for p in surrogate.model.parameters()}
    assert not own & {p.data_ptr() for p in model.parameters()}


@every_kind
def test_building_and_training_leave_the_teacher_alone(teacher: ViT, block: str, conditioning: str, snapshot) -> None:
    next(iter(teacher.model.blocks[1].parameters())).requires_grad_(False)
    teacher.model.head.requires_grad_(False)
    weights, wanted = snapshot(teacher.model), [p.requires_grad for p in teacher.model.parameters()]
    modules = [(n, id(m)) for n, m in teacher.model.named_modules()]
    images = noise_images(teacher)
    with torch.no_grad():
        output = teacher(images)
    surrogate = make_surrogate(teacher, [2, 2], block=block, conditioning=conditioning)
    parameters = [p for p in surrogate.model.parameters() if p.requires_grad]
    assert len(parameters) == len(list(shared_blocks(surrogate).parameters()))
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    surrogate(images).square().sum().backward()
    optimizer.step()
    surrogate.model.train()
    shake(surrogate.model)
    assert same_tensors(weights, teacher.model.state_dict())
    assert [p.requires_grad for p in teacher.model.parameters()] == wanted
    assert all(p.grad is None for p in teacher.model.parameters())
    assert [(n, id(m)) for n, m in teacher.model.named_modules()] == modules
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in teacher.model.modules())
    assert not teacher.model.training
    with torch.no_grad():
        assert torch.equal(teacher(images), output)


def test_moving_the_model_moves_its_shared_blocks(teacher: ViT) -> None:
    surrogate = make_surrogate(teacher, [2, 2])
    surrogate.model.to(torch.float64)
    assert surrogate(noise_images(surrogate).double()).dtype == torch.float64
    surrogate.model.to("meta")
    assert all(p.is_meta for step in surrogate.blocks for p in step.tied.parameters())


# --- a ViT like any other ----------------------------------------------------------------------------------------


@every_kind
@torch.no_grad()
def test_timms_own_api(teacher: ViT, block: str, conditioning: str) -> None:
    surrogate = conditioned(teacher, (3, 1), block=block, conditioning=conditioning)
    model, images = surrogate.model, noise_images(surrogate)
    states, output = surrogate.record(images)
    features = model.forward_features(images)
    assert torch.equal(features, model.norm(states[-1]))
    assert torch.equal(model.forward_head(features), output)
    last, intermediates = model.forward_intermediates(images, return_prefix_tokens=True, output_fmt="NLC")
    assert torch.equal(last, features)
    assert len(intermediates) == 4
    for (patches, prefix), state in zip(intermediates, states[1:]):
        assert torch.equal(torch.cat([prefix, patches], 1), state)
    (two,) = model.get_intermediate_layers(images, n=[1], return_prefix_tokens=False)
    assert torch.equal(two, states[2][:, 3:])


@pytest.mark.parametrize("fixture", ["teacher", "rotary"])
def test_gradient_checkpointing(fixture: str, request) -> None:
    surrogate = conditioned(request.getfixturevalue(fixture), (3, 1))
    images = noise_images(surrogate)

    def gradients() -> list[Tensor]:
        surrogate.model.zero_grad()
        surrogate(images).square().sum().backward()
        return [p.grad.clone() for p in shared_blocks(surrogate).parameters()]

    plain = gradients()
    surrogate.model.set_grad_checkpointing(True)
    surrogate.model.train()  # timm checkpoints while gradients flow
    for a, b in zip(plain, gradients()):
        assert torch.allclose(a, b, atol=1e-5)


@every_kind
@torch.no_grad()
def test_rotary_models(rotary: ViT, block: str, conditioning: str) -> None:
    surrogate = conditioned(rotary, (3, 1), block=block, conditioning=conditioning)
    images = noise_images(surrogate)
    states, output = surrogate.record(images)
    a_0, context = surrogate.embed(images)
    assert all(torch.equal(a, b) for a, b in zip(states, surrogate.unroll(a_0, context)))
    assert torch.equal(surrogate.finish(states[-1]), output)
    assert torch.equal(surrogate.model.forward_head(surrogate.model.forward_features(images)), output)
    _, intermediates = surrogate.model.forward_intermediates(images, output_fmt="NLC")
    assert torch.equal(intermediates[1], states[2][:, 5:])


@torch.no_grad()
def test_interventions_on_a_surrogate(teacher: ViT) -> None:
    surrogate = conditioned(teacher, (3, 1))
    images = noise_images(surrogate)
    states, output = surrogate.record(images)
    _, context = surrogate.embed(images)
    with perturb(surrogate, 1, torch.ones(48), "registers"):
        found, _ = surrogate.record(images)
    assert torch.equal(found[1][:, 1:3], states[1][:, 1:3] + 1)
    assert torch.equal(found[-1], surrogate.unroll(found[1], context, 1)[-1])
    with swap_blocks(surrogate, 1, 4):
        swapped, _ = surrogate.record(images)
    assert torch.equal(swapped[1], surrogate.blocks[3](states[0]))
    assert torch.equal(surrogate(images), output)


@pytest.mark.parametrize("phases", [(4,), (3, 1), (1, 1, 1, 1)])
@every_kind
@torch.no_grad()
def test_open_vit_takes_a_surrogates_model(teacher: ViT, phases, block: str, conditioning: str) -> None:
    surrogate = conditioned(teacher, phases, block=block, conditioning=conditioning)
    view = open_vit(surrogate.model, size=28)
    assert (view.num_layers, view.groups, view.num_classes) == (4, teacher.groups, 5)
    images = noise_images(view)
    assert all(torch.equal(a, b) for a, b in zip(view.record(images)[0], surrogate.record(images)[0]))


@torch.no_grad()
def test_a_depth_for_each_row(teacher: ViT) -> None:
    x = torch.randn(4, 7, 48)
    depths = torch.tensor([3.0, 1.0, 4.0, 3.0])
    for block in BLOCKS:
        for conditioning in CONDITIONINGS:
            tied = shared_blocks(conditioned(teacher, (4,), block=block, conditioning=conditioning))[0]
            rows = tied(x, depths)
            single = torch.cat([tied(x[i : i + 1], depths[i]) for i in range(4)])
            assert torch.allclose(rows, single, atol=1e-5), (block, conditioning)
            differ = not torch.allclose(tied(x, torch.tensor(1.0)), tied(x, torch.tensor(4.0)), atol=1e-3)
            assert differ is (conditioning != "none")


def test_a_depth_for_each_row_with_rotary_arguments(rotary: ViT) -> None:
    surrogate = conditioned(rotary, (4,))
    a_0, context = surrogate.embed(noise_images(surrogate))
    args, kwargs = context.calls[0]
    tied = shared_blocks(surrogate)[0]
    with torch.no_grad():
        rows = tied(a_0, torch.tensor([1.0, 4.0, 2.0]), *args, **kwargs)
        for i, layer in enumerate((1, 4, 2)):
            assert torch.allclose(rows[i], surrogate.step(layer, a_0, context)[i], atol=1e-5)


# --- compile -----------------------------------------------------------------------------------------------------


def compiled_graphs(surrogate: ViT) -> tuple[int, dict[str, int]]:
    """Graphs made while one compiled surrogate runs through its depth twice, and the reasons of graph breaks."""
    images = noise_images(surrogate)
    with torch.no_grad():
        eager = surrogate(images)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        counter = CompileCounter()
        for tied in shared_blocks(surrogate):
            tied.compile(backend=counter)
        with torch._dynamo.config.patch(error_on_recompile=len(surrogate.phases) == 1):
            for _ in range(2):
                assert torch.allclose(surrogate(images), eager, atol=1e-5)
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    torch._dynamo.reset()
    return counter.frame_count, breaks


@every_kind
def test_one_graph_for_twelve_depths(block: str, conditioning: str) -> None:
    teacher = tiny_timm("vit_small_patch14_reg4_dinov2", depth=12)
    surrogate = conditioned(teacher, (12,), block=block, conditioning=conditioning)
    assert compiled_graphs(surrogate) == (1, {})


def test_one_graph_for_twelve_rotary_depths() -> None:
    surrogate = conditioned(tiny_timm("vit_small_patch16_dinov3", depth=12), (12,))
    assert compiled_graphs(surrogate) == (1, {})


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_twelve_phases_stay_under_the_recompile_limit(conditioning: str) -> None:
    """Past the limit a block silently runs uncompiled."""
    teacher = tiny_timm("vit_small_patch14_reg4_dinov2", depth=12)
    surrogate = conditioned(teacher, (1,) * 12, conditioning=conditioning)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        num_graphs, breaks = compiled_graphs(surrogate)
    assert breaks == {}
    assert num_graphs < 8


def test_the_whole_surrogate_compiles_in_one_graph(teacher: ViT) -> None:
    surrogate = conditioned(teacher, (3, 1))
    images = noise_images(surrogate)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(surrogate.model, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(images), surrogate(images), atol=1e-5)
    torch._dynamo.reset()


# --- levels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS)
@torch.no_grad()
def test_any_k(teacher: ViT, block: str) -> None:
    images = noise_images(teacher)
    for k in range(1, 5):
        for cuts in combinations(range(1, 4), k - 1):
            phases = [b - a for a, b in pairwise((0, *cuts, 4))]
            surrogate = make_surrogate(teacher, phases, block=block, conditioning="none")
            assert surrogate.phases == Phases.from_lengths(phases) == surrogate_spec(surrogate).phases
            assert len(shared_blocks(surrogate)) == k
            assert surrogate.num_layers == 4
            single = block_parameters(make_surrogate(teacher, [4], block=block, conditioning="none"))
            assert block_parameters(surrogate) == k * single
            states, output = surrogate.record(images)
            assert len(states) == 5
            assert output.shape == (3, 5)


@pytest.mark.parametrize(
    ("phases", "options", "message"),
    [
        ((2, 3), {}, "do not sum to the 4 blocks"),
        ((), {}, "positive integers"),
        ((4, 0), {}, "positive integers"),
        ((5, -1), {}, "positive integers"),
        ((4,), dict(block="swin"), "teacher, paper"),
        ((4,), dict(conditioning="rope"), "table, mlp, none"),
        ((4,), dict(copy="best"), "middle, first, last"),
    ],
)
def test_wrong_requests(teacher: ViT, phases, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_surrogate(teacher, phases, **options)


def test_a_teacher_is_not_a_surrogate(teacher: ViT) -> None:
    with pytest.raises(ValueError, match="not a surrogate"):
        shared_blocks(teacher)
    with pytest.raises(ValueError, match="not a surrogate"):
        surrogate_spec(teacher)


# --- save and open -----------------------------------------------------------------------------------------------


@every_kind
@torch.no_grad()
def test_round_trip(teacher: ViT, block: str, conditioning: str, tmp_path: Path) -> None:
    surrogate = conditioned(teacher, (3, 1), block=block, conditioning=conditioning, copy="last")
    images = noise_images(surrogate)
    save_vit(surrogate, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    again = open_vit(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.record(images)[0], surrogate.record(images)[0]))
    assert torch.equal(again(images), surrogate(images))
    assert (again.phases, again.groups, again.preprocess) == (Phases((3, 1)), surrogate.groups, surrogate.preprocess)
    assert (again.name, again.num_classes) == (surrogate.name, 5)
    assert surrogate_spec(again) == surrogate_spec(surrogate)
    names = [n for n, p in again.model.named_parameters() if p.requires_grad]
    assert names == [n for n, p in surrogate.model.named_parameters() if p.requires_grad]
    save_vit(again, tmp_path / "twice")
    assert (tmp_path / "twice/config.json").read_bytes() == (tmp_path / "config.json").read_bytes()
    assert (tmp_path / "twice/model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


@torch.no_grad()
def test_round_trip_of_a_rotary_and_of_a_transformers_surrogate(rotary: ViT, tmp_path: Path) -> None:
    shake(transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**AT_16))).save_pretrained(tmp_path / "hub")
    for i, teacher in enumerate((rotary, open_vit(f"hf/{tmp_path}/hub"))):
        surrogate = conditioned(teacher, (3, 1))
        again = open_vit(save_vit(surrogate, tmp_path / str(i)))
        assert torch.equal(again(noise_images(teacher)), surrogate(noise_images(teacher)))


@torch.no_grad()
def test_round_trip_of_a_users_own_module(tmp_path: Path, snapshot) -> None:
    teacher = open_vit(shake(torchvision_vit()))
    surrogate = conditioned(teacher, (3, 1))
    save_vit(surrogate, tmp_path)
    images = noise_images(teacher)
    with pytest.raises(ValueError, match="teacher=") as error:
        open_vit(tmp_path)
    assert "\n" not in str(error.value)
    for module in (torchvision_vit(), open_vit(torchvision_vit()), teacher):
        model = module.model if isinstance(module, ViT) else module
        before = snapshot(model)
        again = open_vit(tmp_path, teacher=module)
        assert torch.equal(again(images), surrogate(images))
        assert again.phases == Phases((3, 1))
        assert same_tensors(before, model.state_dict())
    wrong = timm.create_model("vit_tiny_patch16_224", depth=4, img_size=32, embed_dim=48, num_heads=3)
    with pytest.raises(ValueError):
        open_vit(tmp_path, teacher=wrong)


def test_broken_folders(teacher: ViT, tmp_path: Path) -> None:
    save_vit(make_surrogate(teacher, [2, 2]), tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    text, content = config.read_text(), weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="whole safetensors"):
        open_vit(tmp_path)
    weights.write_bytes(content)
    config.write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match=r"config\.json"):
        open_vit(tmp_path)
    config.write_text(json.dumps(json.loads(text) | {"surrogate": dict(phases=[4])}))
    with pytest.raises(ValueError, match=r"unexpected: shared_blocks\.1"):
        open_vit(tmp_path)
    config.write_text(json.dumps(json.loads(text) | {"format": "raptor-vit/99"}))
    with pytest.raises(ValueError, match="raptor-vit/99"):
        open_vit(tmp_path)
    config.write_text(text)
    weights.unlink()
    with pytest.raises(ValueError, match="does not exist"):
        open_vit(tmp_path)


@every_kind
def test_a_surrogate_of_a_surrogate(teacher: ViT, block: str, conditioning: str, tmp_path: Path) -> None:
    inner = conditioned(teacher, (2, 2), block="teacher", conditioning="table")
    images = noise_images(teacher)
    exact = make_surrogate(inner, [1, 1, 1, 1], conditioning="none")
    with torch.no_grad():
        assert torch.equal(exact(images), inner(images))
    outer = make_surrogate(inner, [3, 1], block=block, conditioning=conditioning)
    with torch.no_grad():
        inner_output = inner(images)
    optimizer = torch.optim.SGD([p for p in outer.model.parameters() if p.requires_grad], lr=0.01)
    before = outer(images)
    before.square().sum().backward()
    weights = [n for n, p in shared_blocks(outer).named_parameters() if p.grad is not None]
    assert [n for n in weights if n.startswith("0.block.")], "the copied block has no weights to train"
    optimizer.step()
    with torch.no_grad():
        assert not torch.equal(outer(images), before)
        assert torch.equal(inner(images), inner_output)
        again = open_vit(save_vit(outer, tmp_path))
        assert torch.equal(again(images), outer(images))


@pytest.mark.parametrize("name", TEACHERS)
def test_paper_block_has_the_teachers_heads(name: str) -> None:
    surrogate = make_surrogate(TEACHERS[name](), [4], block="paper", conditioning="mlp")
    assert shared_blocks(surrogate)[0].block.num_heads == 3


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
    scaled = _film(torch.ones(1, 1, 4).bfloat16(), torch.full((4,), 1.001), torch.full((4,), 1e-4))
    assert torch.allclose(scaled, torch.full((1, 1, 4), 1.0011), atol=1e-6)


def test_moving_a_view_moves_the_tensors_of_its_calls(teacher: ViT) -> None:
    teacher = dataclasses.replace(teacher, forward_kwargs={"noise": torch.zeros(1, 4), "ratio": 0})
    surrogate = make_surrogate(teacher, [4], block="paper", conditioning="mlp")
    surrogate.to("meta")
    assert surrogate.forward_kwargs["noise"].device.type == "meta" and surrogate.forward_kwargs["ratio"] == 0
    assert teacher.forward_kwargs["noise"].device.type == "cpu"


class Homemade(nn.Module):
    """A model nobody has heard of, over torch's own encoder layer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 8, 8)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True) for _ in range(4)
        )
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 5)

    def forward(self, images):
        x = self.stem(images).flatten(2).transpose(1, 2)
        for layer in self.encoder.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


def test_torchs_own_layer_is_modulated_also_on_its_fast_path():
    torch.manual_seed(0)
    vit = open_vit(Homemade(), blocks="encoder.layers", cls=0, registers=0, size=32)
    surrogate = make_surrogate(vit, (2, 2))
    with torch.no_grad():
        for block in surrogate.model.shared_blocks:
            block.conditioning.rows.normal_(std=0.3)
    images = noise_images(vit)
    with_gradient = surrogate(images)
    with torch.no_grad():
        without = surrogate(images)
    assert torch.allclose(with_gradient, without, atol=1e-5)
    plain = make_surrogate(vit, (2, 2))
    assert not torch.allclose(plain(images), with_gradient, atol=1e-2)
