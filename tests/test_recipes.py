from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from raptor.config import DistillConfig, Recipe
from raptor.recipes import FOLDER, recipe_names
from raptor.terminal.help import options_of


def test_named_recipes_resolve() -> None:
    assert set(recipe_names()) >= {"paper", "authors", "default"}
    for name in recipe_names():
        Recipe(recipe=name)


def test_recipes_that_are_compared_with_adamw_have_adamw() -> None:
    """Whatever the default recipe is."""
    of_assets = yaml.safe_load((FOLDER / "scenes-surrogate.yaml").read_text())["recipe"]
    for name in ("adamw", "authors", "paper", "quick", "vitb16", of_assets):
        assert Recipe(recipe=name).optimizer == "adamw", name


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_header_of_a_recipe_gives_command_time_and_expected_result(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"^# Command: raptor ", text, re.M) and text.startswith("# ")
    assert re.search(r"^# Time: ", text, re.M) and re.search(r"^# Expected\b", text, re.M)


def test_recipes_of_imagenet_give_the_predicted_times() -> None:
    """For every model of predicted.json, and with options that `distill` has."""
    predicted = json.loads((FOLDER.parents[1] / "docs" / "results" / "predicted.json").read_text())["models"]
    known = DistillConfig.kinds().keys()
    seen = {}
    for path in FOLDER.glob("imagenet-*.yaml"):
        text = path.read_text()
        assert set(yaml.safe_load(text)) <= known
        assert "--budget 200steps" in text and "torchrun --nnodes=4" in text
        for name, rate, *numbers in re.findall(
            r"timm/(\w+)\.\w+: ([\d,]+) images/s on 1 GPU; hours on 1, 8, 32: ([\d.]+), ([\d.]+), ([\d.]+);", text
        ):
            seen[name] = (int(rate.replace(",", "")), *map(float, numbers))
    expected = {name: (m["images_per_s"], *(m["hours"][n] for n in ("1", "8", "32"))) for name, m in predicted.items()}
    assert seen == expected


def test_recipes_of_imagenet_say_what_was_measured() -> None:
    """Rates and memory of the shapes that trained at full size; the other recipes say that theirs are predicted."""
    results = FOLDER.parents[1] / "docs" / "results" / "scale"
    rows = {row["case"]: row for row in json.loads((results / "full-size.json").read_text())["rows"]}
    for size in ("base", "large"):
        text = (FOLDER / f"imagenet-{size}.yaml").read_text().replace("\n#  ", "")
        row = rows[f"{size}:64"]
        assert row["num_steps"] == 200 and row["finite"] and f"imagenet-{size}" in text and row["device"] in text
        kinds = row["images_per_s_by_kind"]
        shown = [f"{row['images_per_s']:,.0f}", *(f"{kinds[kind]:,.0f}" for kind in kinds)]
        forced = r"([\d,]+) images/s over the whole recipe \((\d+) in stage 1 with teacher forcing, "
        found = re.search(forced + r"([\d,]+) without, ([\d,]+) in stage 2\)", text)
        assert found and list(found.groups()) == shown
        memory = f"Peak {row['peak_gib']:.1f} GiB; the allocator reserved {row['reserved_gib']:.1f} GiB"
        assert memory in text and f"so {row['hours_of_the_recipe']:.1f} hours" in text
        assert f"takes {rows[f'{size}:8']['step_peak_gib']:.1f} GiB" in text
    for size in ("small", "giant"):
        assert "not measured yet" in (FOLDER / f"imagenet-{size}.yaml").read_text().lower()


def test_the_help_names_every_recipe() -> None:
    """As the error for an unknown one does."""
    (told,) = (option.help for option in options_of(DistillConfig) if option.name == "recipe")
    words = told.partition("or a YAML file")[0]
    assert sorted(name for name in re.split(r"[,\s]+", words) if name) == recipe_names()
