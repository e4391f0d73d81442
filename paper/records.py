"""What the experiments write: one dataclass per JSON file, with its rows. Tables, figures and verdicts read these."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.streaming import Record, decode

Numbers = list[float | None]
"""A curve over layers; None where a value is not finite."""


@dataclass(frozen=True, kw_only=True)
class ExperimentFile(ResultFile):
    """NAME.json of an experiment: where it was made, its settings, and what its cells found.

    Attributes:
        settings: the options that decide the numbers.
        missing: cells that have no result yet.
        failed: those of them whose last try failed.
        cell_seconds: time of all cells together.
    """

    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    device: str = ""
    seconds: float | None = None
    experiment: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    cell_seconds: float | None = None
    provenance: Provenance = field(default_factory=Provenance)

    @classmethod
    def name(cls) -> str:
        """The name of the experiment."""
        return cls.FILE.removesuffix(".json")

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        path = Path(folder) / cls.FILE
        if not path.exists():
            raise ValueError(f"no {path}: run paper/{cls.name().replace('-', '_')}.py --out {folder} first")
        return cls.read_file(path)

    def made_by(self) -> str:
        """The name of the recipe that the command was given; empty where it was given none."""
        config = re.search(r"--config \S*?([\w-]+)\.yaml", self.command)
        return config[1] if config else ""


# Surrogates


@dataclass(frozen=True, kw_only=True)
class NullCurves(Record):
    """R2 of a null model at layers 1..L, for one token group."""

    r2: Numbers
    bounded_r2: Numbers


@dataclass(frozen=True, kw_only=True)
class GroupCurves(NullCurves):
    """Fidelity of a raptor at layers 1..L, for one token group."""

    pearson: Numbers = field(default_factory=list)
    cosine: Numbers = field(default_factory=list)
    relative: Numbers = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RaptorScores(Record):
    """What the experiments keep of a distillation.

    Attributes:
        phases: their lengths.
        num_steps: training steps by stage.
        num_images: held-out images.
        curves: by token group, `all` included.
        accuracy: under the teacher's own head.
        probe, teacher_probe: under a ridge probe.
        recovery, recovery_head: accuracy as a share of the teacher's, with the ridge probe and with the head.
        parameters: of the blocks.
        nulls: null model -> token group -> curves; empty where they were not measured.
    """

    phases: list[int]
    num_steps: dict[str, int] = field(default_factory=dict)
    seconds: float | None = None
    num_images: int = 0
    curves: dict[str, GroupCurves]
    r2_last: float | None = None
    r2_lowest: float | None = None
    bounded_r2_last: float | None = None
    accuracy: float | None = None
    teacher_accuracy: float | None = None
    agreement: float | None = None
    probe: float | None = None
    teacher_probe: float | None = None
    recovery: float | None = None
    recovery_head: float | None = None
    parameters: int = 0
    nulls: dict[str, dict[str, NullCurves]] = field(default_factory=dict)

    def best_null(self, group: str = "all") -> float | None:
        """R2 at the last layer of the best null model; None where none was measured."""
        known = [curves[group].r2[-1] for curves in self.nulls.values()]
        return max((value for value in known if value is not None), default=None)


# Teachers trained from scratch: stochastic-depth and untrained


@dataclass(frozen=True, kw_only=True)
class TeacherScores(Record):
    """Accuracy of a teacher on held-out and on training images; its block parameters and its training time."""

    accuracy: float
    train_accuracy: float
    parameters: int = 0
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class SimilarityMeans(Record):
    """Means of an (L, L) similarity: off the diagonal, and within phases (None when every phase is one layer)."""

    off_diagonal: float
    within_phases: float | None


@dataclass(frozen=True, kw_only=True)
class TeacherSimilarity(SimilarityMeans):
    """Layer-layer similarity of a teacher by token group, and the phases and means computed from `all`."""

    matrices: dict[str, list[list[float]]] = field(default_factory=dict)
    phases: list[int] = field(default_factory=list)
    means: dict[str, SimilarityMeans] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StochasticDepthRow(Record):
    """A teacher trained with drop probability `p`, and its raptor."""

    cell: str = ""
    p: float
    seed: int
    teacher: TeacherScores
    similarity: TeacherSimilarity
    raptor: RaptorScores


@dataclass(frozen=True, kw_only=True)
class Interval(Record):
    """A value with its 95 % interval."""

    value: float
    lower: float
    upper: float


@dataclass(frozen=True, kw_only=True)
class Correlation(Record):
    """Correlations of `num` pairs; None where they are undefined."""

    num: int
    pearson: Interval | None
    spearman: Interval | None


@dataclass(frozen=True, kw_only=True)
class Trend(Correlation):
    """Trend of y with x.

    Attributes:
        p_rise, p_fall: one-sided permutation p of a rise, and of a fall, as strong as this one.
        first, last: mean of y at the smallest and at the largest x.
    """

    p_rise: float | None
    p_fall: float | None
    first: float | None
    last: float | None


@dataclass(frozen=True, kw_only=True)
class SweepStatistics(Record):
    """Trends against p by measure; correlations of pairs of measures (`x/y`), and the same given p (partial)."""

    trends: dict[str, Trend] = field(default_factory=dict)
    correlations: dict[str, Correlation] = field(default_factory=dict)
    given_p: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StochasticDepth(ExperimentFile):
    FILE = "stochastic-depth.json"

    rows: list[StochasticDepthRow]
    statistics: SweepStatistics = field(default_factory=SweepStatistics)


@dataclass(frozen=True, kw_only=True)
class UntrainedRow(Record):
    """A teacher that is trained, untrained or overfitted (`kind`), and its raptor."""

    kind: str
    seed: int
    teacher: TeacherScores
    similarity: TeacherSimilarity
    raptor: RaptorScores


@dataclass(frozen=True, kw_only=True)
class Untrained(ExperimentFile):
    FILE = "untrained.json"

    rows: list[UntrainedRow]


# Partitions


@dataclass(frozen=True, kw_only=True)
class Ways(Record):
    """Phase lengths of one k: `chosen` by max-cut and by each exact score, and the random ones. One object in JSON."""

    chosen: dict[str, list[int]]
    random: list[list[int]]

    def to_dict(self) -> dict[str, Any]:
        return {**self.chosen, "random": self.random}

    @classmethod
    def from_dict(cls, saved: Any) -> Self:
        ways = dict(decode(dict[str, Any], saved))
        random = decode(list[list[int]], ways.pop("random", None))
        return cls(chosen=decode(dict[str, list[int]], ways), random=random)


@dataclass(frozen=True, kw_only=True)
class PartitionsPlan(Record):
    """plan.json of the partitions experiment: which partitions are tried, decided once.

    made_of: fingerprint of the teacher that `asked` names; images: what is remembered of the training images. Older
    files lack both.
    """

    asked: dict[str, Any]
    similarity: list[list[float]]
    partitions: dict[int, Ways]
    made_of: dict[str, str] = field(default_factory=dict)
    images: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PartitionRow(Record):
    """Scores of the raptor with one partition, under one way of choosing it. Older files lack `teacher_accuracy`."""

    k: int
    way: str
    phases: list[int]
    accuracy: float | None = None
    teacher_accuracy: float | None = None
    probe: float | None = None
    r2_last: float | None = None
    bounded_r2_last: float | None = None
    r2_lowest: float | None = None
    seed: int = 0

    def score(self, measure: str) -> float | None:
        return getattr(self, measure)


@dataclass(frozen=True, kw_only=True)
class ZScore(Record):
    """A value among a sample of `num`: distance from the mean in deviations (`z`), share of the sample below it."""

    value: float
    mean: float | None
    deviation: float | None
    z: float | None
    below: float | None
    num: int


PartitionStatistics = dict[str, dict[str, ZScore]]
"""Way of choosing -> measure -> where its raptor stands among those of the random partitions."""


@dataclass(frozen=True, kw_only=True)
class Partitions(ExperimentFile):
    """partitions.json.

    Attributes:
        longest_phase: by k, the correlation of accuracy with the length of the longest phase, over all partitions.
        maxcut_z: by k, the z of the accuracy of each seed's max-cut raptor among the random partitions.
    """

    FILE = "partitions.json"

    partitions: dict[int, Ways] = field(default_factory=dict)
    similarity: list[list[float]] = field(default_factory=list)
    rows: list[PartitionRow]
    statistics: dict[int, PartitionStatistics]
    longest_phase: dict[int, Correlation] = field(default_factory=dict)
    maxcut_z: dict[int, list[float]] = field(default_factory=dict)


# Swaps


@dataclass(frozen=True, kw_only=True)
class Compared(Record):
    """Means over pairs of blocks within a phase and across phases; `matched` over pairs at equal distance."""

    within: float | None
    across: float | None
    within_matched: float | None
    across_matched: float | None

    def mean(self, kind: str) -> float | None:
        return getattr(self, kind)


@dataclass(frozen=True, kw_only=True)
class SwapRow(Record):
    """Every pair of blocks of one teacher exchanged. The accuracies are None for a model without a classifier.

    Attributes:
        pairs: the blocks exchanged, counted from 1.
        compared: mean angle between the last states by token group; `agreement` too where there is a classifier.
        angle: of each pair, all tokens. angle_std: its deviation over images; None in older files.
        accuracy, swapped_accuracy, compared_accuracy: with all blocks in place, of each pair, and its means.
        without_first, without_first_agreement, without_first_accuracy: means of angle, agreement and accuracy over the
            pairs without block 1.
        num_images: images of the angles.
        matched_std: of the differences at equal distance, as in `dynamics.interventions.Swaps`; empty in older files.
    """

    cell: str = ""
    p: float | None = None
    phases: list[int]
    pairs: list[tuple[int, int]]
    compared: dict[str, Compared]
    angle: list[float]
    angle_std: list[float] | None = None
    finding: str = ""
    accuracy: float | None = None
    swapped_accuracy: list[float] | None = None
    compared_accuracy: Compared | None = None
    chance: float | None = None
    without_first: Compared | None = None
    without_first_agreement: Compared | None = None
    without_first_accuracy: Compared | None = None
    num_images: int = 0
    matched_std: dict[str, list[float | None]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Swaps(ExperimentFile):
    FILE = "swaps.json"

    rows: list[SwapRow]


# Table 2


@dataclass(frozen=True, kw_only=True)
class Refit(Record):
    """Accuracy of surrogate and teacher with the head fitted again; whether it started from the teacher's head."""

    accuracy: float | None
    teacher_accuracy: float | None
    from_head: bool = False


