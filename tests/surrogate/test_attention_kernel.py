"""The kernels of raptor.surrogate.attention_kernel against torch's attention, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

KERNEL = """
import torch
from raptor.surrogate import attention
attention.FORWARD, attention.BACKWARD = (32, 16, 4, 1), (32, 16, 4, 1)
generator = torch.Generator().manual_seed(0)
for dtype, rtol in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
    for num_tokens in (37, 64, 5, 48):
        qkv, grad = (torch.randn(2, num_tokens, f, generator=generator) for f in (3 * 32, 32))
        theirs, ours = qkv.to(dtype).double().requires_grad_(), qkv.to(dtype).requires_grad_()
        out, _ = attention.attention(ours, 2)
        exact = attention.attend(theirs, 2)
        out.backward(grad.to(dtype))
        exact.backward(grad.to(dtype).double())
        for a, b in ((out, exact), *zip(ours.grad.chunk(3, -1), theirs.grad.chunk(3, -1))):
            assert a.dtype == dtype
            assert (a.double() - b).norm() <= rtol * b.norm(), (dtype, num_tokens, float((a.double() - b).norm() / b.norm()))
print("same")
"""  # noqa: E501


def test_the_kernels_give_torchs_attention_and_its_gradient() -> None:
    """Sequences that fill whole tiles, that leave a smaller one, and shorter than any.

    In fp16, because the interpreter does not multiply in bf16.
    """
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "same", done.stderr[-2000:]
