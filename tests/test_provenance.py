"""Where a result came from."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from raptor.provenance import Provenance, provenance, versions


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("/usr/bin/raptor", "raptor phases 'my model' --k 2"),
        ("/x/raptor/__main__.py", "raptor phases 'my model' --k 2"),
        ("benchmarks/scenes.py", "python scenes.py phases 'my model' --k 2"),
    ],
)
def test_the_command_can_be_pasted_into_a_shell(monkeypatch: pytest.MonkeyPatch, program: str, command: str) -> None:
    monkeypatch.setattr(sys, "argv", [program, "phases", "my model", "--k", "2"])
    found = provenance(time.monotonic() - 2.0)
    assert found["command"] == command
    assert found["device"] == "cpu" and found["seconds"] == pytest.approx(2.0, abs=0.2)
    assert found["versions"]["torch"] == torch.__version__ and found["versions"] == versions()


def test_a_provenance_comes_back() -> None:
    made = Provenance.since(time.monotonic())
    assert Provenance.from_dict(made.to_dict()) == made
