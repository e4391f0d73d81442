"""Complexity: counted FLOPs, measured run time, and the Levin bound, for a surrogate and its teacher.

The bound is `sum_j DL(theta(B_j)) + k log2 L + log2(FLOPs)` bits: what it takes to write down the blocks, how often
each is repeated, and the time to run them. Patch embedding, norm and head are the same on both sides and left out;
their bits are reported separately.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.streaming import Record
from raptor.subject import Subject
from raptor.surrogate.surrogate import shared_blocks
from raptor.vit.trajectory import autocast
from raptor.vit.view import ViT

_MAX_TIMED_ON_CPU = 32
_BITS = {"fp32": 32, "fp16": 16, "int8": 8}
PRECISIONS = tuple(_BITS)
_SCALE_BITS = 32  # int8 keeps one fp32 scale per row of a matrix, and vectors (biases, norms) in fp16


@dataclass(frozen=True)
class LevinBound(Record):
    """The terms of the bound for one model at one weight precision, in bits.

    Attributes:
        precision: `fp32`, `fp16` or `int8`.
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


@dataclass(frozen=True)
class Rounding(Record):
    """A measure before and after the weights are rounded; `added` is after - before."""

    before: float
    after: float
    added: float


@dataclass
class Complexity(ResultFile):
    """complexity.json: the Levin bounds at each precision, and what rounding the weights costs.

    quantisation: side -> precision -> measure, on images of `data`.
    """

    FILE: ClassVar[str] = "complexity.json"

    fp32: LevinPair
    fp16: LevinPair
    int8: LevinPair
    quantisation: dict[str, dict[str, dict[str, Rounding]]] = field(default_factory=dict)
    data: str = "the data"
    split: str = "val"
    provenance: Provenance = field(default_factory=Provenance)
    subject: Subject | None = None

    @property
    def bounds(self) -> dict[str, LevinPair]:
        """Precision -> bounds."""
        return {"fp32": self.fp32, "fp16": self.fp16, "int8": self.int8}


def count_flops(vit: ViT) -> int:
    """FLOPs of one forward pass on one image, counted while it runs: two per multiply-add.

    Matrix products, convolutions and attention are counted; norms, activations and sums (about 1 %) are not.
    """
    size = vit.preprocess.size
    with torch.no_grad(), _frozen(vit.model), _plain_kernels(), FlopCounterMode(display=False) as counter:
        vit(torch.zeros(1, 3, size, size, device=vit.device))
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
    if precision not in _BITS:
        raise ValueError(f"unknown precision {precision!r}: choose from {', '.join(_BITS)}")
    if precision != "int8":
        return _BITS[precision] * sum(p.numel() for p in parameters)
    return sum(
        8 * p.numel() + _SCALE_BITS * p.shape[0] if p.ndim > 1 else _BITS["fp16"] * p.numel() for p in parameters
    )


def levin_bound(vit: ViT, precision: str = "fp32", flops: int | None = None) -> LevinBound:
    """The bound of one model. `flops`: counted here unless given."""
    own = list(block_list(vit).parameters())
    inside = {id(p) for p in own}
    shared = [p for p in vit.model.parameters() if id(p) not in inside]
    flops = count_flops(vit) if flops is None else flops
    num_layers = vit.num_layers
    num_blocks = len(vit.phases) if vit.phases else num_layers
    weight_bits = description_bits(own, precision)
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
    flops = {side: count_flops(vit) for side, vit in sides.items()}
    bounds = {}
    for precision in _BITS:
        terms = {side: levin_bound(vit, precision, flops[side]) for side, vit in sides.items()}
        bounds[precision] = LevinPair(**terms, ratio=terms["surrogate"].total_bits / terms["teacher"].total_bits)
    return bounds


@contextmanager
def quantised(vit: ViT, precision: str) -> Iterator[ViT]:
    """Inside the context the weights of the blocks are rounded to `precision`, in place; then they are put back.

    `fp32` leaves them as they are. `fp16` rounds every weight. `int8` rounds matrices to 255 even steps per row,
    symmetric about zero, and vectors to fp16. The arithmetic stays that of the model: what is measured is the error of
    the weights.
    """
    if precision not in _BITS:
        raise ValueError(f"unknown precision {precision!r}: choose from {', '.join(_BITS)}")
    if precision == "fp32":
        yield vit
        return
    parameters = list(block_list(vit).parameters())
    saved = [p.detach().clone() for p in parameters]
    try:
        with torch.no_grad():
            for p in parameters:
                p.copy_(rounded(p, precision))
        yield vit
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, saved):
                p.copy_(value)


def rounded(weight: Tensor, precision: str) -> Tensor:
    """The values `weight` takes when stored at `precision`, in its own dtype."""
    if precision == "fp32":
        return weight.clone()
    if precision == "fp16" or weight.ndim < 2:
        limit = torch.finfo(torch.float16).max
        return weight.clamp(-limit, limit).half().to(weight.dtype)
    rows = weight.flatten(1)
    scale = (rows.abs().amax(1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return ((rows / scale).round() * scale).view_as(weight)


def cost_of_rounding(measured: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Rounding]]:
    """What rounding the blocks' weights adds to each measure (errors, scores): precision -> measure.

    measured: precision -> measure; `fp32` are those of the weights as they are.
    """
    before = measured["fp32"]
    return {
        precision: {name: Rounding(before[name], after[name], added=after[name] - before[name]) for name in before}
        for precision, after in measured.items()
        if precision != "fp32"
    }
