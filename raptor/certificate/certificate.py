"""The certificate of a surrogate: the whole error curve over depth, as data, as JSON and as tables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from raptor.certificate.definition import Definition
from raptor.certificate.error_curves import METRICS, Curves
from raptor.certificate.heads import share_kept
from raptor.certificate.verdict import Estimate, Verdict, images_of
from raptor.phases.cut import PhaseLengths
from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.streaming import Array, Record
from raptor.subject import Subject
from raptor.vit.pair import OTHER_TEACHER

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Eps(Record):
    """An error that holds for every layer, the layer that decides it, and its upper end at 95 % confidence."""

    value: float | None
    layer: int
    upper: float | None = None


@dataclass(frozen=True)
class Cost(Record):
    """What one side costs: parameters, FLOPs of one image, measured seconds per image."""

    num_parameters: int
    block_parameters: int
    flops: int
    seconds_per_image: float


@dataclass
class Quantile(Record):
    """A quantile over images, and its interval, by token group: (L,) and (2, L)."""

    value: dict[str, Array]
    interval: dict[str, Array]


@dataclass
class Certificate(ResultFile):
    """certificate.json: how close a surrogate is to its teacher at every layer.

    Attributes:
        num_images: the held-out images.
        curves: the error curves over layers 1..L and groups.
        intervals: metric -> group -> bootstrap interval over images (2, L), lower and upper end.
        quantiles: `absolute`, `relative` and `cosine` -> `q05` to `q95` -> the quantile over images.
        eps: `absolute` and `relative` -> group -> the error that holds for every layer.
        definition: whether Definition 1 holds.
        verdict: training, and R2 against the null models, in words.
        nulls: the null models' curves on the same images; empty when left out.
        predictions: `agreement`, `teacher_accuracy`, `surrogate_accuracy` with their intervals; empty without a head.
        costs: `surrogate` and `teacher`.
        notes: the head, what the null models were fitted on, what was left out.
        data, split, bad_images, provenance: where it came from.
    """

    FILE: ClassVar[str] = "certificate.json"

    surrogate: str
    teacher: str
    phases: PhaseLengths
    image_size: int
    precision: str
    device: str
    batch_size: int
    num_images: int
    curves: Curves
    intervals: dict[str, dict[str, Array]]
    quantiles: dict[str, dict[str, Quantile]]
    eps: dict[str, dict[str, Eps]]
    verdict: Verdict
    definition: Definition | None = None
    nulls: dict[str, Curves] = field(default_factory=dict)
    predictions: dict[str, Estimate] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    data: str = "the data"
    split: str = "val"
    bad_images: list[str] = field(default_factory=list)
    provenance: Provenance = field(default_factory=Provenance)
    subject: Subject | None = None

    def __post_init__(self) -> None:
        self.curves.num_images = self.num_images  # JSON has it once, beside the curves

    @property
    def judged(self) -> Verdict:
        """The verdict, with the names of the data and of a teacher that is not the surrogate's own."""
        data = None if self.data == Certificate.data else self.data
        return replace(self.verdict, data=data, against=self.other_teacher)

    @property
    def other_teacher(self) -> str | None:
        """The name of the teacher where it is not the one that the surrogate was made from."""
        return self.teacher if self.teacher.endswith(OTHER_TEACHER) else None

    @property
    def head(self) -> str:
        """The head that the predictions are made by, as the notes say it."""
        for note in self.notes:
            if note.startswith("head: "):
                return note.removeprefix("head: ")
        return "the same head for both"

    @property
    def run_time_ratio(self) -> float:
        """Measured run time, surrogate / teacher."""
        return self.costs["surrogate"].seconds_per_image / self.costs["teacher"].seconds_per_image

    def to_dict(self) -> dict[str, Any]:
        """Everything but the values of single images; the verdict first."""
        saved = super().to_dict()
        del saved["verdict"]
        return {
            "verdict": self.judged.to_dict(),
            **saved,
            "phases": list(self.phases),
            "layers": list(range(1, self.curves.num_layers + 1)),
            "run_time_ratio": self.run_time_ratio,
        }

    def first_lines(self) -> list[str]:
        """The verdict on Definition 1, and the verdict on training and null models."""
        lines = self.judged.lines()
        if self.definition is not None:
            lines.insert(0, self.definition.line())
        return lines

    def rows(self, group: str = "all") -> list[dict[str, float]]:
        """One row per layer: its phase, every metric of `group`, and the R2 of each null model."""
        rows = []
        for layer in range(1, self.curves.num_layers + 1):
            row: dict[str, float] = {"layer": layer, "phase": self.phases.phase_of(layer) + 1}
            for metric in METRICS:
                row[metric] = float(getattr(self.curves, metric)[group][layer - 1])
            for name, null in self.nulls.items():
                row[f"r2 of {name}"] = float(null.r2[group][layer - 1])
            rows.append(row)
        return rows

    def table(self, group: str = "all") -> Table:
        """A rich table of `rows`."""
        from rich.table import Table

        eps = self.eps["relative"][group]
        title = self.surrogate
        if self.other_teacher:
            title += f" against {self.other_teacher}"
        title += (
            f"\n{self.num_images} {images_of(self.split)} of {self.data}, {self.image_size} px, tokens: {group}"
            f"; relative eps {_number(eps.value)} (layer {eps.layer}, at most {_number(eps.upper)})"
        )
        table = Table(title=title)
        rows = self.rows(group)
        for name in rows[0]:
            table.add_column(name.replace("_", " "), justify="right")
        for row in rows:
            table.add_row(*(_number(value) for value in row.values()))
        return table

    def summary_table(self) -> Table:
        """A rich table of predictions and costs of both sides."""
        from rich.table import Table

        table = Table("", "teacher", "surrogate", "surrogate / teacher")
        for label, name, unit in (
            ("parameters (M)", "num_parameters", 1e6),
            ("block parameters (M)", "block_parameters", 1e6),
            ("GFLOPs per image", "flops", 1e9),
            ("run time per image (ms)", "seconds_per_image", 1e-3),
        ):
            of_teacher = getattr(self.costs["teacher"], name) / unit
            own = getattr(self.costs["surrogate"], name) / unit
            table.add_row(label, _number(of_teacher), _number(own), _number(own / of_teacher))
        scores = {name: entry.value or 0.0 for name, entry in self.predictions.items()}
        if "teacher_accuracy" in scores:
            of_teacher = scores["teacher_accuracy"]
            own = scores["surrogate_accuracy"]
            kept = share_kept(own, of_teacher)
            table.add_row(f"accuracy ({self.head})", _number(of_teacher), _number(own), _number(kept))
        if "agreement" in scores:
            table.add_row(f"agreement ({self.head})", "", _number(scores["agreement"]), "")
        return table


def _number(value: float | None) -> str:
    """A number for a table: integers as they are, others with three digits after the point."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}"
