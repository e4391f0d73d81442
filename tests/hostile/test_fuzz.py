"""Any text is parsed, or gives a ValueError of one line: config, run-folder and data-string parsers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raptor.config import Recipe
from raptor.data.archives import expand_ranges, list_files
from raptor.data.by_name import open_data, open_dense
from raptor.data.preprocess import Preprocess
from raptor.files import parse_json, parse_yaml, slug
from raptor.run import load_checkpoint, read_config, read_metrics, read_summary
from raptor.streaming import decode
from raptor.train.loop import LoopState
from raptor.train.stage import Budget
from raptor.vit.open import open_vit

SETTINGS = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
NESTED = st.lists(PLAIN, max_size=3) | st.dictionaries(st.text(max_size=6), PLAIN | st.lists(PLAIN), max_size=3)
VALUES = PLAIN | NESTED | st.lists(NESTED, max_size=2)
WORDS = st.text(alphabet="{}[],.:/*~0123456789abwdszip-tarhf\x00 é", max_size=24)


def parses_or_refuses(parse: Callable[[], Any]) -> None:
    try:
        parse()
    except ValueError as error:
        assert str(error).strip() and "\n" not in str(error)
    except OSError as error:
        assert "\n" not in str(error)


@given(st.text(max_size=60))
@SETTINGS
def test_budgets(text: str) -> None:
    parses_or_refuses(lambda: Budget.parse(text))


@given(WORDS)
@SETTINGS
def test_data_strings(text: str) -> None:
    for parse in (expand_ranges, list_files):
        parses_or_refuses(lambda parse=parse: parse(text))  # type: ignore[misc]
    slug(text)


@given(st.sampled_from(["", "wds/", "cifar10:", "imagenet:", "nyuv2:", "ade20k:", "x.zip,"]), WORDS)
@SETTINGS
def test_names_of_data(kind: str, text: str) -> None:
    parses_or_refuses(lambda: open_data(f"{kind}nowhere-{text}"))
    parses_or_refuses(lambda: open_dense(f"{kind}nowhere-{text}"))


@given(WORDS)
@SETTINGS
def test_names_of_models(text: str) -> None:
    parses_or_refuses(lambda: open_vit(f"nowhere/{text}"))


@given(st.text(max_size=80))
@SETTINGS
def test_yaml_and_json(text: str) -> None:
    parses_or_refuses(lambda: parse_yaml(text))
    parses_or_refuses(lambda: parse_json(text))


@given(st.dictionaries(st.sampled_from(list(Recipe.__dataclass_fields__)), VALUES, max_size=4))
@SETTINGS
def test_recipes(tmp_path: Path, values: dict[str, Any]) -> None:
    (tmp_path / "recipe.yaml").write_text(json.dumps(values))
    parses_or_refuses(lambda: Recipe(recipe=str(tmp_path / "recipe.yaml")))


@given(st.dictionaries(st.sampled_from(list(Preprocess.__dataclass_fields__)), VALUES, max_size=4))
@SETTINGS
def test_preprocessing(values: dict[str, Any]) -> None:
    parses_or_refuses(lambda: decode(Preprocess, values))


@given(st.dictionaries(st.sampled_from(list(LoopState.__dataclass_fields__)), VALUES, max_size=4) | VALUES)
@SETTINGS
def test_states_of_checkpoints(values: Any) -> None:
    parses_or_refuses(lambda: LoopState.from_dict(values))


@given(st.sampled_from(["config.yaml", "summary.json", "metrics.jsonl", "checkpoint/latest"]), st.binary(max_size=60))
@SETTINGS
def test_run_folders(tmp_path: Path, file: str, content: bytes) -> None:
    (tmp_path / "checkpoint").mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(content)
    for read in (read_config, read_summary, read_metrics, load_checkpoint):
        parses_or_refuses(lambda read=read: read(tmp_path))  # type: ignore[misc]


KEYS = ["name", "base", "preprocess", "structure", "num_classes", "classes", "surrogate", "teacher", "inner_surrogates"]


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
@settings(SETTINGS, max_examples=25)
def test_configs_of_models(world: Path, values: dict[str, Any]) -> None:
    from hostile_world import copied

    folder = copied(world, "teacher", "fuzzed")
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | values))
    parses_or_refuses(lambda: open_vit(folder))


@pytest.mark.parametrize("text", ["9" * 400 + "s", "1..2s", "٣s", "1e5s", "infs", "nansteps", "-1s"])
def test_odd_budgets(text: str) -> None:
    parses_or_refuses(lambda: Budget.parse(text))
