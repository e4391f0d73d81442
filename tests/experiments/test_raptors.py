from __future__ import annotations

from pathlib import Path

from raptor.experiments.raptors import best_teacher
from raptor.experiments.records import RaptorScores, StochasticDepth


def test_the_best_teacher_is_the_most_accurate_one(sweep_folder: Path) -> None:
    rows = {row.cell: row for row in StochasticDepth.read(sweep_folder).rows}
    best = Path(best_teacher(sweep_folder)).parent.name
    assert rows[best].teacher.accuracy == max(row.teacher.accuracy for row in rows.values())


def test_without_null_models_there_is_no_best_one() -> None:
    assert RaptorScores(phases=[2, 2], curves={}).best_null() is None
