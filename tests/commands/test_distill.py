"""raptor distill: the command is the library's function; what is printed is what is saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raptor.cli import main
from raptor.commands.distill import distill
from raptor.train import distill as library_distill


def test_the_command_is_the_librarys_function() -> None:
    assert distill is library_distill


def test_a_short_run_prints_its_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "distill scenes --phases 6 6 --budget 2steps --batch_size 4 --train_images 16 --num_images 8"
    assert main([*words.split(), "--device", "cpu", "--out", str(tmp_path / "run"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    saved = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert printed["folder"] == str(tmp_path / "run") and printed["phases"] == saved["phases"] == [6, 6]
    assert printed["validation"] == saved["validation"]


def test_the_time_is_told_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = dict(phases=[6, 6], budget="2steps", batch_size=4, train_images=8, num_images=4)
    distill("scenes", "scenes", out=str(tmp_path / "run"), **options)  # type: ignore[arg-type]
    lines = capsys.readouterr().err.splitlines()
    told = next(line for line in lines if line.startswith("distill: about "))
    assert "training +" in told and told.endswith("measuring")
