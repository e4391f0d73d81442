"""The fast views of blocks against the blocks as they are written, and the switch between them."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from tiny_models import noise_images, tiny_timm
from tiny_run import tiny_teacher
from tiny_surrogates import TEACHERS, conditioned
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from raptor.certificate.complexity import count_flops
from raptor.surrogate.fast import FastBlock, RoundedCopies, layer_calls
from raptor.surrogate.surrogate import make_surrogate, shared_blocks
from raptor.vit.open import open_vit
from raptor.vit.view import ViT


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
    infer, taken = FastBlock.infer, []
    with monkeypatch.context() as patch:
        patch.setattr(FastBlock, "infer", lambda self, *args: taken.append(True) or infer(self, *args))
        without, with_gradient = both_ways(surrogate, num)
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if surrogate.dtype == torch.float64 else {}
    torch.testing.assert_close(without, with_gradient, **tolerance)
    return taken


KINDS = {
    "no LayerScale": ("clip", {}, True),
    "LayerScale": ("dinov2-registers", {}, True),
    "mlp": ("dinov2-registers", {"conditioning": "mlp"}, True),
    "adapters": ("dinov2-registers", {"adapters": 2}, True),
    "adapters of the MLP": ("dinov2-registers", {"adapters": 2, "adapted": "mlp"}, True),
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


@pytest.mark.parametrize("conditioning", ["none", "mlp", "table"])
def test_layers_of_all_depths_are_those_of_each(conditioning):
    tied = shared_blocks(make_surrogate(tiny_teacher(), (4,), block="paper", conditioning=conditioning))[0].double()
    for parameter in tied.parameters():
        torch.nn.init.normal_(parameter)
    depth_n = torch.arange(1.0, 5.0, dtype=torch.float64)
    calls = layer_calls(tied, tied.fast, depth_n)
    x_btd = torch.randn(2, 5, tied.block.qkv.in_features, dtype=torch.float64)
    for n in range(4):
        expected = tied.block(x_btd, tied.modulation(depth_n[n : n + 1]))
        torch.testing.assert_close(tied.fast(x_btd, None, **calls[n].kwargs), expected, rtol=1e-10, atol=1e-10)


def test_gradients_of_tied_layers_add_up_in_fp32():
    tied = shared_blocks(make_surrogate(tiny_teacher(), (4,), block="paper", conditioning="none"))[0]
    with torch.autocast("cpu", torch.bfloat16):
        calls = layer_calls(tied, tied.fast, torch.arange(1.0, 4.0))
    tensors = [tensor for call in calls for layer in call.kwargs["folded"].layers for tensor in layer]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    weight = torch.randn(6, 5, requires_grad=True)
    small = 2.0**-9  # lost beside 1 in bf16
    copies = RoundedCopies.apply(3, torch.bfloat16, weight)
    torch.autograd.backward(copies, [torch.full((6, 5), g, dtype=torch.bfloat16) for g in (1.0, small, small)])
    torch.testing.assert_close(weight.grad, torch.full((6, 5), 1 + 2 * small), rtol=0, atol=0)
