"""The recipes of the paper's runs: their headers, and what decides a result is written in them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import yaml
from claims_page import read_header
from sweep import read_config

from raptor.config import Recipe

FOLDER = Path(__file__).parents[2] / "paper" / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_header_gives_command_time_and_expected_result(path: Path) -> None:
    header = read_header(path)
    assert set(header) == {"About", "Command", "Time", "Expected"} and all(header.values())
    assert header["Command"].startswith(("python paper/", "raptor dynamics", "raptor phases"))
    assert f"--config paper/recipes/{path.name}" in header["Command"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_has_only_options_of_its_script(path: Path) -> None:
    script = re.search(r"python paper/(\w+)\.py", read_header(path)["Command"])
    if script is None:
        return  # of a command of raptor
    module = importlib.import_module(script[1])
    kind = getattr(module, "".join(part.capitalize() for part in script[1].split("_")))
    assert read_config(kind, ["--config", str(path), "--data", "x"]).data == ["x"]


def test_what_was_recorded_with_adamw_and_what_is_compared_with_it_has_adamw() -> None:
    """Whatever the default recipe is. Table 1 at two minutes was recorded with Muon, and at ten too."""
    for path in RECIPES:
        entries = yaml.safe_load(path.read_text())
        if not re.match("table1|ablation|partitions|stochastic|untrained(?!-twin)", path.stem):
            continue
        is_muon = path.stem in ("table1-two-minutes", "table1-ten-minutes")
        named = entries.get("recipe") or entries.get("base")
        recipe = Recipe(recipe=named, optimizer=entries.get("optimizer"))
        assert recipe.optimizer == ("muon" if is_muon else "adamw"), path.stem
        if is_muon:
            assert recipe.lr == 2e-3, path.stem


def test_a_recipe_that_cuts_names_the_tokens_and_the_teacher() -> None:
    """Whatever is cut by default, and whichever teacher of a sweep is the best: both decide what a run measures."""
    for path in RECIPES:
        entries = yaml.safe_load(path.read_text())
        if re.match("table1|ablation|partitions|swaps|stochastic|untrained-(?!twin)|untrained$", path.stem):
            assert entries.get("tokens") in ("all", "pooled"), path.stem
        if re.match("table1|ablation|partitions|swaps", path.stem):
            assert {"model", "models"} & entries.keys() or path.stem in ("swaps", "swaps-small"), path.stem
