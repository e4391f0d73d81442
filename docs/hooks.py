"""Build hooks of the site: the options of commands, the first line of every file, and quiet notebooks."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

from raptor.checks import in_words
from raptor.config import COMMANDS
from raptor.terminal.help import OptionText, about, options_of


def on_config(_config: Any) -> None:
    """Notebooks show results, not the warnings of other packages."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `{{ commands }}` by a section for each command, and `{{ files }}` by a line for each file."""
    if "{{ commands }}" in markdown:
        markdown = markdown.replace("{{ commands }}", "\n\n".join(map(_describe, COMMANDS)))
    return markdown.replace("{{ files }}", _list_files())


def _list_files() -> str:
    package = Path(__file__).parents[1] / "raptor"
    lines = []
    for path in sorted(package.rglob("*.py")):
        # Parsed rather than imported: some files need a GPU or an extra.
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        if path.name != "__init__.py":
            lines.append(f"- `{path.relative_to(package)}`: {text.partition(chr(10))[0]}")
    return "\n".join(lines)


def _describe(name: str) -> str:
    rows = [_row(option) for option in options_of(COMMANDS[name])]
    what, words = about(name)
    examples = "\n".join(f"    {line}" for line in words)
    table = "\n".join(["| option | values | default | |", "|---|---|---|---|", *rows])
    return f"## raptor {name}\n\n{what}\n\n{examples}\n\n{table}\n"


def _row(option: OptionText) -> str:
    default = f"`{option.default}`" if option.default else ""
    cells = (f"`{option.shown}`", in_words(option.kind), default, option.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
