"""What depth on demand saves and what it costs: milliseconds and FLOPs against agreement and accuracy.

The surrogate and its teacher run under the same rules (`raptor.vit.on_demand`), and beside them two null models: phases
that end at random, and phases that are shorter for all images. All of them take turns on each batch, so that a machine
that slows down does so for all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from raptor.certificate.complexity import count_flops, flops_of
from raptor.certificate.heads import Head
from raptor.data.stream import Batch
from raptor.phases.cut import Phases
from raptor.recurrence.tool import ToolFile, read_out_of
from raptor.streaming import Record
from raptor.vit.on_demand import RULES, FixedLengths, Measured, OnDemand, RandomSkip, ReadOut, Rule, run_on_demand
from raptor.vit.trajectory import autocast
from raptor.vit.view import ViT

FULL = "full depth"
NULLS = ("random", "shorter")
ALLOWED_LOSS = 0.01
QUANTILES = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9)
"""The thresholds of a rule are these quantiles of its own values, so that they fit any model."""
_PROBABILITIES = (0.05, 0.1, 0.2, 0.3, 0.5)
_SHARES = (0.9, 0.75, 0.6, 0.5, 0.4)  # of each phase that a shorter schedule keeps


@dataclass(frozen=True)
class DepthPoint(Record):
    """One rule on one model: what it saves and what it costs.

    Attributes:
        family: the rule without its threshold: one of `RULES`, `random`, `shorter` or `full depth`.
        blocks: mean share of the blocks that an image passed.
        gflops: per image, counted, with the embedding, the head and all read-outs of the rule.
        milliseconds: per image, with the rule and the regrouping of images; `full depth` is the plain forward pass.
        speedup: images per second, relative to full depth of the same model.
        agreement: share of images with the class of the teacher at full depth.
        lost: agreement of full depth of the same model less this one, with its 95 % interval from paired images.
        accuracy: share of labelled images that are right, None without labels.
    """

    rule: str
    family: str
    blocks: float
    gflops: float
    milliseconds: float
    speedup: float
    agreement: float
    lost: float
    lost_interval: tuple[float, float]
    accuracy: float | None
    num_images: int


@dataclass
class DepthFile(ToolFile):
    """depth.json: every rule on the surrogate and on its teacher."""

    FILE: ClassVar[str] = "depth.json"

    batch_size: int
    num_threads: int
    surrogate: list[DepthPoint]
    teacher: list[DepthPoint]

    def sides(self) -> dict[str, list[DepthPoint]]:
        return {"surrogate": self.surrogate, "teacher": self.teacher}


@dataclass
class Side:
    """One model and the rules that are tried on it, by the names that the result gives them.

    phases: of the model; a teacher has those of its surrogate.
    """

    vit: ViT
    head: Head
    phases: Phases
    rules: dict[str, Rule] = field(default_factory=dict)

    @property
    def read_out(self) -> ReadOut:
        return read_out_of(self.head, self.vit)


@torch.no_grad()
def fitting_rules(side: Side, batches: Iterable[Batch], seed: int = 0, precision: str = "fp32") -> dict[str, Rule]:
    """Each rule with thresholds that fit the model, and the null models.

    batches: other images than those that are judged, so that no threshold knows them.
    precision: that of the measurement, because states in half precision turn by other angles.
    """
    # Each rule passes over them once.
    kept = list(batches)
    found: dict[str, Rule] = {}
    for name in RULES:
        rule = Measured(name, math.inf, side.vit.groups, side.read_out)
        values = []
        for batch in kept:
            with autocast(precision, batch.images.device):
                values += _values_at_full_depth(rule, side, batch.images)
        # Of all phases together: one threshold holds for every phase.
        for threshold in _quantiles(values):
            # A threshold of 0 never fires: the states of this phase do not change.
            if threshold > 0:
                found[f"{name}<{threshold:.3g}"] = Measured(name, threshold, side.vit.groups, side.read_out)
    # The null models need no fit: chance and shorter phases mean the same in any model.
    for probability in _PROBABILITIES:
        found[f"random<{probability:g}"] = RandomSkip(probability, seed)
    for share in _SHARES:
        lengths = [max(1, round(share * length)) for length in side.phases]
        # Where all phases are short, a share of a step rounds to the whole schedule.
        if lengths != list(side.phases):
            found["shorter " + "|".join(map(str, lengths))] = FixedLengths(lengths)
    return found


def _values_at_full_depth(rule: Measured, side: Side, images: Tensor) -> list[Tensor]:
    """What a rule measures of each image in each step, where no phase ends early."""
    values = []
    x_btd, context = side.vit.embed(images)
    for phase, (first, last) in enumerate(side.phases.spans):
        rule.begin(phase)
        for layer in range(first, last + 1):
            before_btd = x_btd
            x_btd = side.vit.step(layer, before_btd, context)
            # After the last step of a phase there is nothing to decide.
            if layer < last:
                values.append(rule.value(before_btd, x_btd).double().cpu())
    return values


def _quantiles(values: list[Tensor]) -> list[float]:
    """Empty where every phase has one step, or too few for this rule."""
    values_n = torch.cat([*values, torch.empty(0, dtype=torch.float64)])
    # The second difference is infinite at the first step of a phase.
    values_n = values_n[values_n.isfinite()]
    if len(values_n) == 0:
        return []
    return values_n.quantile(torch.tensor(QUANTILES, dtype=torch.float64)).tolist()


def measure_depth(
    sides: dict[str, Side],
    reference: Side,
    batches: Iterable[Batch],
    precision: str = "fp32",
    rounds: int = 1,
) -> dict[str, list[DepthPoint]]:
    """Run every rule of each side over a stream of images; full depth comes first.

    Args:
        reference: whose classes at full depth are agreed with.
        rounds: how often each batch is timed; the shortest time counts.
    """
    totals: dict[str, dict[str, _Total]] = {}
    for name, side in sides.items():
        totals[name] = {rule: _Total() for rule in (FULL, *side.rules)}
    is_warm = False
    for batch in batches:
        # The reference runs once for each batch, outside the times of the rules.
        with autocast(precision, batch.images.device):
            wanted_b = _run(reference, FULL, batch.images).output.argmax(-1)
            if not is_warm:
                # The first calls choose kernels and allocate memory.
                for side in sides.values():
                    _run(side, FULL, batch.images)
                is_warm = True
            for name, side in sides.items():
                for rule, total in totals[name].items():
                    total.add(*_timed_run(side, rule, batch.images, rounds), wanted_b, batch.labels)
    found = {}
    for name, side in sides.items():
        costs = _Costs.of(side)
        full = totals[name][FULL]
        found[name] = [total.point(rule, costs, full) for rule, total in totals[name].items()]
    return found


@torch.no_grad()
def _run(side: Side, rule: str, images: Tensor) -> OnDemand:
    """A batch under a rule; at full depth the plain forward pass, as anybody would run it."""
    if rule != FULL:
        return run_on_demand(side.vit, images, side.rules[rule], side.phases, side.read_out)
    states, output = side.vit.record(images)
    num_blocks_bk = torch.tensor(list(side.phases), device=images.device).expand(len(images), -1)
    return OnDemand(side.head.logits(side.vit, states[-1], output), states[-1], num_blocks_bk, 0)


def _timed_run(side: Side, rule: str, images: Tensor, rounds: int) -> tuple[OnDemand, float]:
    """What a rule gives, and the shortest time that it took."""
    # Other programs only add to a time, so the shortest is nearest to the machine's own.
    seconds = math.inf
    for number in range(rounds):
        # Or each round would skip others by chance, and the time of one would stand beside the classes of another.
        if number > 0 and rule != FULL:
            side.rules[rule].rewind()
        started = _now(images.device)
        run = _run(side, rule, images)
        seconds = min(seconds, _now(images.device) - started)
    return run, seconds


def _now(device: torch.device) -> float:
    """Seconds, once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True)
