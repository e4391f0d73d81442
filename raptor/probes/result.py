"""What a probe found: scores of every head on the split, and the reported scores of two picks."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from raptor.fidelity.heads import share_kept
from raptor.probes.train import Pick, Trained
from raptor.streaming import jsonable


@dataclass
class ProbeResult:
    """Scores of a linear probe.

    `chosen` picks (learning rate, epoch) by the split of train; `last` picks the learning rate alone, at the last
    epoch. Means and deviations (sample, None for one seed) are over seeds. With a closed form the grid holds
    penalties instead of learning rates, and the one epoch is 0.
    """

    task: str
    model: str
    layer: int
    metric: str
    higher_is_better: bool
    size: tuple[int, int]
    grid: list[float]
    closed_form: str | None
    runs: list[Trained]
    num_images: dict[str, int]
    settings: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def score(self) -> float:
        """The reported score of the chosen heads, mean over seeds."""
        return self.summary("chosen")["mean"][self.metric]

    @property
    def head(self) -> tuple[Tensor, Tensor]:
        """weight (C, F) and bias (C,) of the seed whose chosen head is best on the split."""
        sign = 1 if self.higher_is_better else -1
        scores = [run.chosen.split_score for run in self.runs]
        best = max(range(len(scores)), key=lambda i: -math.inf if math.isnan(scores[i]) else sign * scores[i])
        return self.runs[best].chosen.head

    @property
    def at_edge(self) -> bool:
        """Whether a chosen value is the smallest or largest of its grid: a wider grid may then do better."""
        ends = (min(self.grid), max(self.grid))
        return len(self.grid) > 1 and any(run.chosen.value in ends and run.chosen.epoch > 0 for run in self.runs)

    def summary(self, which: str) -> dict[str, dict[str, Any]]:
        """Mean and deviation over seeds of each reported score, for `chosen` or `last`."""
        picks = [_picked(run, which) for run in self.runs]
        columns = {name: [pick.reported[name] for pick in picks] for name in picks[0].reported}
        deviation = {name: stdev(values) if len(values) > 1 else None for name, values in columns.items()}
        return {"mean": {name: fmean(values) for name, values in columns.items()}, "deviation": deviation}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; a score that is not a number is None."""
        values = {
            "task": self.task,
            "model": self.model,
            "layer": self.layer,
            "metric": self.metric,
            "higher_is_better": self.higher_is_better,
            "size": list(self.size),
            "grid": list(self.grid),
            "closed_form": self.closed_form,
            "num_images": self.num_images,
            "settings": self.settings,
            "at_edge": self.at_edge,
            "seconds": round(self.seconds, 3),
            "chosen": self.summary("chosen"),
            "last": self.summary("last"),
            "seeds": [_run_to_dict(run) for run in self.runs],
        }
        return jsonable(values)

    def save(self, folder: str | Path) -> Path:
        """Write `probe.json` and the head, `head.safetensors` (weight, bias), into `folder`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weight, bias = self.head
        metadata = {"task": self.task, "model": self.model, "layer": str(self.layer)}
        save_file(
            {"weight": weight.cpu().contiguous(), "bias": bias.cpu().contiguous()},
            folder / "head.safetensors",
            metadata,
        )
        (folder / "probe.json").write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")
        return folder


def recovery(surrogate: ProbeResult, teacher: ProbeResult) -> float | None:
    """Share of the teacher's score that the surrogate keeps; for errors, teacher / surrogate. None of a score of 0."""
    if surrogate.metric != teacher.metric:
        raise ValueError(f"cannot compare {surrogate.metric} with {teacher.metric}; probe both on one task")
    return share_kept(surrogate.score, teacher.score, teacher.higher_is_better)


def _picked(run: Trained, which: str) -> Pick:
    assert which in ("chosen", "last"), which
    return run.chosen if which == "chosen" else run.last


def _run_to_dict(run: Trained) -> dict[str, Any]:
    def pick(p: Pick) -> dict[str, Any]:
        return {"value": p.value, "epoch": p.epoch, "split_score": p.split_score, "reported": p.reported}

    return {
        "seed": run.seed,
        "epochs": run.epochs,
        "split_scores": run.split_scores,
        "chosen": pick(run.chosen),
        "last": pick(run.last),
    }
