"""Recipes: the paper's numbers, what is in every file, options over them, wrong entries."""

from __future__ import annotations

import json

import pytest
import yaml
from tiny_run import RECIPE

from raptor.config import DistillConfig, Recipe
from raptor.recipes import FOLDER, recipe_names
from raptor.train.job import stage_shares
from raptor.train.stage import Budget

LAST = {"cls": 0.34, "registers": 0.33, "patches": 0.33}
JOINT = {"cls": 0.45, "registers": 0.10, "patches": 0.45}


@pytest.mark.parametrize(("name", "peak", "lam"), [("paper", 1e-4, 0.5), ("authors", 3e-4, 1.0)])
def test_the_published_recipes(name, peak, lam):
    recipe = Recipe(recipe=name)
    assert (recipe.block, recipe.conditioning, recipe.normalise, recipe.cosine) == ("paper", "mlp", "none", 0.0)
    assert recipe.optimizer == "adamw"
    assert (recipe.lr, recipe.min_lr, recipe.weight_decay, recipe.clip) == (peak, 1e-6, 1e-4, 1.0)
    assert (recipe.batch_size, recipe.lam, recipe.lam_until, recipe.augment) == (64, lam, 0.25, "none")
    assert (recipe.stage1_weights, recipe.mixup, recipe.adapters) == (None, 0.0, 0)
    assert recipe.sizes is None
    assert (recipe.last_phase_weights, recipe.stage2_weights) == (LAST, JOINT)
    shares = stage_shares(DistillConfig("scenes", recipe=name))
    budget = Budget.parse(recipe.budget)
    per_epoch = recipe.epoch_images / recipe.batch_size
    steps = {stage: budget.num_steps(per_epoch, share, None) for stage, share in shares.items()}  # type: ignore[arg-type]
    assert steps == {"stage1": 312_500, "stage2": 312_500}
    assert round(recipe.warmup * 312_500) == 10_000


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_whole_and_says_its_command(name):
    Recipe(recipe=name)
    text = (FOLDER / f"{name}.yaml").read_text()
    header = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    assert "raptor distill" in header
    assert set(yaml.safe_load(text)) >= set(RECIPE)


def test_an_entry_left_out_is_that_of_recipe_adamw(tmp_path):
    """Because older ones name no optimizer. Where weights of token groups are left out every token counts the same."""
    path = tmp_path / "mine.yaml"
    path.write_text("{}")
    named, plain = Recipe(recipe="adamw").entries(), Recipe(recipe=str(path)).entries()
    assert {name for name in plain if plain[name] != named[name]} == {"last_phase_weights", "stage2_weights"}


def test_the_default_recipe_is_adamw_with_another_optimizer_and_its_rate():
    default, adamw = Recipe(recipe="default"), Recipe(recipe="adamw")
    assert (default.optimizer, default.lr) == ("muon", 2e-3) and (adamw.optimizer, adamw.lr) == ("adamw", 1e-3)
    assert Recipe(recipe="default", optimizer="adamw").entries() == adamw.entries()
    assert Recipe(recipe="adamw", optimizer="muon").entries() == default.entries()


def test_a_rate_belongs_to_an_optimizer(tmp_path):
    """Another optimizer by hand takes its share of the recipe's rate; a rate by hand is taken as it is."""
    for name, rate in (("default", 2e-3), ("long", 2e-3), ("vitb16", 1.4e-3), ("paper", 2e-4)):
        assert Recipe(recipe=name, optimizer="muon").lr == rate
        assert Recipe(recipe=name, optimizer="adamw").lr == rate / 2
        for optimizer in ("adamw", "muon", None):
            assert Recipe(recipe=name, optimizer=optimizer, lr=5e-4).lr == 5e-4
    path = tmp_path / "mine.yaml"
    for text, own, other in (
        ("optimizer: muon", 2e-3, 1e-3),
        ("batch_size: 8", 1e-3, 1e-3),
        ("{optimizer: muon, lr: 3e-3}", 3e-3, 1.5e-3),
    ):
        path.write_text(text)
        assert Recipe(recipe=str(path)).lr == own
        assert Recipe(recipe=str(path), optimizer="adamw").lr == other


def test_options_go_over_the_recipe():
    recipe = Recipe(recipe="paper", lr=5e-4, batch_size=None, budget="10steps")
    assert (recipe.lr, recipe.batch_size, recipe.budget) == (5e-4, 64, "10steps")


def test_numbers_that_yaml_takes_for_words(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("lr: 1e-3\nbatch_size: 32.0\nlam_until: .inf\nsizes: [224, 2.8e2]\n")
    recipe = Recipe(recipe=str(path))
    assert (recipe.lr, recipe.batch_size, recipe.lam_until) == (1e-3, 32, float("inf"))
    assert recipe.sizes == [224, 280]
    for entry, message in (
        ("lr: fast", "lr must be a number"),
        ("batch_size: 8.5", "batch_size must be a whole number"),
        ("sizes: [224, a]", "--sizes must be whole numbers, got a"),
        ("lr:", "--lr must be a number, got None"),
        ("sizes: [224, 0]", "--sizes must be at least 1, got 0"),
    ):
        path.write_text(entry)
        with pytest.raises(ValueError, match=message):
            Recipe(recipe=str(path))


def test_a_recipe_with_an_unknown_entry_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps({**RECIPE, "learning_rate": 1}))
    with pytest.raises(ValueError, match="unknown entries: learning_rate"):
        Recipe(recipe=str(path))
    path.write_text("- just\n- a list\n")
    with pytest.raises(ValueError, match="cannot be read"):
        Recipe(recipe=str(path))
    path.write_text("lr: [1\nblock: }")
    with pytest.raises(ValueError, match="cannot be read") as error:
        Recipe(recipe=str(path))
    assert "\n" not in str(error.value)
