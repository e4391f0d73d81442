"""`import raptor` is quick, and names of the library load on first use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import raptor


def test_every_name_is_there() -> None:
    for name in raptor.__all__:
        assert callable(getattr(raptor, name)), name


def test_types_and_places_agree() -> None:
    tree = ast.parse(Path(raptor.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        (node.module, alias.name) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert typed == {(module, name) for module, names in raptor._PLACES.items() for name in names}


def test_dir_and_version() -> None:
    assert dir(raptor) == sorted([*raptor.__all__, "__version__", "commands"])  # none of what the module itself imports
    assert raptor.__version__[0].isdigit()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'open_vitt'"):
        getattr(raptor, "open_vitt")  # noqa: B009


def test_a_command_is_reached_from_the_package() -> None:
    code = "import raptor; print(raptor.commands.study.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "study"


@pytest.mark.parametrize("name", ["phases", "evaluate"])  # a part of the library, and no name of it
def test_the_place_of_a_command_is_said(name: str) -> None:
    code = f"import raptor; raptor.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"no attribute '{name}': the command is raptor.commands.{name}" in done.stderr


def test_importing_raptor_imports_nothing_heavy() -> None:
    code = "import sys, raptor; print([m for m in ('torch', 'timm', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
