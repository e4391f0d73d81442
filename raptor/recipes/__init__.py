"""Named runs as YAML. The header of each file gives the command, the run time and the expected result."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from raptor.run import parse_yaml, read_text, read_yaml

FOLDER = Path(__file__).parent


def recipe_names() -> list[str]:
    """Names of the recipes for `distill`; the other files hold options of other commands."""
    return sorted(p.stem for p in FOLDER.glob("*.yaml") if "block" in parse_yaml(read_text(p)))


@dataclass(frozen=True)
class Header:
    """What the comment at the top of a recipe says, in running text."""

    about: str
    command: str
    time: str
    expected: str


def read_header(path: Path) -> Header:
    """The comment at the top of a recipe: what it does, then Command, Time and Expected."""
    top = takewhile(lambda line: line.startswith("#"), read_text(path).splitlines())
    lines = [line.removeprefix("#").strip() for line in top]
    found = re.split(r"^(Command|Time|Expected)\b:? ?", "\n".join(lines), flags=re.MULTILINE)
    parts = {name: " ".join(text.split()) for name, text in zip(["about", *found[1::2]], found[::2], strict=True)}
    missing = [name for name in ("Command", "Time", "Expected") if name not in parts]
    if missing:
        raise ValueError(f"the comment at the top of {path} has no line that begins with {missing[0]}")
    return Header(parts["about"], parts["Command"], parts["Time"], parts["Expected"])


def load_recipe(name: str) -> dict[str, Any]:
    """The entries of a recipe, given its name or the path of a YAML file."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        close = difflib.get_close_matches(name, recipe_names(), n=1)
        hint = f": did you mean {close[0]}?" if close else f": choose from {', '.join(recipe_names())}, or a YAML file"
        raise ValueError(f"unknown recipe {name!r}{hint}")
    return read_yaml(path, "write a recipe as in docs/guide.md, name: value on each line")
