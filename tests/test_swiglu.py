"""SwiGLU and its one-kernel gradient against autograd of the formula."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raptor.swiglu import swiglu


def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    p, q = F.linear(x, weight, bias).chunk(2, dim=-1)
    return F.silu(p) * q


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 5, 8), (12, 8), (12,)
    return [torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def test_value_and_gradients_are_those_of_the_formula() -> None:
    grad = torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for function in (swiglu, plain):
        given = inputs()
        out = function(*given)
        out.backward(grad)
        results.append([out.detach(), *(x.grad for x in given)])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(swiglu, inputs())


def test_without_gradients_it_is_the_same() -> None:
    given = inputs(torch.float32)
    with torch.no_grad():
        alone = swiglu(*given)
    torch.testing.assert_close(alone, swiglu(*given).detach())


def test_bf16_states_have_fp32_inside() -> None:
    given = inputs(torch.bfloat16)
    out = swiglu(*given)
    out.float().square().sum().backward()
    assert out.dtype == given[0].grad.dtype == given[2].grad.dtype == torch.bfloat16
    exact = [x.detach().float().requires_grad_() for x in given]
    plain(*exact).square().sum().backward()
    for ours, theirs in zip(given, exact):
        assert F.cosine_similarity(ours.grad.float().flatten(), theirs.grad.flatten(), dim=0) > 0.999


KERNEL = """
import torch
from raptor.swiglu import launch, swiglu_backward
generator = torch.Generator().manual_seed(0)
for num_rows, num_columns in ((64, 256), (100, 300), (3, 40)):
    grad, z, bias = (torch.randn(*s, generator=generator) for s in ((num_rows, num_columns), (num_rows, 2 * num_columns), (2 * num_columns,)))
    (dz, sums), (expected, total) = launch(grad, z, bias), swiglu_backward(grad, z, bias)
    torch.testing.assert_close(dz, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.sum(0, keepdim=True), total, rtol=1e-4, atol=1e-4)
print("same")
"""  # noqa: E501


def test_the_gpu_kernel_gives_the_same() -> None:
    """Run by Triton's interpreter on the CPU, with rows and columns that fill its tiles and that do not."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "same", done.stderr[-2000:]
