"""Named runs as YAML. The header of each file gives the command, the run time and the expected result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raptor.checks import near_miss
from raptor.files import parse_yaml, read_text, read_yaml

FOLDER = Path(__file__).parent


def recipe_names() -> list[str]:
    """Names of the recipes for `distill`; the other files hold options of other commands."""
    return sorted(p.stem for p in FOLDER.glob("*.yaml") if "block" in parse_yaml(read_text(p)))


def load_recipe(name: str) -> dict[str, Any]:
    """The entries of a recipe, given its name or the path of a YAML file."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        choices = f"{', '.join(recipe_names())}, or a YAML file"
        raise ValueError(f"unknown recipe {name!r}{near_miss(name, recipe_names(), choices)}")
    return read_yaml(path, "write a recipe as in docs/guide.md, name: value on each line")
