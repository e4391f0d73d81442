"""What a reader of the README and of the site types, page by page and in order, on small settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pages import ROOT, command_lines, fenced, pages, raptor_words
from PIL import Image

from raptor.cli import main

SMALL = {
    "phases": "--num_images 32 --twin false",
    "distill": "--budget 4steps --batch_size 8 --train_images 64 --num_images 16",
    "evaluate": "--num_images 16 --train_images 32",
    "probe": "--train_images 32 --num_images 16 --budget 1epochs --batch_size 16",
    "export": "--num_images 16",
    "dynamics": "--num_images 16 --sample_images 2",
}
"""Options that make a command short; they take the place of those on the page."""

ELSEWHERE = {"demo": "tests/journeys/test_wheel.py", "explore": "tests/commands/test_explore.py"}


DONE: set[str] = set()
"""Commands that were run in this process. Pages share a folder, and what one page has done no other repeats."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few photographs in two classes."""
    path = tmp_path_factory.mktemp("desk")
    random = np.random.default_rng(0)
    for position in range(24):
        folder = path / "photos" / ("cat", "dog")[position % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (60, 80, 3), dtype=np.uint8)).save(folder / f"{position}.jpg")
    return path


def runs_of(page: str) -> list[tuple[str, str]]:
    """What a reader does on a page in its order: files to write, shell lines to type, Python to run."""
    steps: list[tuple[str, str]] = []
    for block in fenced(page, "bash", "python"):
        if block.is_run and block.language == "python":
            steps.append((block.title or "python", block.code))
        elif block.is_run:
            steps += [("bash", line) for line in command_lines(block.code)]
    return steps


def shortened(words: list[str]) -> list[str]:
    """A command with its options in `SMALL` instead of the same ones on the page."""
    small, kept = SMALL.get(words[0], "").split(), list(words)
    for option in small[::2]:
        if option in kept:
            del kept[kept.index(option) : kept.index(option) + 2]
    return [*kept, *small]


@pytest.mark.slow
@pytest.mark.usefixtures("drawn_figures")
@pytest.mark.parametrize("page", [page for page in pages() if runs_of(page)])
def test_everything_on_a_page_runs(
    page: str, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(desk)
    monkeypatch.syspath_prepend(str(desk))
    names: dict[str, object] = {}
    for kind, code in runs_of(page):
        if kind.endswith(".py"):
            (desk / kind).write_text(code)
        elif kind == "python":
            exec(compile(code, page, "exec"), names)
        elif (words := raptor_words(code)) and words[0] not in ELSEWHERE and code not in DONE:
            DONE.add(code)
            done = main(shortened(words))
            assert done == 0, f"{page}: {code}: {capsys.readouterr().err}"


@pytest.mark.parametrize("page", [page for page in pages() if runs_of(page)])
def test_a_page_makes_the_runs_it_uses(page: str) -> None:
    """A reader who begins with this page is not sent to a folder that another page made."""
    made: set[str] = set()
    for kind, code in runs_of(page):
        words = (raptor_words(code) or []) if kind == "bash" else []
        used = {word for word in words if word.startswith("runs/")}
        made |= {words[position + 1] for position, word in enumerate(words) if word == "--out"}
        assert used <= made, f"{code}: {used - made} was not made on this page"


def test_commands_that_are_run_elsewhere_have_a_test() -> None:
    assert all((ROOT / path).exists() for path in ELSEWHERE.values())


def test_the_package_is_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "raptor", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("raptor ")