@dataclass(frozen=True, kw_only=True)
class AblationRow(RaptorScores):
    """One training of one row of Table 2; `chance` is the accuracy of a guess, which earlier versions did not keep."""

    row: str
    seed: int
    refit: Refit | None = None
    chance: float | None = None


@dataclass(frozen=True, kw_only=True)
class AblationLine(Record):
    """A row of Table 2: means over `num_seeds` seeds, and the sample deviation of the accuracy over them."""

    number: str
    row: str
    num_steps: dict[str, int] = field(default_factory=dict)
    accuracy: float | None
    teacher_accuracy: float | None
    probe: float | None = None
    teacher_probe: float | None = None
    agreement: float | None = None
    r2_last: float | None = None
    r2_lowest: float | None = None
    num_seeds: int = 1
    deviation: float | None = None


@dataclass(frozen=True, kw_only=True)
class Ablation(ExperimentFile):
    FILE = "ablation.json"

    rows: list[AblationRow] = field(default_factory=list)
    table: list[AblationLine]


# Table 1 and Figure 5


@dataclass(frozen=True, kw_only=True)
class ProbeScores(Record):
    """A linear probe of one model: its score on the reported images, and how it was chosen."""

    score: float | None
    metric: str = ""
    higher_is_better: bool
    size: list[int]
    num_images: dict[str, int] = field(default_factory=dict)
    at_edge: bool
    seconds: float | None = None
    chosen: dict[str, dict[str, float | None]] = field(default_factory=dict)
    last: dict[str, dict[str, float | None]] = field(default_factory=dict)
    picked: dict[str, float | None] = field(default_factory=dict)
    epochs: dict[str, float | None] = field(default_factory=dict)
    num_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class ProbedTeacher(Record):
    """The teacher's cell of Table 1."""

    k: int | None = None
    parameters: int
    probes: dict[str, ProbeScores]


