"""Complexity: counted FLOPs, measured run time, and the Levin bound, for a surrogate and its teacher.

The bound is `sum_j DL(theta(B_j)) + k log2 L + log2(FLOPs)` bits: what it takes to write down the blocks, how often
each is repeated, and the time to run them. Patch embedding, norm and head are the same on both sides and left out;
their bits are reported separately.

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
        weight_bits: description length of those parameters, int8 scales included.
        shared_bits: description length of everything else (embedding, norm, head), outside the bound.
        schedule_bits: k log2 L for the repetition counts.
        schedule_bits_exact: log2 of the number of ways to cut L layers into k phases.
        flops: of one forward pass on one image.
        log_time_bits: log2 of those.
        total_bits: weight_bits + schedule_bits + log_time_bits.
    """

    precision: str
    num_parameters: int
    weight_bits: int
    shared_bits: int
    schedule_bits: float
    schedule_bits_exact: float
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
    with torch.no_grad(), _frozen(vit.model), _plain_kernels(), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Inside the context no parameter requires a gradient.

    The counter follows gradients of what modules are called with, and fails where that is a view of a parameter, as the
    query of SigLIP's attention pooling is.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Inside the context attention and encoder layers run as matrix products, which the counter sees.

    It does not see into torch's fused kernels: those of `scaled_dot_product_attention`, nor the ones that
    `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` run instead of their children in inference.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@torch.no_grad()
def run_times(
    models: dict[str, ViT], images: Tensor, precision: str = "fp32", seconds: float = 1.0
) -> dict[str, float]:
    """Measured seconds per image of each model's forward pass: the median of alternating runs on the same batch.

    Runs for about `seconds`, at least three rounds; on a CPU at most 32 images of the batch are used.
    """
    device = images.device
    images = images if device.type == "cuda" else images[:_MAX_TIMED_ON_CPU]
    # In turn, so that a machine that slows down does so for all models; the median forgives single interruptions.
    spent: dict[str, list[float]] = {name: [] for name in models}
    _timed_round(models, images, precision)  # warms caches and kernels up
    begin = time.perf_counter()
    while len(next(iter(spent.values()))) < 3 or time.perf_counter() - begin < seconds:
        for name, value in _timed_round(models, images, precision).items():
            spent[name].append(value)
    return {name: statistics.median(values) / len(images) for name, values in spent.items()}


def _timed_round(models: dict[str, ViT], images: Tensor, precision: str) -> dict[str, float]:
    spent = {}
    for name, vit in models.items():
        # A GPU runs behind the host: without this the clock would also count kernels of the other model.
        _wait(images.device)
        begin = time.perf_counter()
        with autocast(precision, images.device):
            vit(images)
        _wait(images.device)
        spent[name] = time.perf_counter() - begin
    return spent


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def block_list(vit: ViT) -> nn.Module:
    """The modules that hold the blocks' weights: the k shared blocks of a surrogate, the L blocks of a teacher."""
    return shared_blocks(vit) if vit.phases else vit.blocks


def description_bits(parameters: Sequence[Tensor], precision: str) -> int:
    """Bits to write `parameters` down at `precision`."""
    check_precision(precision)
    if not precision.startswith("int"):
        return BITS[precision] * sum(p.numel() for p in parameters)
    bits = 0
    for p in parameters:
        if p.ndim > 1:
            # One scale for each row, as `rate.whole_numbers` rounds: these are the bits of the error that is measured
            # there.
            bits += BITS[precision] * p.numel() + _SCALE_BITS * p.shape[0]
        else:
            bits += BITS["fp16"] * p.numel()
    return bits


def check_precision(precision: str) -> None:
    if precision not in BITS:
        raise ValueError(f"unknown precision {precision!r}: choose from {', '.join(BITS)}")


def levin_bound(vit: ViT, precision: str = "fp32", flops: int | None = None) -> LevinBound:
    """The bound of one model. `flops`: counted here unless given."""
    own = list(block_list(vit).parameters())  # a tied block is listed once
    # By identity, because surrogate and teacher have other names for the weights of their blocks.
    inside = {id(p) for p in own}
    shared = [p for p in vit.model.parameters() if id(p) not in inside]
    flops = count_flops(vit) if flops is None else flops
    num_layers = vit.num_layers
    num_blocks = len(vit.phases) if vit.phases else num_layers
    weight_bits = description_bits(own, precision)
    # The paper states O(k log L). With a constant of 1 it is an upper bound of the exact count below.
    schedule_bits = num_blocks * math.log2(num_layers)
    return LevinBound(
        precision=precision,
        num_parameters=sum(p.numel() for p in own),
        weight_bits=weight_bits,
        shared_bits=description_bits(shared, precision),
        schedule_bits=schedule_bits,
        schedule_bits_exact=math.log2(math.comb(num_layers - 1, num_blocks - 1)),
        flops=flops,
        log_time_bits=math.log2(flops),
        total_bits=weight_bits + schedule_bits + math.log2(flops),
    )


def levin_bounds(surrogate: ViT, teacher: ViT) -> dict[str, LevinPair]:
    """Precision -> the bounds of both sides."""
    sides = {"surrogate": surrogate, "teacher": teacher}
    # Counted once, because rounded weights take as many operations.
    flops = {side: count_flops(vit) for side, vit in sides.items()}
    bounds = {}
    for precision in _BOUNDED:
        terms = {side: levin_bound(vit, precision, flops[side]) for side, vit in sides.items()}
        bounds[precision] = LevinPair(**terms, ratio=terms["surrogate"].total_bits / terms["teacher"].total_bits)
    return bounds
