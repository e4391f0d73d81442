"""The blocks of a surrogate: the paper's against its formula, the copied ones against the teacher's."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
import transformers
from families import masked
from tiny_models import noise_images, shake, tiny_timm
from tiny_surrogates import AT_16, CONDITIONINGS, TEACHERS, conditioned
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from raptor.fidelity.complexity import count_flops
from raptor.open import open_vit
from raptor.surrogate.blocks import CopiedBlock, DepthMLP, Modulation, PaperBlock, _film
from raptor.surrogate.surrogate import block_parameters, make_surrogate, shared_blocks
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


@pytest.mark.parametrize(("which", "layers"), [("first", (1, 4)), ("middle", (2, 4)), ("last", (3, 4))])
@torch.no_grad()
def test_which_block_is_copied(teacher: ViT, which: str, layers: tuple[int, int]) -> None:
    surrogate = make_surrogate(teacher, [3, 1], conditioning="none", copy=which)
    x = torch.randn(2, 7, 48)
    for tied, layer in zip(shared_blocks(surrogate), layers):
        assert torch.equal(tied(x, torch.tensor(1.0)), teacher.blocks[layer - 1](x))


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


BY_PLACE = ("dinov3", "eva02", "rope-mixed", "beit", "hf-dinov3")  # rotary embeddings, or a bias by relative position


@pytest.mark.parametrize("name", TEACHERS)
def test_paper_block_has_the_teachers_heads_or_is_refused(name: str) -> None:
    if name in BY_PLACE:
        with pytest.raises(ValueError, match=r"use the places of patches .* take --block teacher"):
            make_surrogate(TEACHERS[name](), [4], block="paper", conditioning="mlp")
        return
    surrogate = make_surrogate(TEACHERS[name](), [4], block="paper", conditioning="mlp")
    assert shared_blocks(surrogate)[0].block.num_heads == 3


def test_paper_block_is_refused_for_masks_on_any_block() -> None:
    teacher = open_vit(masked(2, 4, 5), size=32)
    with pytest.raises(ValueError, match="use the places of patches"):
        make_surrogate(teacher, [3, 3], block="paper", conditioning="mlp")


@torch.no_grad()
def test_a_branch_that_adds_the_state_itself_is_not_scaled_with_it() -> None:
    """DPT's second branch ends in a module that returns the sum: the block is then modulated as a whole."""
    config = transformers.DPTConfig(
        **AT_16, is_hybrid=False, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8] * 4
    )
    teacher = open_vit(transformers.DPTModel(config), size=32)
    block = shared_blocks(make_surrogate(teacher, [teacher.num_layers]))[0].block
    assert isinstance(block, CopiedBlock)
    x_btd, context = teacher.embed(noise_images(teacher))
    one, none = torch.ones(teacher.dim), torch.zeros(teacher.dim)
    args, kwargs = context.calls[0]
    still = Modulation(t1=none, t2=none, t3=one, scale1=one, shift1=none, scale2=one, shift2=none, shift3=none)
    assert torch.equal(block(x_btd, still, *args, **kwargs), x_btd)


@torch.no_grad()
def test_permuted_patches_tell_a_rotary_model_and_its_surrogate_apart_from_a_plain_one() -> None:
    """With the arguments of the blocks kept, a block that knows places does not follow a permutation of the patches."""
    for name, by_place in (("vit_small_patch16_dinov3", True), ("vit_small_patch14_dinov2", False)):
        vit = make_surrogate(tiny_timm(name), [4])
        x_btd, context = vit.embed(noise_images(vit))
        order = torch.arange(x_btd.shape[1])
        order[vit.groups.slice("patches")] = order[vit.groups.slice("patches")].roll(1)
        moved, plain = vit.unroll(x_btd[:, order], context)[-1], vit.unroll(x_btd, context)[-1][:, order]
        assert torch.allclose(moved, plain, atol=1e-4) is not by_place


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


class _Tempered(nn.Module):
    """Attention with a temperature that has to be large."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.qkv, self.proj = inner.qkv, inner.proj
        self.num_heads = inner.num_heads
        self.temperature = nn.Parameter(torch.tensor(11.0))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, **_kwargs: object) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / (self.temperature.abs() - 10).sqrt()).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


def test_a_block_that_cannot_be_compared_is_not_taken_for_a_plain_one():
    """With random weights it gives NaN, and no comparison with NaN is true."""
    vit = tiny_timm()
    for block in vit.model.blocks:
        block.attn = _Tempered(block.attn)
    surrogate = make_surrogate(vit, (2, 2))
    images = noise_images(vit)
    with_gradient = surrogate(images)
    with torch.no_grad():
        assert torch.allclose(surrogate(images), with_gradient, atol=1e-5)


def both_ways(surrogate: ViT, num: int = 3) -> tuple[Tensor, Tensor]:
    """The output without a gradient and with one."""
    images = noise_images(surrogate, num).to(surrogate.dtype)
    with torch.no_grad():
        without = surrogate(images)
    return without, surrogate(images).detach()


def folds(surrogate: ViT, monkeypatch: pytest.MonkeyPatch, num: int = 3) -> list[bool]:
    """Compares both ways; whether each layer without a gradient took the short one."""
    infer, taken = PaperBlock.infer, []
    with monkeypatch.context() as patch:
        patch.setattr(PaperBlock, "infer", lambda self, *args: taken.append(True) or infer(self, *args))
        without, with_gradient = both_ways(surrogate, num)
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if surrogate.dtype == torch.float64 else {}
    torch.testing.assert_close(without, with_gradient, **tolerance)
    return taken


KINDS = {
    "no LayerScale": ("clip", {}, True),
    "LayerScale": ("dinov2-registers", {}, True),
    "mlp": ("dinov2-registers", {"conditioning": "mlp"}, True),
    "adapters": ("dinov2-registers", {"adapters": 2}, True),
    "only adapters": ("clip", {"adapters": 2, "conditioning": "none"}, True),
    "paper, table": ("clip", {"block": "paper"}, True),
    "paper, mlp": ("clip", {"block": "paper", "conditioning": "mlp"}, True),
    "paper, none": ("clip", {"block": "paper", "conditioning": "none"}, True),
    "rotary": ("dinov3", {}, False),
    "SwiGLU": ("swiglu-giant", {}, False),
    "position bias": ("beit", {}, False),
    "transformers": ("hf-vit", {}, False),
    "torchvision": ("torchvision", {}, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_gradient_the_states_are_the_same(kind: str, monkeypatch) -> None:
    """Of one image and of many: either a layer's output is scaled or its weights, whichever is smaller."""
    name, options, short = KINDS[kind]
    surrogate = conditioned(TEACHERS[name](), (3, 1), **options)
    surrogate.model.double()
    for num in (1, 48):
        assert folds(surrogate, monkeypatch, num) == [True] * (4 * short)


