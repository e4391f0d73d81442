"""Every raptor command on every page is one that the command line takes. tests/journeys runs those that can be run."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pages import ROOT, all_commands, command_lines, fenced, pages, read

from raptor import cli

PLACEHOLDERS = {"K": "3", "N": "3", "COMMAND": "phases", "$SLURM_ARRAY_TASK_ID": "1"}


# The other pages show commands as they were recorded, some by earlier versions.
WRITTEN = [page for page in pages() if page not in ("docs/results/claims.md", "paper/results/experiments.md")]


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The command line with functions that only take note of their arguments; models and files need not be there."""
    called: list[dict[str, Any]] = []

    class Module(SimpleNamespace):
        def __getattr__(self, _name: str) -> Any:
            return lambda *_, **options: called.append(options)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(cli, "import_module", lambda _: Module())
    monkeypatch.setattr(Path, "exists", lambda _: True)
    monkeypatch.setattr(cli, "fail_fast_offline", lambda: None)
    monkeypatch.setattr(cli, "load_module", lambda _: object())
    return called


@pytest.mark.parametrize("page", [page for page in WRITTEN if all_commands(page)])
def test_every_command_is_one(page: str, parse_only: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    """No command or option is misspelt or gone, and every value has the type of its option."""
    for words in all_commands(page):
        words = [PLACEHOLDERS.get(word, word).replace("code/raptor", "raptor") for word in words]
        if words[0] in cli.COMMANDS and words[1:] in ([], ["NAME"]):  # the text only names it
            continue
        assert cli.main(words) == 0, f"raptor {' '.join(words)}: {capsys.readouterr().err}"


def test_the_check_sees_what_is_wrong(parse_only: list[dict[str, Any]]) -> None:
    for wrong in ("phases scenes --imges 3", "fases scenes", "distill scenes --k"):
        assert cli.main(wrong.split()) == 2, wrong


def test_all_commands_of_the_product_are_shown() -> None:
    shown = {words[0] for page in pages() for words in all_commands(page)}
    assert set(cli.COMMANDS) <= shown


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    shown = {
        line.split()[1]
        for page in pages()
        for block in fenced(page, "bash")
        for line in command_lines(block.code)
        if line.startswith("make ")
    }
    assert {"demo", "test"} <= shown <= targets
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_extras_exist() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in pages():
        for names in re.findall(r"pip install .*\[([\w,]+)\]", read(page)):
            assert set(names.split(",")) <= set(extras), (page, names)


def test_torchrun_takes_its_options() -> None:
    from torch.distributed.run import get_args_parser

    lines = [line for block in fenced("docs/cluster.md", "bash") for line in command_lines(block.code)]
    launched = [line[line.index("torchrun ") :].strip("'") for line in lines if "torchrun" in line]
    assert len(launched) == 3
    for line in launched:
        options = get_args_parser().parse_args(line.split()[1:])
        assert options.module and options.training_script == "raptor"


def test_named_scripts_and_recipes_exist() -> None:
    for page in WRITTEN:
        named = re.findall(r"(?:paper|raptor)/recipes/[\w-]+\.yaml|paper/\w+\.py", read(page))
        assert all((ROOT / name).exists() for name in named), page


def test_links_of_the_readme_lead_somewhere() -> None:
    """They are relative, so that they work on a code host; mkdocs checks those of the site."""
    links = re.findall(r"\]\(([^)#]+)", read("README.md"))
    assert len(links) > 12 and not [link for link in links if not (ROOT / link).exists()]
