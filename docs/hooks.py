"""Build hooks of the site: options of commands, read from their configs as `--help` reads them; quiet notebooks."""

from __future__ import annotations

import os
import re
from typing import Any

from raptor.checks import in_words
from raptor.config import COMMANDS
from raptor.terminal.help import EXAMPLES, OptionText, options_of


def on_config(_config: Any) -> None:
    """Notebooks show results, not the warnings of other packages."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace a line `{{ options NAME }}` by the table of that command's options."""
    return re.sub(r"^\{\{ options (\S+) \}\}$", lambda found: _describe(found[1]), markdown, flags=re.M)


def _describe(name: str) -> str:
    rows = [_row(option) for option in options_of(COMMANDS[name][0])]
    examples = "\n".join(f"    {line}" for line in EXAMPLES[name])
    table = "\n".join(["| option | values | default | |", "|---|---|---|---|", *rows])
    return f"{examples}\n\n{table}\n"


def _row(option: OptionText) -> str:
    default = f"`{option.default}`" if option.default else ""
    cells = (f"`{option.shown}`", in_words(option.kind), default, option.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
