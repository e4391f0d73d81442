"""Provenance on the page: a row per file, escaped, and the training curve."""

from __future__ import annotations

from pathlib import Path

from raptor.report.results import Results, TrainingLoss
from raptor.report.section_provenance import provenance


def test_every_file_has_a_row_with_its_command(committed: Results) -> None:
    html = provenance(committed).after
    for name, found in committed.provenance().items():
        assert f'<th scope="row">{name}.json</th>' in html
        assert found.command is None or found.command.split()[0] in html


def test_the_training_curve_is_thinned_and_split_by_stage(tmp_path: Path) -> None:
    training = [TrainingLoss(stage, step, 1.0 / (step + 1)) for stage in ("stage1", "stage2") for step in range(900)]
    (chart,) = provenance(Results(tmp_path, training=training)).charts
    assert [s["name"] for s in chart.series] == ["stage1", "stage2"]
    assert all(len(s["x"]) <= 400 and s["y"] == [1.0 / (x + 1) for x in s["x"]] for s in chart.series)
    assert chart.y["log"] is True
    assert provenance(Results(tmp_path, training=training[:1])).charts == []


def test_the_config_is_text(tmp_path: Path) -> None:
    html = provenance(Results(tmp_path, config={"model": "<b>"})).after
    assert "&lt;b&gt;" in html and "<b>" not in html
