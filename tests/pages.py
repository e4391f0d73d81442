"""The pages of the documentation and the code that stands on them.

A fenced block whose title begins with "needs" says on the page why a reader may not be able to run it; tests check it
without running it. A Python block whose title is a file name is that file.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^( *)```(\w+)(?: title=\"([^\"]*)\")?\n(.*?)^\1```$", flags=re.S | re.M)
_INDENTED = re.compile(r"(?:^ {4,}\S.*\n)+", flags=re.M)
_INLINE = re.compile(r"(?<!`)`(raptor [^`]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its title and its lines."""

    language: str
    title: str
    code: str

    @property
    def is_run(self) -> bool:
        return not self.title.startswith("needs ")


def pages() -> list[str]:
    """README and every page of the site, relative to the repository."""
    found = sorted((ROOT / "docs").rglob("*.md"))
    return ["README.md", *(str(path.relative_to(ROOT)) for path in found), "paper/results/experiments.md"]


def read(page: str) -> str:
    return (ROOT / page).read_text()


def fenced(page: str, *languages: str) -> list[Block]:
    """The fenced blocks of a page in their order."""
    found = _FENCE.findall(read(page))
    return [Block(lang, title, textwrap.dedent(code)) for _, lang, title, code in found if lang in languages]


def command_lines(code: str) -> list[str]:
    """The lines of a shell block, continued ones joined, without comments."""
    joined = re.sub(r"\\\n\s*", "", code)
    lines = (re.sub(r"\s#\s.*$", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def raptor_words(line: str) -> list[str] | None:
    """The words after `raptor` in a shell line, also behind torchrun or inside sbatch's --wrap; None without one."""
    words = shlex.split(line)
    if "--wrap" in words:
        words = shlex.split(words[words.index("--wrap") + 1])
    if words[0] == "torchrun":
        words = words[words.index("-m") + 1 :]
    return words[1:] if words[0] == "raptor" else None


def all_commands(page: str) -> list[list[str]]:
    """The words of every raptor command on a page: fenced, indented or in the text."""
    text = read(page)
    shown = [block.code for block in fenced(page, "bash")]
    plain = _FENCE.sub("", text)
    shown += [textwrap.dedent(block) for block in _INDENTED.findall(plain)]
    lines = [line for code in shown for line in command_lines(code)]
    lines = [line for line in lines if line.startswith(("raptor ", "torchrun ", "sbatch "))]
    lines += [" ".join(command.split()) for command in _INLINE.findall(plain)]
    return [words for line in lines if (words := raptor_words(line)) is not None]
