"""What a probe found, as it is written to JSON and read back: scores of every head on the split, and of two picks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from raptor.certificate.heads import share_kept
from raptor.certificate.linear_head import classes_metadata
from raptor.certificate.verdict import named_images
from raptor.files import replacing
from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.streaming import NotSaved, Record
from raptor.subject import Subject

_FEW_IMAGES = 64  # fewer scored images, or trained steps, make a recovery say little
_FEW_STEPS = 10
HeadTensors = tuple[Tensor, Tensor]
"""weight (C, F) and bias (C,)."""

Score = float | None
"""A score; NaN while it is computed and None in a file, where a head diverged."""


@dataclass
class Pick(Record):
    """A head of the grid: its learning rate (or penalty) and epoch, its score on the split, its reported scores."""

    value: float
    epoch: int
    split_score: Score
    reported: dict[str, Score] = field(default_factory=dict)
    head: NotSaved[HeadTensors | None] = None


@dataclass
class SeedRun(Record):
    """One seed's run: `split_scores[e][g]` after each of `epochs` (0 is the initial head), and two picks.

    `num_steps` were trained of the `planned_steps` of all epochs; None of a closed form.
    """

    seed: int
    epochs: list[int]
    split_scores: list[list[Score]]
    chosen: Pick
    last: Pick
    num_steps: int | None = None
    planned_steps: int | None = None


@dataclass
class Scores(Record):
    """Mean and sample deviation (None for one seed) over seeds of each reported score."""

    mean: dict[str, Score]
    deviation: dict[str, Score]

    @classmethod
    def over(cls, picks: Sequence[Pick]) -> Scores:
        scores = cls({}, {})
        for name in picks[0].reported:
            # One diverged seed leaves no mean: fmean of NaN is NaN.
            values = [_number(pick.reported[name]) for pick in picks]
            scores.mean[name] = fmean(values)
            scores.deviation[name] = stdev(values) if len(values) > 1 else None
        return scores


@dataclass
class ProbeSettings(Record):
    """How the heads were trained; None where it does not apply (a closed form, no time limit)."""

    epochs: int | float | None
    batch_size: int
    weight_decay: float | None
    precision: str
    train_data: str
    val_data: str
    init_head: str
    max_seconds: float | None = None


@dataclass
class ProbeResult(ResultFile):
    """Scores of a linear probe; `probe.json` beside the head.

    `chosen` picks (learning rate, epoch) by the split of train; `last` picks only the learning rate, at the last epoch.
    With a closed form the grid holds penalties instead of learning rates, and the only epoch is 0. `chance` is the
    accuracy of a guess among the classes; None of other tasks. `floors` holds the reported metric of predictors that do
    not see the image, such as one class for all.
    """

    FILE = "probe.json"

    task: str
    model: str
    layer: int
    metric: str
    higher_is_better: bool
    size: tuple[int, int]
    grid: list[float]
    closed_form: str | None
    num_images: dict[str, int]
    settings: ProbeSettings
    seeds: list[SeedRun]
    seconds: float = 0.0
    chance: float | None = None
    floors: dict[str, Score] = field(default_factory=dict)
    subject: Subject | None = None
    classes: NotSaved[list[str] | None] = None  # that the head's outputs stand for

    @property
    def chosen(self) -> Scores:
        return Scores.over([run.chosen for run in self.seeds])

    @property
    def last(self) -> Scores:
        return Scores.over([run.last for run in self.seeds])

    @property
    def score(self) -> float:
        """The reported score of the chosen heads, mean over seeds."""
        return _number(self.chosen.mean[self.metric])

    @property
    def head(self) -> HeadTensors:
        """weight (C, F) and bias (C,) of the seed whose chosen head is best on the split."""
        head = max(self.seeds, key=lambda run: rank(run.chosen.split_score, self.higher_is_better)).chosen.head
        assert head is not None, "a result that was read from a file has no heads"
        return head

    @property
    def at_edge(self) -> bool:
        """Whether a chosen value is the smallest or largest of its grid: a wider grid may then be better."""
        if len(self.grid) < 2:
            return False
        ends = (min(self.grid), max(self.grid))
        # At epoch 0 no learning rate has been used.
        return any(run.chosen.value in ends and run.chosen.epoch > 0 for run in self.seeds)

    @property
    def num_steps(self) -> int | None:
        """Steps that each seed was trained; None of a closed form."""
        return self.seeds[0].num_steps

    @property
    def unfinished(self) -> str | None:
        """What to say beside the score of a run that did not reach its planned steps."""
        run = self.seeds[0]
        if run.num_steps is None or run.planned_steps is None or run.num_steps >= run.planned_steps:
            return None
        return f"only {run.num_steps} of {run.planned_steps} planned steps"

    def to_dict(self) -> dict[str, Any]:
        """The fields and what follows from them: `at_edge`, `unfinished`, `chosen` and `last`."""
        saved = {**super().to_dict(), "at_edge": self.at_edge, "seconds": round(self.seconds, 3)}
        saved["unfinished"] = self.unfinished
        seeds = saved.pop("seeds")
        return {**saved, "chosen": self.chosen.to_dict(), "last": self.last.to_dict(), "seeds": seeds}

    def save(self, folder: str | Path) -> Path:
        """Write `probe.json` and the head, `head.safetensors` (weight, bias, names of its classes), into `folder`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weight, bias = self.head
        tensors = {"weight": weight.cpu().contiguous(), "bias": bias.cpu().contiguous()}
        metadata = {"task": self.task, "model": self.model, "layer": str(self.layer)}
        with replacing(folder / "head.safetensors") as partial:
            save_file(tensors, partial, metadata | classes_metadata(self.classes))
        self.write(folder)
        return folder


