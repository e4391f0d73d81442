from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from raptor.cli import read_arguments
from raptor.commands.reproduce import EXPERIMENTS, experiment
from raptor.recipes import FOLDER, recipe_names
from raptor.train.recipe import resolve_recipe


def test_recipes_are_those_of_a_distillation_or_options_of_an_experiment() -> None:
    assert set(recipe_names()) >= {"paper", "authors", "default"}
    for name in recipe_names():
        resolve_recipe(name, {})
    others = [path for path in FOLDER.glob("*.yaml") if "raptor reproduce" in path.read_text()]
    assert len(others) >= 10 and not {path.stem for path in others} & set(recipe_names())
    for path in others:
        command = next(line for line in path.read_text().splitlines() if "raptor reproduce" in line)
        name = command.split("raptor reproduce ")[1].split()[0]
        assert name in EXPERIMENTS and f"--config raptor/recipes/{path.name}" in command
        known = {argument.name for argument in read_arguments(experiment(name))}
        unknown = set(yaml.safe_load(path.read_text())) - known
        assert not unknown, f"{path.name}: {unknown}"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_header_of_a_recipe_gives_command_time_and_expected_result(path: Path) -> None:
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    for word in ("Command: raptor ", "Time: ", "Expected"):
        assert any(line.startswith(f"# {word}") for line in header), word
