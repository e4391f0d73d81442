"""The kernels of raptor.surrogate.kernels.attention_triton against torch's attention, in Triton's interpreter."""

from __future__ import annotations

from interpreted import check_interpreted

KERNEL = """
import torch
from raptor.surrogate.kernels import attention

generator = torch.Generator().manual_seed(0)
small, product = ((32, 16, 4, 1), (32, 16, 4, 1)), (attention.FORWARD, attention.BACKWARD)
cases = [(small, torch.float32, 2, 2, 16, t) for t in (5, 37, 48, 64)]
cases += [(product, torch.float16, 1, 1, dim, t) for dim, t in ((64, 17), (64, 129), (32, 197), (64, 261))]
for (attention.FORWARD, attention.BACKWARD), dtype, images, heads, dim, num_tokens in cases:
    qkv, grad = (torch.randn(images, num_tokens, f * heads * dim, generator=generator).to(dtype) for f in (3, 1))
    theirs, ours = qkv.double().requires_grad_(), qkv.clone().requires_grad_()
    out, _ = attention.attention(ours, heads)
    exact = attention.attend(theirs, heads)
    out.backward(grad)
    exact.backward(grad.double())
    for a, b in ((out, exact), *zip(ours.grad.chunk(3, -1), theirs.grad.chunk(3, -1))):
        error = float((a.double() - b).norm() / b.norm())
        assert a.dtype == dtype and error <= (1e-5 if dtype == torch.float32 else 2e-3), (dtype, dim, num_tokens, error)
"""


def test_the_kernels_give_torchs_attention_and_its_gradient() -> None:
    """Sequences that fill whole tiles, that leave a smaller one, and shorter than any; with small tiles and ours.

    In fp16, because the interpreter does not multiply in bf16.
    """
    check_interpreted(KERNEL)
