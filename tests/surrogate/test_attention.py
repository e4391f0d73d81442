"""Attention over packed queries, keys and values against its formula; the kernels' shapes and tiles."""

from __future__ import annotations

import pytest
import torch

from raptor.surrogate.attention import _tail, attend, attention, attention_backward


@pytest.mark.parametrize("fused", [False, True])
def test_without_a_gpu_it_is_softmax_attention(fused):
    qkv = torch.randn(2, 5, 3 * 8, generator=torch.Generator().manual_seed(0))
    out = attend(qkv, 2, fused)
    for image, head in ((0, 0), (1, 1)):
        q, k, v = qkv[image].view(5, 3, 2, 4)[:, :, head].unbind(1)
        expected = torch.softmax(q @ k.T / 2, dim=-1) @ v
        torch.testing.assert_close(out[image, :, 4 * head : 4 * head + 4], expected)


def test_the_shapes_are_known_to_the_compiler():
    qkv, grad = (torch.empty(2, 7, f, dtype=torch.bfloat16, device="meta") for f in (96, 32))
    out, lse = attention(qkv, 2)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 7, 32), torch.bfloat16, (2, 2, 7), torch.float32)
    assert attention_backward(qkv, grad, lse, lse).shape == qkv.shape


@pytest.mark.parametrize(("num_tokens", "size"), [(261, 16), (256, 0), (197, 128), (145, 32), (5, 16)])
def test_what_whole_tiles_leave_is_a_smaller_power_of_two(num_tokens, size):
    assert _tail(num_tokens, 128) == size
