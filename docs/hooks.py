"""Build hooks of the site: options of commands, read from the source as `--help` reads them; quiet notebooks."""

from __future__ import annotations

import inspect
import os
import re
from typing import Any

from raptor.cli import COMMANDS, EXAMPLES, in_words, read_arguments


def on_config(_config: Any) -> None:
    """Notebooks show results, not the warnings of other packages."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace a line `{{ options NAME }}` by the table of that command's options."""
    return re.sub(r"^\{\{ options (\S+) \}\}$", lambda found: _describe(found[1]), markdown, flags=re.M)


def _describe(name: str) -> str:
    where, _text = COMMANDS[name]
    rows = [_row(argument) for argument in read_arguments(where)]
    examples = "\n".join(f"    {line}" for line in EXAMPLES[name])
    table = "\n".join(["| option | values | default | |", "|---|---|---|---|", *rows])
    return f"{examples}\n\n{table}\n"


def _row(argument: Any) -> str:
    name = f"`{argument.metavar}`" if argument.is_positional else f"`--{argument.name}`"
    default = "" if argument.default in (inspect.Parameter.empty, None, "") else f"`{_as_typed(argument.default)}`"
    cells = (name, in_words(argument.kind), default, argument.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _as_typed(value: Any) -> str:
    """A default as one would type it: lists as words, `true` for True."""
    if isinstance(value, list | tuple):
        return " ".join(_as_typed(entry) for entry in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
