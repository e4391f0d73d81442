"""The certificate of a surrogate: the whole error curve over depth, as data, as JSON and as tables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from raptor.certificate.autonomy import Autonomy, Conditioning
from raptor.certificate.definition import Definition
from raptor.certificate.error_curves import METRICS, Curves
from raptor.certificate.heads import share_kept
from raptor.certificate.shift import SHIFT_COLUMNS, Shift
from raptor.certificate.stitching import Stitching
from raptor.certificate.verdict import Estimate, Verdict, images_of
from raptor.phases.cut import PhaseLengths
from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.streaming import Array, Record, jsonable
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


@dataclass(frozen=True)
class Kept:
    """A score of both sides, and the share of it that the surrogate keeps; None where it was not measured.

    Attributes:
        name: `accuracy` or `agreement`, which is a share already.
        untouched, refitted: the surrogate's score with the teacher's own norm and head, and with refitted ones.
        share, refitted_share: of the teacher's score.
        floor: the share that one class for all images keeps, without which a share says nothing.
    """

    name: str
    teacher: float | None
    untouched: float | None
    refitted: float | None
    share: float | None
    refitted_share: float | None
    floor: float | None


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
        predictions: `agreement`, `teacher_accuracy`, `surrogate_accuracy` with their intervals, and after `raptor head`
            `refitted_agreement` and `refitted_accuracy`; empty without a head.
        floors: `agreement` and `accuracy` of the best predictor that always gives one class.
        costs: `surrogate` and `teacher`.
        conditioning: what makes one depth of the surrogate differ from another.
        autonomy: the price of a surrogate without that, where one was given.
        stitching: each model's states finished by the other.
        shift: the same comparison on other sets of images.
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
    floors: dict[str, float] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)
    conditioning: Conditioning | None = None
    autonomy: Autonomy | None = None
    stitching: Stitching | None = None
    shift: list[Shift] = field(default_factory=list)
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
        """Everything but the values of single images; Definition 1 and the verdict first."""
        saved = super().to_dict()
        # JSON keeps the order of its entries, and a reader of the file must see the verdict before the numbers.
        del saved["verdict"], saved["definition"]
        return {
            "lines": self.first_lines(),
            "definition": jsonable(self.definition),
            "verdict": self.judged.to_dict(),
            **saved,
            "phases": list(self.phases),
            "layers": list(range(1, self.curves.num_layers + 1)),
            "run_time_ratio": self.run_time_ratio,
        }

    def first_lines(self) -> list[str]:
        """Definition 1, training and null models, what a depth has of its own, and where the error is made."""
        lines = self.judged.lines()
        if self.definition is not None:
            lines.insert(0, self.definition.line())
        # What was not measured has no line.
        for more in (self.conditioning, self.autonomy, self.stitching):
            if more is not None:
                lines.append(more.line())
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

        has_refitted = "refitted_agreement" in self.predictions
        columns = ["", "teacher", "surrogate", "surrogate / teacher"]
        if has_refitted:
            columns += ["refitted head", "refitted / teacher"]
        table = Table(*columns, "one class for all")
        for label, name, unit in (
            ("parameters (M)", "num_parameters", 1e6),
            ("block parameters (M)", "block_parameters", 1e6),
            ("GFLOPs per image", "flops", 1e9),
            ("run time per image (ms)", "seconds_per_image", 1e-3),
        ):
            of_teacher = getattr(self.costs["teacher"], name) / unit
            own = getattr(self.costs["surrogate"], name) / unit
            table.add_row(label, _number(of_teacher), _number(own), _number(own / of_teacher))
        for kept in self.kept():
            cells = [kept.teacher, kept.untouched, kept.share]
            if has_refitted:
                cells += [kept.refitted, kept.refitted_share]
            table.add_row(f"{kept.name} ({self.head})", *map(_number, cells), _number(kept.floor))
        return table

    def shift_table(self) -> Table:
        """A rich table with one row per set of images, those of the certificate first."""
        from rich.table import Table

        table = Table(*SHIFT_COLUMNS)
        for shift in self.sets():
            table.add_row(*shift.cells())
        return table

    def sets(self) -> list[Shift]:
        """The certificate's own images as a set among the further ones."""
        group = self.verdict.groups["all"]
        eps = self.eps["relative"]["all"]
        layer = eps.layer - 1
        ends = self.intervals["relative"]["all"]
        own = Shift(
            name=f"{self.data} (this certificate)",
            num_images=self.num_images,
            r2_last=group.r2_last,
            r2_lowest=group.r2_lowest.value,
            lowest_layer=group.lowest_layer,
            eps=Estimate(eps.value, jsonable(ends[0, layer]), jsonable(ends[1, layer])),
            eps_layer=eps.layer,
            agreement=self.predictions.get("agreement"),
            floor=self.floors.get("agreement"),
            refitted=self.predictions.get("refitted_agreement"),
        )
        return [own, *self.shift]

    def kept(self) -> list[Kept]:
        """Accuracy and agreement, as far as they were measured."""
        scores = {name: entry.value or 0.0 for name, entry in self.predictions.items()}
        rows = []
        if "teacher_accuracy" in scores:
            of_teacher = scores["teacher_accuracy"]
            own = scores["surrogate_accuracy"]
            refitted = scores.get("refitted_accuracy")
            shares = [share_kept(score, of_teacher) for score in (own, refitted, self.floors.get("accuracy"))]
            rows.append(Kept("accuracy", of_teacher, own, refitted, *shares))
        if "agreement" in scores:
            shares = [scores["agreement"], scores.get("refitted_agreement"), self.floors.get("agreement")]
            # The teacher agrees with itself on every image, so that agreement is a share of its score already.
            rows.append(Kept("agreement", None, None, None, *shares))
        return rows


def _number(value: float | None) -> str:
    """A number for a table: integers as they are, others with three digits after the point."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}"
