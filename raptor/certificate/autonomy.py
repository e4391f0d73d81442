"""What makes one depth of a surrogate differ from another, and what a surrogate without any of it loses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from raptor.certificate.bootstrap import statistic_interval
from raptor.certificate.follow import Followed, check_finite, check_pair, follow
from raptor.certificate.heads import Head
from raptor.certificate.verdict import Estimate, Training
from raptor.data.stream import Batch, sharing
from raptor.streaming import Array, Record
from raptor.surrogate.surrogate import block_parameters, shared_blocks, surrogate_spec
from raptor.vit.view import ViT

_KINDS = {
    "table": "a learned row of scales and shifts",
    "mlp": "depth scaling by an MLP of the layer number",
    "none": "nothing",
}
MEASURES = {
    "relative_largest": "largest relative error over layers",
    "relative_last": "relative error of the last layer",
    "r2_last": "R2 of the last layer",
    "agreement": "agreement",
}


@dataclass(frozen=True)
class Conditioning(Record):
    """The parameters by which one depth of a surrogate differs from another.

    Attributes:
        kind: `table`, `mlp` or `none`.
        adapters: rank of what each depth adds to the matrices; 0 for nothing.
        per_depth: parameters that belong to a single depth.
        num_parameters: of all depths, and of the MLP where there is one.
        share: of the block parameters.
        has_own_arguments: whether the teacher passes other arguments to other blocks, as rope-mixed models do.
    """

    kind: str
    adapters: int
    per_depth: int
    num_parameters: int
    share: float
    has_own_arguments: bool = False

    @property
    def is_autonomous(self) -> bool:
        """Whether the blocks do not know at which depth they are."""
        return self.num_parameters == 0 and not self.has_own_arguments

    def line(self) -> str:
        """What a depth has of its own, in one line."""
        if self.is_autonomous:
            return "autonomous: no depth has parameters of its own"
        own = []
        if self.kind != "none":
            own.append(_KINDS[self.kind])
        if self.adapters:
            own.append(f"adapters of rank {self.adapters}")
        if self.has_own_arguments:
            own.append("the arguments that the teacher passes to each block")
        text = f"not autonomous: each depth has {' and '.join(own)}"
        if self.per_depth:
            text += f", {self.per_depth:,} parameters"
        if self.num_parameters:
            text += f"; {self.num_parameters:,} in all, {self.share:.1%} of the block parameters"
        return text


def count_conditioning(surrogate: ViT) -> Conditioning:
    """The parameters of `surrogate` by which its depths differ."""
    spec = surrogate_spec(surrogate)
    num_parameters = 0
    num_of_depths = 0
    for tied in shared_blocks(surrogate):
        for name, module in (("conditioning", tied.conditioning), ("adapters", tied.adapters)):
            if module is None:
                continue
            num = sum(parameter.numel() for parameter in module.parameters())  # type: ignore[union-attr, misc]
            num_parameters += num
            # What belongs to a single depth is a program of its own for it; an MLP serves all depths of its phase.
            if name == "adapters" or spec.conditioning == "table":
                num_of_depths += num
    return Conditioning(
        kind=spec.conditioning,
        adapters=spec.adapters,
        per_depth=num_of_depths // surrogate.num_layers,
        num_parameters=num_parameters,
        share=num_parameters / block_parameters(surrogate),
        has_own_arguments=surrogate.depth_conditioned,
    )


@dataclass(frozen=True)
class Price(Record):
    """A measure of both surrogates, and what the autonomous one loses: positive is worse. The interval is paired."""

    own: float
    autonomous: float
    loss: Estimate


@dataclass
class Autonomy(Record):
    """An autonomous surrogate of the same teacher and phases, on the same images.

    Attributes:
        surrogate: the run it is of.
        prices: `relative_largest`, `relative_last`, `r2_last` and, with a head, `agreement`.
        training: of the autonomous surrogate; None where it is not known. A shorter one has a higher price.
    """

    surrogate: str
    prices: dict[str, Price]
    training: Training | None = None

    def line(self) -> str:
        """The price in one line."""
        parts = []
        for name, price in self.prices.items():
            parts.append(f"{MEASURES[name]} {price.autonomous:.3f}, not {price.own:.3f} (price {price.loss})")
        trained = self.training or "how it was trained is not known"
        return f"without anything of a depth's own ({self.surrogate}; {trained}): {'; '.join(parts)}"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """A row for each measure."""
        other = f"autonomous ({self.surrogate}; {self.training or 'how it was trained is not known'})"
        rows = []
        for name, price in self.prices.items():
            rows.append([MEASURES[name], f"{price.own:.3f}", f"{price.autonomous:.3f}", str(price.loss)])
        return ["the price of non-autonomy", "this surrogate", other, "loss, 95 % interval"], rows


def check_autonomous(other: ViT, surrogate: ViT, name: str) -> None:
    """Raise unless the price of autonomy can be read off the difference of the two surrogates."""
    if not count_conditioning(other).is_autonomous:
        raise ValueError(f"{name} is not autonomous: distil one with --conditioning none")
    ours = list(surrogate.phases or ())
    theirs = list(other.phases or ())
    # With other phases the difference would also hold the price of another cut.
    if ours != theirs:
        lengths = " ".join(map(str, ours))
        raise ValueError(
            f"{name} has the phases {' | '.join(map(str, theirs))}, the surrogate {' | '.join(map(str, ours))}: "
            f"distil it with --phases {lengths} --conditioning none"
        )


def measure_autonomy(
    surrogate: ViT,
    other: ViT,
    teacher: ViT,
    batches: Iterable[Batch],
    *,
    name: str,
    head: Head | None = None,
    training: Training | None = None,
    precision: str = "fp32",
    bootstrap: int = 1000,
    seed: int = 0,
) -> Autonomy:
    """What the autonomous surrogate `other` loses against `surrogate`, image by image.

    name: what `other` is called in results. training: how it was trained.
    """
    check_pair(other, teacher)
    check_autonomous(other, surrogate, name)
    # Both reservoirs have one seed and so keep the same images, without which the errors could not be paired.
    own = follow(surrogate, teacher, batches, head, precision)
    without = follow(other, teacher, batches, head, precision)

    def finish() -> Autonomy:
        check_finite(without.curves["surrogate"], other, teacher)
        return Autonomy(name, _prices(own, without, bootstrap, seed), training)

    return sharing(batches).first(finish)


def _prices(own: Followed, other: Followed, bootstrap: int, seed: int) -> dict[str, Price]:
    """The price by every measure."""
    prices = {}

    def add(name: str, value: float, of_other: float, columns: list[Array], loss: Callable[..., Array]) -> None:
        # Both are resampled together: how hard an image is cancels in the difference.
        ends = statistic_interval(columns, loss, bootstrap, seed)
        # Of errors the smaller one is better, of the other measures the larger one.
        lost = of_other - value if name.startswith("relative") else value - of_other
        prices[name] = Price(value, of_other, Estimate.of(lost, ends[:, 0]))

    ours = own.curves["surrogate"].result()
    theirs = other.curves["surrogate"].result()
    # Each at its own worst layer, because Definition 1 asks for every layer.
    worst = int(ours.relative["all"].argmax())
    other_worst = int(theirs.relative["all"].argmax())
    for name, layer, other_layer in (("relative_largest", worst, other_worst), ("relative_last", -1, -1)):
        columns = [theirs.image_error[:, other_layer, :1], theirs.image_norm[:, other_layer, :1]]
        columns += [ours.image_error[:, layer, :1], ours.image_norm[:, layer, :1]]
        value = float(ours.relative["all"][layer])
        of_other = float(theirs.relative["all"][other_layer])
        add(name, value, of_other, columns, lambda e, n, e_own, n_own: e / n - e_own / n_own)
    # Both have one teacher, so that they share the deviation of its states.
    columns = [theirs.image_error[:, -1, :1] ** 2, ours.image_error[:, -1, :1] ** 2, ours.image_deviation[:, -1, :1]]
    r2 = float(ours.r2["all"][-1])
    add("r2_last", r2, float(theirs.r2["all"][-1]), columns, lambda e, e_own, d: (e - e_own) / d)
    if len(own.chosen):
        agrees = []
        for followed in (own, other):
            chosen_nc = followed.chosen.values().cpu().numpy()
            agrees.append((chosen_nc[:, :1] == chosen_nc[:, 1:2]).astype(np.float64))
        add("agreement", float(agrees[0].mean()), float(agrees[1].mean()), agrees, lambda a, b: a - b)
    return prices
