"""The README's and the guide's commands, as they stand there, run on small settings where they would take minutes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from raptor.cli import COMMANDS, build_parser, find_function, join_lists

ROOT = Path(__file__).parents[2]


def fenced(path: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), flags=re.S)


def commands(path: str) -> list[list[str]]:
    """Every `raptor ...` line of a document, continued lines joined, comments removed."""
    text = (ROOT / path).read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("raptor ")]


def test_readme_shows_the_makefiles_two_commands():
    block = fenced("README.md", "bash")[0]
    targets = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", block, flags=re.M):
        assert re.search(rf"^{target}:", targets, flags=re.M)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("document", ["README.md", "docs/guide.md", "docs/gallery.md"])
def test_every_command_in_the_documents_is_one(document):
    """Each command line parses: no option is misspelt or gone."""
    found = commands(document)
    assert found
    for words in found:
        assert words[0] in COMMANDS, words
        function, rest = find_function(words[0], words[1:])
        if function is None:  # it only lists
            continue
        parser = build_parser(words[0], function)
        if words[0] != "models":
            parser.parse_args(join_lists(rest, parser))


def test_the_readmes_python_runs(tmp_path):
    code = fenced("README.md", "python")[0]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("6 | 3 | 3")


SMALL = {
    "phases": "--num_images 64",
    "distill": "--budget 4steps --batch_size 8 --limit 64 --val_images 32 --phase_images 32 --head_images 64",
    "evaluate": "--num_images 32 --train_images 64 --bootstrap 50",
    "probe": "--limit 64 --val_images 32 --epochs 1 --batch_size 16",
    "dynamics": "--num_images 32 --stability_images 1 --intervention_images 2 --rank_images 4",
}


def test_the_readmes_commands_run_in_order(tmp_path):
    """The whole way of a new user, from a model's name to the page."""
    for words in commands("README.md"):
        line = [sys.executable, "-m", "raptor", *words, *SMALL.get(words[0], "").split()]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)
    page = tmp_path / "runs" / "scenes-k3" / "report.html"
    assert page.stat().st_size > 1_000_000
