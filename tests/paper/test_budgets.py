"""The budgets experiment: done once, refused for other options, nothing on stdout."""

from __future__ import annotations

import json
from pathlib import Path

import budgets
import pytest
from tiny_models import tiny_timm

from raptor.run import RunError
from raptor.vit.saved import save_vit

SMALL = dict(k=[2], paper_k=[], budget="2steps", limit=128, val_images=32, device="cpu")


def test_options_are_compared_before_a_result_is_reused(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = save_vit(tiny_timm("vit_small_patch14_reg4_dinov2", reg_tokens=2, num_classes=5), tmp_path / "tiny")
    options = dict(model=str(teacher), out=str(tmp_path / "out"), **SMALL)
    first = budgets.run(**options)
    assert capsys.readouterr().out == ""
    row = json.loads((tmp_path / "out" / "budgets.json").read_text())["rows"][0]
    assert (row["recipe"], row["k"]) == ("default", 2)
    assert sum(map(int, row["phases"].split("+"))) == 4
    assert first.table.count("\n") == 2 and "| default | 2 |" in first.table

    def not_again(*_args: object, **_options: object) -> None:
        raise AssertionError("distilled twice")

    monkeypatch.setattr(budgets, "distill", not_again)
    assert budgets.run(**options).result.rows == first.result.rows
    with pytest.raises(RunError, match="seed: 0 -> 1"):
        budgets.run(seed=1, **options)