class _Costs:
    """FLOPs of one image: of a whole forward pass, and of its parts; `block_k` of one block of each phase."""

    whole: int
    embedding: int
    read_out: int
    block_k: Tensor

    @classmethod
    def of(cls, side: Side) -> _Costs:
        vit = side.vit
        size = vit.preprocess.size
        # FLOPs do not depend on what an image shows.
        images = torch.zeros(1, 3, size, size, device=vit.device)
        with torch.no_grad():
            x_btd, context = vit.embed(images)
        # Blocks of one phase do the same work, whether they are tied or not.
        blocks = []
        for first, _ in side.phases.spans:
            blocks.append(flops_of(vit, partial(vit.step, first, x_btd, context)))
        return cls(
            whole=count_flops(vit),
            embedding=flops_of(vit, lambda: vit.embed(images)),
            read_out=flops_of(vit, lambda: side.read_out(x_btd)),
            block_k=torch.tensor(blocks),
        )


@dataclass
class _Total:
    """Sums over images of one rule."""

    seconds: float = 0.0
    num_read_outs: int = 0
    num_blocks: list[Tensor] = field(default_factory=list)
    agrees: list[Tensor] = field(default_factory=list)
    is_right: list[Tensor] = field(default_factory=list)

    def add(self, run: OnDemand, seconds: float, wanted_b: Tensor, labels_b: Tensor | None) -> None:
        class_b = run.output.argmax(-1)
        self.seconds += seconds
        self.num_read_outs += run.num_read_outs
        self.num_blocks.append(run.num_blocks_bk.cpu())
        self.agrees.append((class_b == wanted_b).double().cpu())
        if labels_b is not None:
            self.is_right.append((class_b == labels_b.to(class_b.device)).double().cpu())

    def point(self, rule: str, costs: _Costs, full: _Total) -> DepthPoint:
        agrees_n = torch.cat(self.agrees)
        num_images = len(agrees_n)
        num_blocks_nk = torch.cat(self.num_blocks)
        # Counted as one pass, because `finish` embeds a blank image beside what the head does.
        flops = float(costs.whole)
        if self is not full:
            # The classes themselves are read out once for each image.
            num_read_outs = 1 + self.num_read_outs / num_images
            blocks = float((num_blocks_nk.double().mean(0) * costs.block_k).sum())
            flops = costs.embedding + blocks + num_read_outs * costs.read_out
        # Both were measured on the same images, so the interval is of the differences.
        lost_n = torch.cat(full.agrees) - agrees_n
        margin = float(1.96 * lost_n.std() / math.sqrt(num_images))
        lost = float(lost_n.mean())
        return DepthPoint(
            rule=rule,
            family=FULL if self is full else rule.replace("<", " ").split()[0],
            blocks=float(num_blocks_nk.sum()) / float(torch.cat(full.num_blocks).sum()),
            gflops=flops / 1e9,
            milliseconds=1000 * self.seconds / num_images,
            speedup=full.seconds / self.seconds,
            agreement=float(agrees_n.mean()),
            lost=lost,
            lost_interval=(lost - margin, lost + margin),
            accuracy=float(torch.cat(self.is_right).mean()) if self.is_right else None,
            num_images=num_images,
        )


def depth_findings(sides: dict[str, list[DepthPoint]]) -> list[str]:
    """For each side, what the rules gain for one point of agreement, and what the null models gain for it."""
    found = []
    for name, points in sides.items():
        full = next(point for point in points if point.family == FULL)
        allowed = [point for point in points if point.lost <= ALLOWED_LOSS and point.family != FULL]
        rules = [point for point in allowed if point.family not in NULLS]
        nulls = [point for point in allowed if point.family in NULLS]
        found.append(
            f"{name}: at most one point of its {full.agreement:.1%} agreement is lost with {_best(rules)}, and of the "
            f"null models with {_best(nulls)}, each the fastest of those tried on these very images"
        )
    return found


def _best(points: list[DepthPoint]) -> str:
    if not points:
        return "none"
    best = max(points, key=lambda point: point.speedup)
    return f"{best.rule} ({best.speedup:.2f} times the throughput, {best.blocks:.0%} of the blocks)"
