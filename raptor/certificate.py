"""The certificate of a surrogate: the whole error curve over depth, as data, as JSON and as tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from raptor.curves import METRICS, Array, Curves, finite_list

if TYPE_CHECKING:
    from rich.table import Table

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class Eps(TypedDict):
    """An error that holds for every layer, the layer that decides it, and its upper end at 95 % confidence."""

    value: float | None
    layer: int
    upper: float | None


@dataclass
class Cost:
    """What one side costs: parameters, FLOPs of one image, measured seconds per image."""

    num_parameters: int
    block_parameters: int
    flops: int
    seconds_per_image: float


@dataclass
class Certificate:
    """Evidence that a surrogate is eps-BRH, or how far it is from it.

    Attributes:
        curves: the error curves over layers 1..L and groups.
        intervals: metric -> (2, L, G) bootstrap intervals over images, in the order of `curves.groups`.
        quantiles: `absolute`, `relative` and `cosine` -> ((Q, L, G) quantiles over images, (Q, 2, L, G) intervals).
        eps: `absolute` and `relative` -> group -> the error that holds for every layer.
        nulls: the null models' curves on the same images; empty when left out.
        predictions: `agreement`, `teacher_accuracy`, `surrogate_accuracy` with their intervals; empty without a head.
        costs: `surrogate` and `teacher`.
        notes: what a reader must know: the head, what the null models were fitted on, what was left out.
    """

    surrogate: str
    teacher: str
    phases: tuple[int, ...]
    image_size: int
    precision: str
    device: str
    batch_size: int
    curves: Curves
    intervals: dict[str, Array]
    quantiles: dict[str, tuple[Array, Array]]
    eps: dict[str, dict[str, Eps]]
    nulls: dict[str, Curves] = field(default_factory=dict)
    predictions: dict[str, dict[str, float | None]] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def run_time_ratio(self) -> float:
        """Measured run time, surrogate / teacher."""
        return self.costs["surrogate"].seconds_per_image / self.costs["teacher"].seconds_per_image

    def to_dict(self) -> dict[str, Any]:
        """Everything but the per-image values, as JSON can hold it."""
        return {
            "surrogate": self.surrogate,
            "teacher": self.teacher,
            "phases": list(self.phases),
            "image_size": self.image_size,
            "precision": self.precision,
            "device": self.device,
            "batch_size": self.batch_size,
            "num_images": self.curves.num_images,
            "layers": list(range(1, self.curves.num_layers + 1)),
            "curves": self.curves.to_dict(),
            "intervals": {metric: self._by_group(ends) for metric, ends in self.intervals.items()},
            "quantiles": {
                metric: {
                    f"q{round(100 * q):02d}": {"value": self._by_group(values[i]), "interval": self._by_group(ends[i])}
                    for i, q in enumerate(QUANTILES)
                }
                for metric, (values, ends) in self.quantiles.items()
            },
            "eps": self.eps,
            "nulls": {name: curves.to_dict() for name, curves in self.nulls.items()},
            "predictions": self.predictions,
            "costs": {side: vars(cost) for side, cost in self.costs.items()},
            "run_time_ratio": self.run_time_ratio,
            "notes": self.notes,
        }

    def _by_group(self, values: Array) -> dict[str, Any]:
        """(L, G) or (2, L, G) as group -> list over layers, or [lower list, upper list]."""
        pick = {group: values[..., g] for g, group in enumerate(self.curves.groups)}
        return {group: finite_list(v) if v.ndim == 1 else [finite_list(end) for end in v] for group, v in pick.items()}

    def rows(self, group: str = "all") -> list[dict[str, float]]:
        """One row a layer: its phase, every metric of `group`, and the R2 of each null model."""
        phase_of = [j + 1 for j, n in enumerate(self.phases) for _ in range(n)]
        return [
            {
                "layer": layer + 1,
                "phase": phase_of[layer],
                **{metric: float(getattr(self.curves, metric)[group][layer]) for metric in METRICS},
                **{f"r2 of {name}": float(null.r2[group][layer]) for name, null in self.nulls.items()},
            }
            for layer in range(self.curves.num_layers)
        ]

    def table(self, group: str = "all") -> Table:
        """A rich table of `rows`."""
        from rich.table import Table

        eps = self.eps["relative"][group]
        title = (
            f"{self.surrogate}\n{self.curves.num_images} held-out images, {self.image_size} px, tokens: {group}; "
            f"relative eps {_number(eps['value'])} (layer {eps['layer']}, at most {_number(eps['upper'])})"
        )
        table = Table(title=title)
        rows = self.rows(group)
        for name in rows[0]:
            table.add_column(name.replace("_", " "), justify="right")
        for row in rows:
            table.add_row(*(_number(v) for v in row.values()))
        return table

    def summary_table(self) -> Table:
        """A rich table of predictions and costs of both sides."""
        from rich.table import Table

        table = Table("", "teacher", "surrogate", "surrogate / teacher")
        teacher, surrogate = self.costs["teacher"], self.costs["surrogate"]
        for label, name, scale in (
            ("parameters (M)", "num_parameters", 1e6),
            ("block parameters (M)", "block_parameters", 1e6),
            ("GFLOPs per image", "flops", 1e9),
            ("run time per image (ms)", "seconds_per_image", 1e-3),
        ):
            old, new = getattr(teacher, name) / scale, getattr(surrogate, name) / scale
            table.add_row(label, _number(old), _number(new), _number(new / old))
        scores = {name: entry["value"] or 0.0 for name, entry in self.predictions.items()}
        if "teacher_accuracy" in scores:
            old, new = scores["teacher_accuracy"], scores["surrogate_accuracy"]
            table.add_row("accuracy", _number(old), _number(new), _number(new / old if old else None))
        if "agreement" in scores:
            table.add_row("agreement", "", _number(scores["agreement"]), "")
        return table


def _number(value: float | None) -> str:
    """A number for a table: whole ones as they are, others with three figures after the point."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}"
