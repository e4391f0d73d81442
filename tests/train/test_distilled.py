"""The result of a distillation, and its summary as it is written and read."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from PIL import Image
from tiny_run import tiny_run, tiny_teacher, write_recipe

from raptor.files import RunError
from raptor.phases.cut import Phases
from raptor.train import DistillSummary, Scores, distill


def test_a_result_says_its_scores_and_folder(tmp_path):
    done = tiny_run(tmp_path / "run", budget="2steps")
    scores = done.summary.validation
    assert scores.recovery == (scores.probe / scores.teacher_probe if scores.teacher_probe else None)
    scores.recovery = None  # of a teacher that is never right
    assert "recovery" not in done.text()
    scores.recovery = 0.5
    text = done.text()
    assert text.splitlines()[0].endswith("measured on 8 held-out images of scenes")
    assert "phases 2 2, trained on scenes\n" in text and text.endswith(f"run folder {tmp_path / 'run'}")
    assert f"{scores.r2_last:.3f}" in text and f"recovery of the ridge probe {scores.recovery:.1%}" in text
    assert f"ridge probe {scores.probe:.1%} (teacher {scores.teacher_probe:.1%})" in text
    assert "unreadable" not in text and done.summary.bad_images == []


def test_images_passed_over_are_named_in_the_summary(tmp_path):
    for name in [*(f"train/{i:02d}" for i in range(16)), *(f"val/{i:02d}" for i in range(4))]:
        path = tmp_path / "images" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((24, 24), 60).save(path)
        if name in ("train/05", "val/02"):
            path.write_bytes(b"broken")
    options = dict(recipe=write_recipe(tmp_path), phases=[2, 2], budget="4steps", device="cpu")
    with pytest.raises(ValueError, match=r"train/05\.png"):
        distill(tiny_teacher(), str(tmp_path / "images"), out=str(tmp_path / "strict"), **options)
    done = distill(tiny_teacher(), str(tmp_path / "images"), out=str(tmp_path / "run"), skip_bad=True, **options)
    assert done.summary.bad_images == ["train/05.png", "val/02.png"]
    assert "2 unreadable images" in done.text()


def test_a_summary_is_read_as_it_was_written(tmp_path):
    scores = Scores([0.5, None], 0.25, 0.25, [0.9, 0.8], {"all": {"r2": [0.5, None]}}, 7, agreement=0.5)
    facts = tiny_teacher(depth=2).facts()
    summary = DistillSummary(Phases.from_lengths([1, 1]), facts, facts, {"stage1": 3}, 1.5, scores)
    summary.write(tmp_path)
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert saved["phases"] == [1, 1] and saved["validation"]["r2"] == [0.5, None]
    found = DistillSummary.read(tmp_path)
    assert found.provenance.versions and replace(found, provenance=summary.provenance) == summary
    scores.r2_last = math.nan  # of a teacher whose states do not vary
    summary.write(tmp_path)
    assert math.isnan(DistillSummary.read(tmp_path).validation.r2_last)
    (tmp_path / "summary.json").write_text(json.dumps({"accuracy": 0.5, "seconds": 1.0}))
    with pytest.raises(RunError, match=r"summary\.json cannot be read"):
        DistillSummary.read(tmp_path)


def test_a_summary_of_an_earlier_version_is_read(tmp_path):
    """Its validation has no key for what was not measured, and it knows nothing of bad images."""
    tiny_run(tmp_path / "run", budget="2steps")
    path = tmp_path / "run" / "summary.json"
    values = json.loads(path.read_text())
    del values["bad_images"], values["validation"]["recovery"]
    path.write_text(json.dumps({**values, "unknown": 1}))
    old = DistillSummary.read(tmp_path / "run")
    assert old.bad_images == [] and old.validation.recovery is None
    assert old.phases == Phases((2, 2))
