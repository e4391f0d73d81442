"""raptor demo: its options. tests/journeys/test_wheel.py runs it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_models import tiny_timm

from raptor.commands.demo import Demo, demo
from raptor.commands.report import Page
from raptor.run import RunError
from raptor.vit.saved import save_vit


def test_options_are_checked_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected argument 'devise': did you mean device"):
        demo(str(tmp_path / "demo"), devise="cpu")  # type: ignore[call-arg]
    assert not (tmp_path / "demo").exists()


def test_a_model_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    """The demo saves its surrogate where a run has one."""
    kept = save_vit(tiny_timm(), tmp_path / "mine" / "surrogate") / "model.safetensors"
    before = kept.read_bytes()
    with pytest.raises(RunError, match=r"mine is the run of another model \(.*\): choose another --out"):
        demo(str(tmp_path / "mine"), device="cpu")
    (tmp_path / "mine" / "config.yaml").write_text("model: x")
    with pytest.raises(RunError, match="mine is a run of its own: choose another --out"):
        demo(str(tmp_path / "mine"), device="cpu")
    assert kept.read_bytes() == before


def test_its_result_is_short_and_has_the_findings(tmp_path: Path) -> None:
    page = Page(tmp_path / "report.html", tmp_path, 10, ["summary"])
    findings = ["verdict: trained 9 steps: enough", "phases: three give 7 | 3 | 2"]
    probes = {"depth": SimpleNamespace(recovery=0.9)}
    done = Demo(tmp_path, page, findings, None, None, probes, None)  # type: ignore[arg-type]
    assert done.text() == f"the page: {page.path}"  # the findings are printed as they come
    assert done.to_dict()["page"]["path"] == str(page.path) and done.to_dict()["recovery"] == {"depth": 0.9}
    assert done.table_rows()[0] == {"about": "verdict", "finding": "trained 9 steps: enough"}
    assert len(repr(done)) < 420 and "7 | 3 | 2" in done._repr_html_()
