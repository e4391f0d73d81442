"""Layers folded for all depths of a phase are those of each depth; their gradients add up in fp32."""

from __future__ import annotations

import pytest
import torch
from tiny_run import tiny_teacher

from raptor.surrogate.blocks import Modulation
from raptor.surrogate.folding import FoldedDepths, Spread
from raptor.surrogate.surrogate import make_surrogate, shared_blocks


@pytest.mark.parametrize("conditioning", ["none", "mlp", "table"])
def test_layers_of_all_depths_are_those_of_each(conditioning):
    tied = shared_blocks(make_surrogate(tiny_teacher(), (4,), block="paper", conditioning=conditioning))[0].double()
    for parameter in tied.parameters():
        torch.nn.init.normal_(parameter)
    depths = torch.arange(1.0, 5.0, dtype=torch.float64)

    def modulation(where: slice) -> Modulation | None:
        return None if conditioning == "none" else tied.conditioning(depths[where])

    every = modulation(slice(None))
    folded = FoldedDepths(compiled=False)(tied.block, every and every.flattened(1), 4)
    x_btd = torch.randn(2, 5, tied.block.qkv.in_features, dtype=torch.float64)
    for n in range(4):
        expected = tied.block(x_btd, modulation(slice(n, n + 1)))
        torch.testing.assert_close(tied.block(x_btd, folded=folded[n]), expected, rtol=1e-10, atol=1e-10)


def test_gradients_of_tied_layers_add_up_in_fp32():
    block = shared_blocks(make_surrogate(tiny_teacher(), (4,), block="paper", conditioning="none"))[0].block
    with torch.autocast("cpu", torch.bfloat16):
        folded = FoldedDepths(compiled=False)(block, None, 3)
    assert {tensor.dtype for one in folded for layer in one.layers for tensor in layer} == {torch.bfloat16}
    weight = torch.randn(6, 5, requires_grad=True)
    small = 2.0**-9  # lost beside 1 in bf16
    copies = Spread.apply(3, torch.bfloat16, weight)
    torch.autograd.backward(copies, [torch.full((6, 5), g, dtype=torch.bfloat16) for g in (1.0, small, small)])
    torch.testing.assert_close(weight.grad, torch.full((6, 5), 1 + 2 * small), rtol=0, atol=0)
