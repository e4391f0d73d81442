from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import untrained
from records import StochasticDepth, Untrained

from raptor.recipes import FOLDER
from raptor.run import RunError


def test_untrained_trained_and_overfitted(sweep_folder: Path, tiny: SimpleNamespace, tmp_path: Path) -> None:
    shared = dict(**tiny.images, **tiny.shape, **tiny.budgets)
    done = untrained.run(**shared, teachers=str(sweep_folder), p=0.5, overfit_images=32, out=str(tmp_path))
    rows = {row.kind: row for row in done.result.rows}
    assert list(rows) == ["trained", "untrained", "overfitted"]
    swept = StochasticDepth.read(sweep_folder).rows[1]
    assert rows["trained"].teacher.accuracy == swept.teacher.accuracy  # the sweep's own, not trained again
    assert rows["trained"].raptor.curves == swept.raptor.curves
    assert not (tmp_path / "teachers" / "trained-s0").exists()
    config = (tmp_path / "teachers" / "overfitted-s0" / "config.yaml").read_text()
    assert "augment: none" in config and "drop: 0.0" in config and "smoothing: 0.0" in config
    assert (tmp_path / "untrained.png").exists()
    assert untrained._in_steps("40epochs", 97) == "3880steps" and untrained._in_steps("60s", 97) == "60s"
    assert Untrained.read(tmp_path) == done.result


@pytest.mark.parametrize(
    ("name", "value"), [("dim", 64), ("teacher_lr", 1e-4), ("teacher_budget", "9steps"), ("limit", 40)]
)
def test_a_teacher_made_another_way_is_not_taken(
    sweep_folder: Path, tiny: SimpleNamespace, tmp_path: Path, name: str, value: Any
) -> None:
    options = {**tiny.images, **tiny.shape, **tiny.budgets, name: value, "teachers": str(sweep_folder), "p": 0.5}
    shown = "images" if name == "limit" else name
    with pytest.raises(RunError, match=rf"every cell failed.*holds another teacher \({shown}: "):
        untrained.run(**options, cells="trained-s0", out=str(tmp_path))


def test_a_recipe_that_was_changed_since_is_refused(sweep_folder: Path, tiny: SimpleNamespace, tmp_path: Path) -> None:
    """Its cells would be given back as those of the recipe that the file holds now."""
    (tmp_path / "mine.yaml").write_text((FOLDER / "adamw.yaml").read_text())
    options = dict(**tiny.images, **tiny.shape, **{**tiny.budgets, "recipe": str(tmp_path / "mine.yaml")}, p=0.5)
    options |= dict(overfit_images=32, cells="untrained-s0", out=str(tmp_path / "out"))
    untrained.run(**options)
    untrained.run(**options)
    (tmp_path / "mine.yaml").write_text(
        (FOLDER / "adamw.yaml").read_text().replace("conditioning: table", "conditioning: none")
    )
    with pytest.raises(RunError, match="recipe"):
        untrained.run(**options)
