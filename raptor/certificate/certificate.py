"""The certificate of a surrogate: the whole error curve over depth, as data, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from raptor.certificate.autonomy import Autonomy, Conditioning
from raptor.certificate.definition import Definition
from raptor.certificate.error_curves import METRICS, Curves
from raptor.certificate.heads import share_kept
from raptor.certificate.shift import SHIFT_COLUMNS, Shift
from raptor.certificate.stitching import Stitching
from raptor.certificate.verdict import Estimate, Verdict, named_images
from raptor.phases.cut import PhaseLengths
from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.streaming import Array, Record, jsonable
from raptor.subject import Subject
from raptor.vit.pair import OTHER_TEACHER

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A heading and rows in words, for the terminal and the page; the first cell of a row names it."""


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
class Certificate(ResultFile):
    """certificate.json: how close a surrogate is to its teacher at every layer.

    Attributes:
        num_images: the held-out images.
        curves: the error curves over layers 1..L and groups.
        intervals: metric -> group -> bootstrap interval over images (2, L), lower and upper end.
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
        against = self.teacher if self.teacher.endswith(OTHER_TEACHER) else None
        return replace(self.verdict, data=data, against=against)

    @property
    def head(self) -> str:
        """The head that the predictions are made by, as the notes say it."""
        for note in self.notes:
            if note.startswith("head: "):
                return note.removeprefix("head: ")
        return "the same head for both"

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

    def source(self) -> str:
        """The surrogate, the images and the teacher, in one line."""
        images = named_images(self.num_images, self.split, self.data, self.image_size)
        return f"{self.surrogate}, measured on {images}, against {self.teacher}"

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

    def kept(self) -> dict[str, tuple[float | None, float | None, float | None]]:
        """`accuracy` and `agreement`, as far as they were measured: the shares of the teacher's score that are kept by
        the untouched head, by the refitted one, and by one class for all images, without which a share says nothing."""
        scores = {name: entry.value for name, entry in self.predictions.items()}
        found = {}
        if "agreement" in scores:
            # The teacher agrees with itself on every image, so that agreement is a share of its score already.
            found["agreement"] = (scores["agreement"], scores.get("refitted_agreement"), self.floors.get("agreement"))
        if "teacher_accuracy" in scores:
            of_teacher = scores["teacher_accuracy"] or 0.0
            found["accuracy"] = (
                share_kept(scores["surrogate_accuracy"], of_teacher),
                share_kept(scores.get("refitted_accuracy"), of_teacher),
                share_kept(self.floors.get("accuracy"), of_teacher),
            )
        return found

    def tables(self) -> list[Table]:
        """What both sides score and cost, the errors that hold at every layer, and what else was measured."""
        floors = self.floors
        kept = self.kept().get("accuracy", (None, None, None))
        scores = []
        for label, name, refitted, floor in (
            ("agreement", "agreement", "refitted_agreement", "agreement"),
            ("accuracy of the teacher", "teacher_accuracy", "", "accuracy"),
            ("accuracy of the surrogate", "surrogate_accuracy", "refitted_accuracy", "accuracy"),
        ):
            if name in self.predictions:
                cells = [str(self.predictions[name]), str(self.predictions.get(refitted, "–"))]
                scores.append([label, *cells, _share(floors.get(floor))])
        if "teacher_accuracy" in self.predictions:
            scores.append(["share of the teacher's accuracy kept", *map(_share, kept)])
        costs = []
        # Blocks apart from the whole: embedding and head are shared and would dilute what tying saves.
        for label, name, unit in (
            ("parameters (M)", "num_parameters", 1e6),
            ("block parameters (M)", "block_parameters", 1e6),
            ("GFLOPs per image", "flops", 1e9),
            ("milliseconds per image", "seconds_per_image", 1e-3),
        ):
            of_teacher = getattr(self.costs["teacher"], name) / unit
            own = getattr(self.costs["surrogate"], name) / unit
            ratio = f"{own / of_teacher:.2f}" if of_teacher else "–"
            costs.append([label, f"{of_teacher:.3f}", f"{own:.3f}", ratio])
        # Absolute errors compare surrogates of one teacher only: they depend on the scale of the states.
        bounds = []
        for group, eps in self.eps["relative"].items():
            absolute = Estimate(self.eps["absolute"][group].value)
            bounds.append([group, str(Estimate(eps.value)), str(Estimate(eps.upper)), str(eps.layer), str(absolute)])
        tables: list[Table] = [
            ((f"predictions by {self.head}", "untouched head", "refitted head", "one class for all"), scores),
            (("costs", "teacher", "surrogate", "ratio"), costs),
            (("ε that holds at every layer", "relative", "at 95 %", "decided at layer", "absolute"), bounds),
        ]
        if self.autonomy is not None:
            tables.append(self.autonomy.table())
        # Without a head there are no scores.
        return [(head, rows) for head, rows in tables if rows]

    def layer_table(self, group: str = "all") -> Table:
        """`rows` in words."""
        rows = self.rows(group)
        cells = []
        for row in rows:
            layer, phase, *values = row.values()
            cells.append([str(layer), str(phase), *(f"{value:.3f}" for value in values)])
        return [name.replace("_", " ") for name in rows[0]], cells

    def shift_table(self) -> Table:
        """A row for each set of images, those of the certificate first."""
        group = self.verdict.groups["all"]
        eps = self.eps["relative"]["all"]
        own = Shift(
            name=f"{self.data} (this certificate)",
            num_images=self.num_images,
            r2_last=group.r2_last,
            r2_lowest=group.r2_lowest.value,
            lowest_layer=group.lowest_layer,
            eps=Estimate.of(eps.value, self.intervals["relative"]["all"][:, eps.layer - 1]),
            eps_layer=eps.layer,
            agreement=self.predictions.get("agreement"),
            floor=self.floors.get("agreement"),
            refitted=self.predictions.get("refitted_agreement"),
        )
        return SHIFT_COLUMNS, [one.cells() for one in (own, *self.shift)]


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
