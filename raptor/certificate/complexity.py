"""Complexity: counted FLOPs, measured run time, and the Levin bound, for a surrogate and its teacher.

The bound is `sum_j DL(theta(B_j)) + k log2 L + log2(FLOPs)` bits: what it takes to write down the blocks, how often
each is repeated, and the time to run them. Patch embedding, norm and head are the same on both sides and left out.

The ratio of two bounds follows from k / L by counting weights and says nothing about what the weights do. What a bit is
worth is measured by `raptor.certificate.rate`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from raptor.streaming import Record
from raptor.surrogate.surrogate import shared_blocks
from raptor.vit.trajectory import autocast
from raptor.vit.view import ViT

_MAX_TIMED_ON_CPU = 32  # images: a larger batch takes seconds a round and is no faster per image
BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int6": 6, "int4": 4, "int3": 3}
_BOUNDED = ("fp32", "fp16", "int8")  # the precisions that complexity.json has bounds of
_SCALE_BITS = 32  # whole numbers need one fp32 scale per row of a matrix; vectors (biases, norms) stay in fp16


@dataclass(frozen=True)
class LevinBound(Record):
    """The terms of the bound for one model at one weight precision, in bits.

    Attributes:
        precision: `fp32`, `fp16`, `int8`, `int6`, `int4` or `int3`.
        num_parameters: of the blocks, each tied block once.
        weight_bits: description length of those parameters, scales included.
        schedule_bits: k log2 L for the repetition counts.
        flops: of one forward pass on one image.
        log_time_bits: log2 of those.
        total_bits: weight_bits + schedule_bits + log_time_bits.
    """

    precision: str
    num_parameters: int
    weight_bits: int
    schedule_bits: float
    flops: int
    log_time_bits: float
    total_bits: float


@dataclass(frozen=True)
class LevinPair(Record):
    """The bounds of both sides at one precision, and the ratio of their totals, surrogate / teacher."""

    surrogate: LevinBound
    teacher: LevinBound
    ratio: float


def count_flops(vit: ViT) -> int:
    """FLOPs of one forward pass on one image, see `flops_of`."""
    size = vit.preprocess.size
    # The number of operations does not depend on the pixels.
    images = torch.zeros(1, 3, size, size, device=vit.device)
    return flops_of(vit, lambda: vit(images))


def flops_of(vit: ViT, run: Callable[[], Any]) -> int:
    """FLOPs of `run`, which runs the model or a part of it, counted while it runs: two per multiply-add.

    Matrix products, convolutions and attention are counted; norms, activations and sums (about 1 %) are not.
    """
    with torch.no_grad(), _countable(vit.model), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@contextmanager
def _countable(model: nn.Module) -> Iterator[None]:
    """Inside the context everything that `model` computes can be counted.

    Attention and encoder layers run as matrix products: the counter does not see into torch's fused kernels, neither
    those of `scaled_dot_product_attention` nor the ones that `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`
    run instead of their children in inference. And no parameter requires a gradient: the counter follows gradients of
    what modules are called with, and fails where that is a view of a parameter, as the query of SigLIP's pooling is.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for parameter in trained:
            parameter.requires_grad_(False)
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for parameter in trained:
            parameter.requires_grad_(True)


@torch.no_grad()
def run_times(
    models: dict[str, ViT], images: Tensor, precision: str = "fp32", seconds: float = 1.0
) -> dict[str, float]:
    """Measured seconds per image of each model's forward pass: the median of alternating runs on the same batch.

    Runs for about `seconds`, at least three rounds; on a CPU at most 32 images of the batch are used.
    """
    device = images.device
    is_gpu = device.type == "cuda"
    if not is_gpu:
        images = images[:_MAX_TIMED_ON_CPU]
    spent: dict[str, list[float]] = {name: [] for name in models}
    num_rounds = 0
    begin = time.perf_counter()
    while num_rounds < 4 or time.perf_counter() - begin < seconds:
        # In turn, so that a machine that slows down does so for all models; the median forgives single interruptions.
        for name, vit in models.items():
            if is_gpu:  # it runs behind the host: the clock would also count kernels of the other model
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            with autocast(precision, device):
                vit(images)
            if is_gpu:
                torch.cuda.synchronize(device)
            spent[name].append(time.perf_counter() - start)
        num_rounds += 1
        if num_rounds == 1:  # the first round warms caches and kernels up
            spent = {name: [] for name in models}
            begin = time.perf_counter()
    return {name: statistics.median(values) / len(images) for name, values in spent.items()}


def block_list(vit: ViT) -> nn.Module:
    """The modules that hold the blocks' weights: the k shared blocks of a surrogate, the L blocks of a teacher."""
    return shared_blocks(vit) if vit.phases else vit.blocks


def description_bits(parameters: Sequence[Tensor], precision: str) -> int:
    """Bits to write `parameters` down at `precision`."""
    if precision not in BITS:
        raise ValueError(f"unknown precision {precision!r}: choose from {', '.join(BITS)}")
    bits = 0
    for p in parameters:
        if not precision.startswith("int"):
            bits += BITS[precision] * p.numel()
        elif p.ndim > 1:
            # One scale for each row, as `rate.whole_numbers` rounds: bits of the error that is measured there.
            bits += BITS[precision] * p.numel() + _SCALE_BITS * p.shape[0]
        else:
            bits += BITS["fp16"] * p.numel()
    return bits


def levin_bound(vit: ViT, precision: str = "fp32", flops: int | None = None) -> LevinBound:
    """The bound of one model. `flops`: counted here unless given."""
    own = list(block_list(vit).parameters())  # a tied block is listed once
    flops = count_flops(vit) if flops is None else flops
    num_blocks = len(vit.phases or vit.blocks)
    weight_bits = description_bits(own, precision)
    # The paper states O(k log L). With a constant of 1 it is more than any cut of L layers into k phases takes.
    schedule_bits = num_blocks * math.log2(vit.num_layers)
    return LevinBound(
        precision=precision,
        num_parameters=sum(p.numel() for p in own),
        weight_bits=weight_bits,
        schedule_bits=schedule_bits,
        flops=flops,
        log_time_bits=math.log2(flops),
        total_bits=weight_bits + schedule_bits + math.log2(flops),
    )


def levin_bounds(surrogate: ViT, teacher: ViT) -> dict[str, LevinPair]:
    """Precision -> the bounds of both sides."""
    # Counted once, because rounded weights take as many operations.
    our_flops = count_flops(surrogate)
    their_flops = count_flops(teacher)
    bounds = {}
    for precision in _BOUNDED:
        ours = levin_bound(surrogate, precision, our_flops)
        theirs = levin_bound(teacher, precision, their_flops)
        bounds[precision] = LevinPair(ours, theirs, ours.total_bits / theirs.total_bits)
    return bounds
