"""Named runs as YAML. The header of each file gives the command, the run time and the expected result."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent


def recipe_names() -> list[str]:
    """Names of the recipes for `distill`; the other files hold options of other commands."""
    return sorted(p.stem for p in FOLDER.glob("*.yaml") if "block" in yaml.safe_load(p.read_text()))


def load_recipe(name: str) -> dict[str, Any]:
    """The entries of a recipe, given its name or the path of a YAML file."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        close = difflib.get_close_matches(name, recipe_names(), n=1)
        hint = f": did you mean {close[0]}?" if close else f": choose from {', '.join(recipe_names())}, or a YAML file"
        raise ValueError(f"unknown recipe {name!r}{hint}")
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not a recipe: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a recipe: it holds a {type(values).__name__}")
    return values