@dataclass(frozen=True, kw_only=True)
class ProbedRaptor(RaptorScores):
    """A cell of Table 1: one surrogate."""

    k: int
    seed: int
    probes: dict[str, ProbeScores]


@dataclass(frozen=True, kw_only=True)
class MeanOverSeeds(Record):
    """Mean and sample deviation over seeds; None where a value is missing, or for the deviation of one."""

    mean: float | None = None
    deviation: float | None = None


@dataclass(frozen=True, kw_only=True)
class TaskScore(MeanOverSeeds):
    """Score of one task; how many of its probes chose the grid's smallest or largest learning rate."""

    size: list[int] = field(default_factory=list)
    at_edge: int = 0
    recovery: MeanOverSeeds | None = None


@dataclass(frozen=True, kw_only=True)
class LastR2(Record):
    """R2 of the last layer, for one token group."""

    r2: MeanOverSeeds
    bounded_r2: MeanOverSeeds = field(default_factory=MeanOverSeeds)


@dataclass(frozen=True, kw_only=True)
class Table1Row(Record):
    """A row of Table 1. `k` is a number as text, or `teacher`, whose row has only scores."""

    k: str
    num_seeds: int = 1
    parameters: int = 0
    scores: dict[str, TaskScore]
    phases: list[int] = field(default_factory=list)
    r2: dict[str, LastR2] = field(default_factory=dict)
    r2_lowest: MeanOverSeeds | None = None
    recovery_head: MeanOverSeeds | None = None
    recovery_ridge: MeanOverSeeds | None = None


@dataclass(frozen=True, kw_only=True)
class Table1(ExperimentFile):
    FILE = "table1.json"

    rows: list[Table1Row]
    cells: dict[str, ProbedRaptor | ProbedTeacher] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Figure5Point(LastR2):
    """A point of Figure 5."""

    k: int
    recovery: MeanOverSeeds


@dataclass(frozen=True, kw_only=True)
class Figure5(ExperimentFile):
    FILE = "figure5.json"

    points: list[Figure5Point]


# Budgets


@dataclass(frozen=True, kw_only=True)
class BudgetRow(Record):
    """One surrogate, trained with one recipe for the budget. `r2` and `cosine` are curves over layers 1..L."""

    recipe: str
    k: int
    phases: str
    parameters_m: float
    teacher_parameters_m: float
    num_steps: dict[str, int]
    seconds: float
    device: str
    recovery: float | None = None
    recovery_head: float | None = None
    agreement: float | None = None
    r2_last: float | None = None
    r2_lowest: float | None = None
    probe: float | None = None
    teacher_probe: float | None = None
    r2: Numbers = field(default_factory=list)
    cosine: Numbers = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Budgets(ExperimentFile):
    FILE = "budgets.json"

    rows: list[BudgetRow]