@dataclass
class ProbeReport(ResultFile):
    """`probe-TASK.json`: the probes of a teacher and, given a run, of its surrogate on one task."""

    provenance: Provenance
    data: str
    task: str
    results: dict[str, ProbeResult]
    split: str = "val"
    subject: Subject | None = None

    @property
    def recovery(self) -> float | None:
        """Share of the teacher's score that the surrogate keeps; None without a surrogate, or at unequal steps."""
        if "surrogate" not in self.results or self.unequal is not None:
            return None
        return recovery(self.results["surrogate"], self.results["teacher"])

    @property
    def floors(self) -> dict[str, float]:
        """The share of the teacher's score that predictors keep which see no image: a recovery is read against them."""
        teacher = self.results.get("teacher")
        if teacher is None:
            return {}
        found = {}
        for name, score in teacher.floors.items():
            share = share_kept(score, teacher.score, teacher.higher_is_better)
            if share is not None and math.isfinite(share):
                found[name] = share
        return found

    @property
    def images(self) -> str:
        """What was scored: how many images, of which part of the data, and their size."""
        known = next(iter(self.results.values()))
        size = " x ".join(str(side) for side in dict.fromkeys(known.size))
        return named_images(known.num_images.get("reported"), self.split, self.data, size)

    @property
    def caution(self) -> str | None:
        """Why a recovery says little; None where there is none, or no reason is known."""
        if self.recovery is None:
            return None
        teacher = self.results["teacher"]
        reasons = []
        num = teacher.num_images.get("reported", 0)
        if teacher.chance is not None and num:
            # The standard error of a guess on as many images.
            error = math.sqrt(teacher.chance * (1 - teacher.chance) / num)
            if teacher.score <= teacher.chance + 2 * error:
                reasons.append(f"the teacher is no better than a guess ({teacher.chance:.1%})")
        if num < _FEW_IMAGES:
            reasons.append(f"only {num} images were scored")
        if teacher.num_steps is not None and teacher.num_steps < _FEW_STEPS:
            reasons.append(f"only {teacher.num_steps} steps were trained")
        if not reasons:
            return None
        return f"this recovery says little: {', and '.join(reasons)}"

    @property
    def unequal(self) -> str | None:
        """Why the two scores cannot be compared: the sides were not trained for the same number of steps."""
        steps = {side: result.num_steps for side, result in self.results.items()}
        if len(set(steps.values())) <= 1:
            return None
        counts = " and ".join(f"{num} of the {side}" for side, num in steps.items())
        return f"no recovery: the probes were trained for unequal steps ({counts})"

    def to_dict(self) -> dict[str, Any]:
        """The fields, `recovery`, its `floors`, why it says little (`caution`) or is left out (`unequal`)."""
        found = {"recovery": self.recovery, "floors": self.floors, "caution": self.caution, "unequal": self.unequal}
        return {**super().to_dict(), **found}

    def write(self, folder: str | Path) -> Path:
        return self.write_file(Path(folder) / f"probe-{self.task}.json")

    @classmethod
    def read(cls, folder: str | Path, task: str = "classify") -> ProbeReport:
        return cls.read_file(Path(folder) / f"probe-{task}.json")


def rank(score: Score, higher_is_better: bool) -> float:
    """Higher is better; a head that diverged is the worst."""
    # max() keeps a NaN that comes first.
    if score is None or math.isnan(score):
        return -math.inf
    return score if higher_is_better else -score


def recovery(surrogate: ProbeResult, teacher: ProbeResult) -> float | None:
    """Share of the teacher's score that the surrogate keeps; for errors, teacher / surrogate. None of a score of 0."""
    if surrogate.metric != teacher.metric:
        raise ValueError(f"cannot compare {surrogate.metric} with {teacher.metric}; probe both on one task")
    return share_kept(surrogate.score, teacher.score, teacher.higher_is_better)


def _number(score: Score) -> float:
    return math.nan if score is None else score
