from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import ablation
import pytest
import torch
import yaml
from records import Ablation, AblationRow, Refit
from surrogates import Machine, cut_phases

from raptor.data import iterate, open_data
from raptor.train.recipe import resolve_recipe
from raptor.train.schedule import teacher_forcing
from raptor.vit.open import open_vit


def test_each_ablation_row_adds_one_ingredient() -> None:
    recipes = [ablation.row_recipe("paper", row) for row in ablation.ROWS]
    changed = [{key for key in a if a[key] != b[key]} for a, b in pairwise(recipes)]
    assert changed == [
        {"lam", "lam_until"},
        {"conditioning"},
        {"last_phase_weights", "stage2_weights"},  # stage 2 does not run before the last row
        {"stage1_share"},
    ]
    assert [recipe["stage1_share"] for recipe in recipes] == [1.0, 1.0, 1.0, 1.0, 0.5]
    assert recipes[0]["conditioning"] == "none" and recipes[2]["conditioning"] == "mlp"
    lam, until = recipes[0]["lam"], recipes[0]["lam_until"]
    assert {teacher_forcing(step, 1000, lam, until) for step in range(1000)} == {1.0}
    assert teacher_forcing(999, 1000, recipes[1]["lam"], recipes[1]["lam_until"]) == 0.0


def test_the_table_says_over_how_many_seeds_each_row_is() -> None:
    """Rows of a sweep that is not done yet are means over different seeds."""

    def row(name: str, seed: int, accuracy: float) -> AblationRow:
        refit = Refit(accuracy=accuracy + 0.1, teacher_accuracy=0.9) if name == "5-joint" else None
        known = dict(phases=[2, 2], curves={}, num_images=10, teacher_accuracy=0.8)
        return AblationRow(row=name, seed=seed, accuracy=accuracy, refit=refit, **known)

    found = [("1-teacher-forcing", 0, 0.2), ("1-teacher-forcing", 1, 0.4), ("5-joint", 0, 0.5)]
    lines = ablation._summarise([row(*one) for one in found])
    assert [(line.number, line.num_seeds) for line in lines] == [("1", 2), ("5", 1), ("6", 1)]
    assert lines[0].deviation == pytest.approx(0.02**0.5) and lines[1].deviation is lines[2].deviation is None
    table = ablation._table(lines)
    assert (
        "| 1 | teacher forcing only | 0.300 | 0.141 | 2 |" in table and "| 5 | + joint stage | 0.500 | – | – |" in table
    )
    assert "seeds" not in ablation._table(lines[1:])  # one seed each


def test_ablation_rows_have_equal_steps_and_the_untouched_head(
    sweep_folder: Path, tiny: SimpleNamespace, tmp_path: Path
) -> None:
    model = str(sweep_folder / "teachers" / "p0-s0" / "teacher")
    training = dict(k=2, budget="4steps", batch_size=16, refit_epochs=1, lr=3e-3)
    options = dict(**tiny.images, **training, model=model, tokens="patches", out=str(tmp_path))
    done = ablation.run(**options, cells="1-teacher-forcing-s0,5-joint-s0")
    first, joint = done.result.rows
    machine = Machine(tmp_path, "cpu")
    teacher, images = open_vit(model), open_data("scenes", "train", limit=96, size=32)
    assert tuple(first.phases) == cut_phases(teacher, images, 2, machine, "patches").lengths
    assert first.num_steps == {"stage1": 4} and joint.num_steps == {"stage1": 2, "stage2": 2}
    assert Ablation.read(tmp_path) == done.result
    frame = done.to_dataframe()
    assert list(frame["num_steps.stage1"]) == [4, 2] and frame["r2_last"][1] == joint.r2_last
    assert len(repr(done)) < 420 and "teacher forcing only" in done._repr_html_() and done.plot().axes
    assert (tmp_path / "ablation.png") in done.figures
    lines = {line.number: line for line in done.result.table}
    assert list(lines) == ["1", "5", "6"]
    assert lines["6"].accuracy == joint.refit.accuracy and joint.refit.from_head
    # The best of the teacher's head and of those fitted from it, on a split of train: the head itself takes part.
    surrogate = open_vit(tmp_path / "raptors" / "5-joint-s0" / "surrogate")
    batch = next(iter(iterate(open_data("scenes", "val", limit=48, size=32), surrogate.preprocess, 48)))
    with torch.no_grad():
        right = (surrogate(batch.images).argmax(-1) == batch.labels).float().mean().item()
    assert lines["5"].accuracy == pytest.approx(right)
    recipe = resolve_recipe(str(tmp_path / "recipes" / "1-teacher-forcing-s0.yaml"), {})
    assert recipe.lam_until == float("inf") and recipe.last_phase_weights is None
    used = yaml.safe_load((tmp_path / "raptors" / "5-joint-s0" / "config.yaml").read_text())["recipe"]
    assert used["lr"] == done.result.settings["lr"] == 3e-3 != recipe.lr
    with pytest.raises(ValueError, match="--lr must be more than 0"):
        ablation.run(**{**options, "lr": 0.0})
    with pytest.raises(ValueError, match="equal steps"):
        ablation.run(**{**options, "budget": "60s"})