class StatePasses(TorchDispatchMode):
    """Counts the operations that write a tensor of a state's size or a larger one; views write nothing."""

    def __init__(self, num_elements: int):
        super().__init__()
        self.num_elements, self.count = num_elements, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple) else out
        self.count += isinstance(first, Tensor) and not func.is_view and first.numel() >= self.num_elements
        return out


@pytest.mark.parametrize("name", ["clip", "dinov2-registers"])
@torch.no_grad()
def test_a_forward_pass_does_no_more_than_the_teachers(name: str) -> None:
    teacher = TEACHERS[name]()
    surrogate = conditioned(teacher, (3, 1))
    images = torch.randn(64, 3, teacher.preprocess.size, teacher.preprocess.size)  # states larger than the weights
    counts = []
    for vit in (surrogate, teacher):
        states, _ = vit.record(images)
        with StatePasses(states[0].numel()) as passes:
            vit(images)
        counts.append(passes.count)
    assert 4 * 8 < counts[0] <= counts[1]
    assert count_flops(surrogate) == count_flops(teacher)


@pytest.mark.parametrize("name", ["clip", "dinov2-registers"])
@torch.no_grad()
def test_few_small_operations_come_with_a_depth(name: str) -> None:
    """A row of the table is looked up in five, and goes into norms, weights and biases in eight or nine."""
    teacher = TEACHERS[name]()
    surrogate = conditioned(teacher, (3, 1))
    images = torch.randn(64, 3, teacher.preprocess.size, teacher.preprocess.size)
    counts = []
    for vit in (surrogate, teacher):
        with StatePasses(0) as operations:
            vit(images)
        counts.append(operations.count)
    assert counts[0] - counts[1] <= 14 * 4


def test_changed_weights_count_at_once(teacher: ViT, monkeypatch) -> None:
    """Also those that change without autograd's knowledge, are exchanged, or are those of a copy."""
    surrogate = conditioned(teacher, (3, 1))
    block = shared_blocks(surrogate)[0].block.block
    seen = [both_ways(surrogate)[0]]

    def check(vit: ViT = surrogate) -> None:
        assert folds(vit, monkeypatch) == [True] * 4
        seen.append(both_ways(vit)[0])
        assert not torch.allclose(seen[-1], seen[-2].to(seen[-1].dtype), atol=1e-6)

    with torch.no_grad():
        block.attn.proj.weight.mul_(1.5)
    check()
    for path in ("norm1.inner.weight", "ls1.inner.gamma", "mlp.fc2.weight"):
        block.get_parameter(path).data.mul_(1.5)
        check()
    halved = {name: value / 2 for name, value in surrogate.model.state_dict().items()}
    surrogate.model.load_state_dict(halved, assign=True)
    check()
    other = dataclasses.replace(surrogate, model=copy.deepcopy(surrogate.model))
    shared_blocks(other)[0].conditioning.rows.data.add_(0.3)
    check(other)
    assert torch.equal(both_ways(surrogate)[0], seen[-2])
    other.model.double()
    seen[-1] = seen[-1] + 1
    check(other)


def test_a_block_that_was_changed_runs_as_it_is(teacher: ViT, monkeypatch) -> None:
    surrogate = conditioned(teacher, (3, 1))
    first, second = (tied.block.block for tied in shared_blocks(surrogate))
    called: list[nn.Module] = []
    hook = first.attn.register_forward_hook(lambda module, *_: called.append(module))
    assert folds(surrogate, monkeypatch) == [True] and len(called) == 2 * 3
    hook.remove()
    assert folds(surrogate, monkeypatch) == [True] * 4
    second.mlp.act = nn.ReLU()
    assert folds(surrogate, monkeypatch) == [True] * 3
    tied, x_btd = shared_blocks(surrogate)[0], torch.randn(2, 7, 48)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    with_gradient = tied(x_btd, torch.tensor(1.0), attn_mask=mask)
    with torch.no_grad():
        torch.testing.assert_close(tied(x_btd, torch.tensor(1.0), attn_mask=mask), with_gradient)
        assert not torch.allclose(tied(x_btd, torch.tensor(1.0)), with_gradient, atol=1e-3)


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
