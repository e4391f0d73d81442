"""ARCHITECTURE.md names every folder and files that exist, and every file of the package says what it is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
FOLDERS = sorted(path.parent.name for path in (ROOT / "raptor").glob("*/__init__.py"))
BY_COMMANDS = {"recipes", "terminal"}  # what commands read and how they look, not steps of the method


@pytest.mark.parametrize("folder", [name for name in FOLDERS if name not in BY_COMMANDS])
def test_every_folder_is_in_the_map(folder: str) -> None:
    assert f"| `{folder}/` |" in TEXT


def test_every_file_that_is_named_exists() -> None:
    names = set(re.findall(r"`((?:\w+/)+\w+\.\w+)`", TEXT))
    names -= {"tests/x/test_y.py", "raptor/x/y.py"}  # patterns
    assert names, "the walks name files"
    missing = [name for name in names if not (ROOT / "raptor" / name).exists() and not (ROOT / name).exists()]
    assert not missing


def test_two_screens() -> None:
    assert len(TEXT.splitlines()) <= 80 and len(TEXT.split()) <= 900


@pytest.mark.parametrize("path", sorted((ROOT / "raptor").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_says_what_it_is(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert len(text.partition("\n")[0]) > 10
