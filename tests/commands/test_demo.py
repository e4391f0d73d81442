"""raptor demo: what it says at the end, and the page it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from raptor.cli import main
from raptor.commands.demo import demo


def test_options_are_checked_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected argument 'devise': did you mean 'device'"):
        demo(str(tmp_path / "demo"), devise="cpu")  # type: ignore[call-arg]
    assert not (tmp_path / "demo").exists()


@pytest.mark.slow
def test_the_demo_ends_with_findings_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out), "--budget", "2steps", "--num_images", "32", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    for step in range(1, 7):
        assert f"== {step} of 6" in printed
    assert (
        "phases: three give" in printed and "verdict: " in printed and "probes: share of the teacher's score" in printed
    )
    assert printed.strip().endswith(f"the page: {out / 'report.html'}")
    assert (out / "report.html").stat().st_size > 1_000_000
    names = ("phases", "certificate", "probe-classify", "probe-segment", "probe-depth", "dynamics", "interventions")
    assert all((out / f"{name}.json").is_file() for name in names)
