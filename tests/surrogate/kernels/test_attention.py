"""Attention over packed queries, keys and values against its formula; where our kernels are used instead."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from raptor.surrogate.fast import attend
from raptor.surrogate.kernels import attention as module
from raptor.surrogate.kernels.attention import (
    _tail,
    attention,
    attention_backward,
    kernel_is_right,
    takes_kernel,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    kernel_is_right.cache_clear()
    yield
    kernel_is_right.cache_clear()


@pytest.mark.parametrize("kernel", [False, True])
def test_in_fp32_it_is_softmax_attention(kernel: bool) -> None:
    qkv = torch.randn(2, 5, 3 * 8, generator=torch.Generator().manual_seed(0))
    out = attend(qkv, 2, kernel)
    for image, head in ((0, 0), (1, 1)):
        q, k, v = qkv[image].view(5, 3, 2, 4)[:, :, head].unbind(1)
        expected = torch.softmax(q @ k.T / 2, dim=-1) @ v
        torch.testing.assert_close(out[image, :, 4 * head : 4 * head + 4], expected)


def test_the_shapes_are_known_to_the_compiler() -> None:
    qkv, grad = (torch.empty(2, 7, f, dtype=torch.bfloat16, device="meta") for f in (96, 32))
    out, lse = attention(qkv, 2)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 7, 32), torch.bfloat16, (2, 2, 7), torch.float32)
    assert attention_backward(qkv, grad, lse, lse).shape == qkv.shape


@pytest.mark.parametrize(("num_tokens", "size"), [(261, 16), (256, 0), (197, 128), (145, 32), (5, 16)])
def test_what_whole_tiles_leave_is_a_smaller_power_of_two(num_tokens: int, size: int) -> None:
    assert _tail(num_tokens, 128) == size


class StandIn:
    """A kernel by torch, with its output and the gradient of one of queries, keys and values multiplied."""

    def __init__(self, output: float = 1.0, gradient: float = 1.0, part: int = 0):
        self.output, self.gradient, self.part, self.num_calls = output, gradient, part, 0

    def __call__(self, qkv_btf: Tensor, num_heads: int) -> tuple[Tensor, None]:
        self.num_calls += 1
        qkv_btf = qkv_btf.clone()
        factor = torch.ones(3, 1)
        factor[self.part] = self.gradient
        qkv_btf.register_hook(lambda grad: (grad.unflatten(-1, (3, -1)) * factor).flatten(-2).to(grad.dtype))
        return self.output * attend(qkv_btf, num_heads, kernel=False), None


def test_a_right_kernel_is_compared_once_for_each_shape(monkeypatch: Any, capsys: Any) -> None:
    kernel = StandIn()
    monkeypatch.setattr(module, "attention", kernel)
    before = torch.get_rng_state()
    for num_tokens in (17, 17, 9, 17):
        assert kernel_is_right(CPU, num_tokens, 2, 32)
    assert kernel.num_calls == 2
    assert capsys.readouterr().err == ""
    assert torch.equal(torch.get_rng_state(), before)  # images are drawn as without it


@pytest.mark.parametrize("factor", [1.05, float("nan")])
@pytest.mark.parametrize("wrong", ["output", "queries", "keys", "values"])
def test_a_wrong_kernel_is_not_used_and_said_once(monkeypatch: Any, capsys: Any, wrong: str, factor: float) -> None:
    parts = ["queries", "keys", "values"]
    kernel = StandIn(factor) if wrong == "output" else StandIn(gradient=factor, part=parts.index(wrong))
    monkeypatch.setattr(module, "attention", kernel)
    assert not kernel_is_right(CPU, 17, 2, 32) and not kernel_is_right(CPU, 17, 2, 32)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("our attention kernel is not used for 17 tokens and 2 heads of 32, torch's is: it is off")


def test_a_kernel_that_cannot_run_is_not_used(capsys: Any) -> None:
    """As here: there is no GPU below a tensor of the CPU."""
    assert not kernel_is_right(CPU, 17, 2, 32)
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"device": CPU}, False),
        ({"capability": (8, 0)}, False),
        ({"capability": (10, 0)}, False),
        ({"cuda": None}, False),  # ROCm
        ({"triton": False}, False),
        ({"head_dim": 32}, True),
        ({"head_dim": 128}, False),
        ({"num_tokens": 1370}, False),
        ({"right": False}, False),
    ],
)
def test_where_it_is_taken(monkeypatch: Any, changes: dict[str, Any], expected: bool) -> None:
    given = {"device": GPU, "capability": (9, 0), "cuda": "13.0", "triton": True, "head_dim": 64, "num_tokens": 261}
    case = SimpleNamespace(**{**given, "right": True, **changes})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: case.capability)
    monkeypatch.setattr(torch.version, "cuda", case.cuda)
    monkeypatch.setattr(module, "HAS_TRITON", case.triton)
    monkeypatch.setattr(module, "kernel_is_right", lambda *shape: case.right and shape[1:] == (261, 6, case.head_dim))
    assert takes_kernel(case.device, case.num_tokens, 6, case.head_dim) is expected
