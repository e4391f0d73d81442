"""Low-rank adapters per depth: where they start, what they cost, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import noise_images, tiny_timm
from tiny_surrogates import TEACHERS, conditioned
from torch import nn
from torch._dynamo.testing import CompileCounter

from raptor.certificate.complexity import count_flops, levin_bound
from raptor.surrogate.adapters import DepthAdapters, adapt, at_each_depth
from raptor.surrogate.surrogate import block_parameters, make_surrogate, shared_blocks
from raptor.vit.open import open_vit
from raptor.vit.saved import save_vit
from raptor.vit.view import ViT

NAMES = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")


@pytest.mark.parametrize("conditioning", ["table", "none"])
@torch.no_grad()
def test_a_plain_start_is_the_copied_block(teacher: ViT, conditioning: str) -> None:
    images = noise_images(teacher)
    tied, adapted = (
        make_surrogate(teacher, (3, 1), conditioning=conditioning, adapters=rank).record(images)[0] for rank in (0, 5)
    )
    for state, own in zip(adapted, tied, strict=True):
        torch.testing.assert_close(state, own, rtol=1e-5, atol=1e-5 * own.abs().max().item())


def test_parameters_and_operations_are_counted(teacher: ViT) -> None:
    plain, adapted = (make_surrogate(teacher, (3, 1), adapters=rank) for rank in (0, 5))
    shapes = [teacher.blocks[0].get_submodule(name).weight.shape for name in NAMES]
    added = sum(4 * (5 * (num_in + num_out) + num_out) for num_out, num_in in shapes)
    assert block_parameters(adapted) - block_parameters(plain) == added
    assert levin_bound(adapted).num_parameters == block_parameters(adapted)
    bits = levin_bound(adapted, "int8").weight_bits - levin_bound(plain, "int8").weight_bits
    assert bits == 8 * added + 32 * len(shapes) * (4 * 5 + 4 * 5 + 4)  # a scale for each row
    products = sum(4 * 2 * 5 * num_out * num_in for num_out, num_in in shapes)
    assert count_flops(adapted) - count_flops(plain) == products


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_layer_adds_the_product_of_its_depth(bias: bool) -> None:
    block = nn.Sequential(nn.Linear(6, 5, bias=bias)).double()
    (layer,) = layers = adapt(block, ["0"])
    adapters = DepthAdapters(layers, 2, 3, 5).double()
    for parameter in adapters.parameters():
        nn.init.normal_(parameter)
    x, adapter = torch.randn(3, 4, 6, dtype=torch.float64), adapters.matrices[0]
    weights = adapters(layers, torch.tensor([3.0, 4.0, 5.0]))
    layer.now = weights[0]
    together = block(x)
    for i, own in enumerate(at_each_depth(weights)):
        rows = slice(2 * i, 2 * i + 2)
        expected = nn.functional.linear(x[i], layer.weight, layer.bias)
        expected += x[i] @ adapter.down[rows].T @ adapter.up[rows] + (adapter.bias[i] if bias else 0)
        layer.now = own[0]
        torch.testing.assert_close(block(x[i]), expected)
        torch.testing.assert_close(together[i], expected)


@torch.no_grad()
def test_depths_in_one_call_are_those_of_each_and_the_last_is_held(teacher: ViT) -> None:
    tied = shared_blocks(conditioned(teacher, (4,), adapters=2))[0]
    x = torch.randn(4, 6, teacher.dim)
    together = tied(x, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    alone = [tied(x[i : i + 1], torch.tensor(i + 1.0)) for i in range(4)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(tied(x, torch.tensor(3.0)), tied(x, torch.tensor(4.0)), atol=1e-3)
    assert torch.equal(tied(x, torch.tensor(9.0)), tied(x, torch.tensor(4.0)))
    assert all(layer.now is None for layer in tied.block.layers)


@pytest.mark.parametrize("conditioning", ["table", "mlp", "none"])
def test_every_adapter_can_learn(teacher: ViT, conditioning: str) -> None:
    surrogate = make_surrogate(teacher, (4,), conditioning=conditioning, adapters=2)
    surrogate(noise_images(surrogate)).square().sum().backward()
    for name, parameter in shared_blocks(surrogate)[0].adapters.named_parameters():
        rows = parameter.grad.unflatten(0, (4, -1)).flatten(1)
        assert (rows.norm(dim=1) > 0).all() or name.endswith("down"), name


@torch.no_grad()
def test_adapters_of_the_mlp_leave_attention_tied(teacher: ViT, tmp_path: Path) -> None:
    surrogate = conditioned(teacher, (3, 1), adapters=2, adapted="mlp")
    tied = shared_blocks(surrogate)[0]
    assert tied.block.adapted == ["mlp.fc1", "mlp.fc2"]
    hidden = 4 * teacher.dim
    # Two factors of rank 2 for each of the two matrices, and a bias for each: of each of the phase's three depths.
    own = 2 * 2 * (teacher.dim + hidden) + hidden + teacher.dim
    assert sum(parameter.numel() for parameter in tied.adapters.parameters()) == 3 * own
    save_vit(surrogate, tmp_path)
    images = noise_images(teacher)
    assert torch.equal(open_vit(tmp_path)(images), surrogate(images))


def test_one_graph_for_twelve_depths() -> None:
    surrogate = conditioned(tiny_timm("vit_small_patch14_reg4_dinov2", depth=12), (12,), adapters=2)
    images, counter = noise_images(surrogate), CompileCounter()
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        eager = surrogate(images)
        torch._dynamo.reset()
        shared_blocks(surrogate)[0].compile(backend=counter, fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(surrogate(images), eager, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(adapters=2, block="paper"), "take --block teacher"),
        (dict(adapted="mlp"), "give --adapters, such as 16"),
        (dict(adapters=2, adapted="attention"), "unknown adapted 'attention': choose from all, mlp"),
        (dict(adapters=49), "rank 49 are larger than the matrices of .*: at most 48"),
        (dict(adapters=-1), "a rank of 0 or more, got -1"),
        (dict(adapters="8"), "a rank of 0 or more, got '8'"),
    ],
)
def test_wrong_requests(teacher: ViT, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_surrogate(teacher, (3, 1), **options)


def test_blocks_whose_matrices_are_no_linear_layers_are_refused() -> None:
    teacher = TEACHERS["torchvision"]()
    with pytest.raises(ValueError, match="leave out --adapters") as error:
        make_surrogate(teacher, (3, 1), adapters=2)
    assert "\n" not in str(error.value)
