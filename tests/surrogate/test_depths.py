"""The layers of a phase made at once, against each depth on its own, and the sum of their gradients."""

from __future__ import annotations

import pytest
import torch
from tiny_run import tiny_teacher

from raptor.surrogate.depths import Spread, layer_calls
from raptor.surrogate.surrogate import make_surrogate, shared_blocks


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
    copies = Spread.apply(3, torch.bfloat16, weight)
    torch.autograd.backward(copies, [torch.full((6, 5), g, dtype=torch.bfloat16) for g in (1.0, small, small)])
    torch.testing.assert_close(weight.grad, torch.full((6, 5), 1 + 2 * small), rtol=0, atol=0)
