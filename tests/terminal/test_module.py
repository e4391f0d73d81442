"""The user's own model: its exceptions show their frames only, and an exit is no success."""

from __future__ import annotations

from pathlib import Path

import pytest

from raptor.cli import main
from raptor.terminal.module import load_module
from raptor.vit.view import ViT


def test_an_exception_of_your_own_module_shows_only_your_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def inner():\n    return {}['blocks']\n\ndef make_vit():\n    return inner()\n")
    assert main(["phases", "--module", "mine.py:make_vit", "--data", "scenes"]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert told[-1] == "raptor: --module mine.py:make_vit raised KeyError: 'blocks'"
    assert "line 5, in make_vit" in " ".join(told) and "line 2, in inner" in " ".join(told)
    assert not any("cli.py" in line for line in told)


@pytest.mark.parametrize("place", ["sys.exit(0)\n", "def make_vit():\n    sys.exit(0)\n"])
def test_a_module_that_exits_is_no_success(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(f"import sys\n\n{place}")
    assert main(["phases", "--module", f"{tmp_path / 'mine.py'}:make_vit", "--data", "scenes"]) == 2
    assert "raised SystemExit: 0" in capsys.readouterr().err


def test_a_function_or_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from raptor import open_vit\n\nvit = open_vit('scenes')\n\ndef make():\n    return vit\n\nnumber = int\n"
    )
    assert isinstance(load_module(f"{tmp_path / 'mine.py'}:make"), ViT)
    assert isinstance(load_module(f"{tmp_path / 'mine.py'}:vit"), ViT)
    with pytest.raises(ValueError, match=r"gives a int: return an nn.Module or an opened model"):
        load_module(f"{tmp_path / 'mine.py'}:number")
    with pytest.raises(ValueError, match=r"mine.py has no other"):
        load_module(f"{tmp_path / 'mine.py'}:other")
