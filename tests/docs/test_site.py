"""The site builds without a warning, its notebooks run, and a reader's browser fetches nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import ROOT

import raptor
from raptor.cli import COMMANDS

pytestmark = pytest.mark.slow
REMOTE = re.compile(
    r"(?:<(?:script|img|iframe|source)[^>]*\ssrc|<link[^>]*\shref)=\"(https?:)?//|@import|url\(\"?https?:"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` makes. mkdocs raises when there is a warning, such as a dead link or anchor."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder)))
    return folder


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    loaded = {
        str(path.relative_to(site)): found[0]
        for path in site.rglob("*.*")
        if path.suffix in (".html", ".css") and (found := REMOTE.search(path.read_text()))
    }
    assert not loaded


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    pages = {path: path.read_text() for path in (site / "api").glob("*.html")}
    for name in raptor.__all__:
        headings = [
            path.stem for path, text in pages.items() if re.search(rf"<h2 id=\"raptor\.(?:\w+\.)*{name}\"", text)
        ]
        assert len(headings) == 1, (name, headings)


def test_every_command_has_its_options(site: Path) -> None:
    text = (site / "api" / "commands.html").read_text()
    assert all(f"raptor {name}<" in text for name in COMMANDS)
    assert text.count("<table>") == len(COMMANDS) and "{{" not in text


@pytest.mark.parametrize(
    ("notebook", "ending"),
    [
        ("phases-and-dynamics", "cls turns by"),
        ("distil-certify-probe", "MB"),
        ("recurrence-as-a-tool", "of the lost agreement comes back"),
    ],
)
def test_notebooks_show_their_results(site: Path, notebook: str, ending: str) -> None:
    text = (site / "notebooks" / f"{notebook}.html").read_text()
    assert ending in text and "data:image/png" in text and "Traceback" not in text
