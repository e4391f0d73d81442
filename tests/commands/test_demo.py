"""raptor demo: its options. tests/journeys/test_wheel.py runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from raptor.commands.demo import demo


def test_options_are_checked_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected argument 'devise': did you mean 'device'"):
        demo(str(tmp_path / "demo"), devise="cpu")  # type: ignore[call-arg]
    assert not (tmp_path / "demo").exists()
