"""Configs: the same options at a terminal and in Python, checked once, with a near miss for an unknown name."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from raptor.config import COMMANDS, DistillConfig, PhasesConfig, ReportConfig
from raptor.terminal.help import options_of


def test_an_unknown_name_is_a_type_error_as_in_any_function() -> None:
    with pytest.raises(TypeError, match="unexpected argument 'devce': did you mean device"):
        PhasesConfig.of("scenes", devce="cpu")
    with pytest.raises(TypeError, match="takes 1 positional arguments, got 2"):
        PhasesConfig.of("scenes", "more")
    with pytest.raises(TypeError, match="two values for models"):
        PhasesConfig.of("scenes", models="scenes")


def test_objects_pass_unchecked() -> None:
    model, pair = object(), (object(), object())
    config = DistillConfig.of(model, pair, start=model)
    assert config.model is model and config.data == pair and config.start is model
    assert PhasesConfig(model).models == [model] and PhasesConfig([model], k=3).k == [3]


def test_what_does_not_go_together() -> None:
    with pytest.raises(ValueError, match="--weights goes with one model"):
        PhasesConfig(["scenes", "scenes-k3"], weights=__file__)


@pytest.mark.parametrize("entry", ["hand_over", "average_last", "head_weight"])
def test_an_entry_of_stage_2_is_refused_with_stage_1(entry: str) -> None:
    with pytest.raises(ValueError, match=f"--{entry} is of stage 2, which --stage 1 leaves out"):
        DistillConfig("scenes", stage="1", **{entry: 0.2})
    assert getattr(DistillConfig("scenes", stage="2", start="scenes-k3", **{entry: 0.2}), entry) == 0.2


def test_a_stage_by_itself_keeps_the_entries_of_its_recipe_when_a_module_takes_the_place_of_the_model() -> None:
    config = DistillConfig("scenes", stage="1", recipe="vitb16-head")
    assert config.head_weight and config.stage2_weights
    assert dataclasses.replace(config, model="scenes-k2").entries() == config.entries()


def test_the_folder_of_the_images_is_not_written_to(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is the folder of the images: choose another --out"):
        PhasesConfig("scenes", data=["scenes", str(tmp_path)], out=f"{tmp_path}/.")


def test_a_model_is_opened_with_the_options_that_a_command_has() -> None:
    shared = {"weights": None, "trust_hub": False, "teacher": "scenes", "allow_other_teacher": False}
    assert ReportConfig("tests", teacher="scenes").opening() == shared
    assert PhasesConfig("scenes", teacher="scenes", size=32).opening() == {**shared, "size": 32, "pretrained": True}


def test_configs_import_nothing_heavy() -> None:
    code = "import sys, raptor.config; print([m for m in ('torch', 'timm', 'numpy', 'tyro') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_is(name: str) -> None:
    for option in options_of(COMMANDS[name]):
        assert option.help.endswith(".") and len(option.help) > 5, option.name
