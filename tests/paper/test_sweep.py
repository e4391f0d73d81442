"""What the scripts share: the command line with recipes, cells that are done once, tables and JSON."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sweep import Json, SweepConfig, as_json, data_label, markdown, read_config, run_cells

PAPER = Path(__file__).parents[2] / "paper"


@dataclass(kw_only=True)
class Tiny(SweepConfig):
    """A sweep."""

    k: list[int]
    out: str = "runs/tiny"


def test_the_scripts_use_only_what_the_library_exports() -> None:
    import raptor
    from raptor import dynamics
    from raptor.config import COMMANDS

    exported = {
        "raptor": set(raptor.__all__) | {"__version__"},
        "raptor.commands": {name.replace("-", "_") for name in COMMANDS},
        "raptor.dynamics": set(dynamics.__all__),
    }
    for path in PAPER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("raptor"):
                strange = {alias.name for alias in node.names} - exported.get(node.module or "", set())
                assert not strange, f"{path.name} takes {strange} from {node.module}"
            if isinstance(node, ast.Import):
                assert {alias.name for alias in node.names if alias.name.startswith("raptor")} <= {"raptor"}, path.name


def test_a_recipe_gives_defaults_and_what_is_typed_wins(tmp_path: Path, capsys: Any) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("k: [2, 3]\nlimit: 5\n")
    found = read_config(Tiny, ["--config", str(recipe), "--data", "a", "b", "--limit", "7", "--compile", "False"])
    assert found == Tiny(data=["a", "b"], k=[2, 3], limit=7, compile=False)
    with pytest.raises(SystemExit):
        read_config(Tiny, ["--config", str(recipe)])  # without data
    assert "data" in capsys.readouterr().err
    recipe.write_text("kk: 2\n")
    with pytest.raises(SystemExit, match="no option is called kk"):
        read_config(Tiny, ["--config", str(recipe), "--data", "a"])


def test_a_cell_is_done_once_and_only_with_equal_options(tmp_path: Path) -> None:
    done: list[int] = []

    def work(options: Json) -> Json:
        done.append(options["value"])
        if options["value"] == 3:
            raise ValueError("a fault")
        return {"square": options["value"] ** 2}

    config = Tiny(data=["a"], k=[2], out=str(tmp_path))
    cells = {name: {"value": value} for name, value in (("a", 1), ("b", 2), ("c", 3))}
    config.cells = ["b"]
    assert run_cells(config, cells, work) == {"b": {"square": 4}}
    config.cells = None
    with pytest.raises(ValueError, match="a fault"):
        run_cells(config, cells, work)
    cells["c"] = {"value": 4}
    assert run_cells(config, cells, work) == {"a": {"square": 1}, "b": {"square": 4}, "c": {"square": 16}}
    assert done == [2, 1, 3, 4]
    with pytest.raises(ValueError, match=r"b\.json was made with other options \(value: 2 -> 5\): choose another"):
        run_cells(config, {**cells, "b": {"value": 5}}, work)
    config.cells = ["d"]
    with pytest.raises(ValueError, match="no cell 'd': choose from a, b, c"):
        run_cells(config, cells, work)


def test_what_decides_no_result_is_no_option_of_a_cell() -> None:
    config = Tiny(data=["a"], k=[2], device="cpu", num_workers=3, compile=True, cells=["x"])
    assert config.options() == {"data": ["a"], "val": None, "limit": None, "val_images": None, "k": [2]}


def test_json_has_lists_and_no_numbers_that_are_not_finite() -> None:
    found = as_json({"a": np.array([1.0, np.nan]), 2: (np.float64(3), float("inf")), "c": [None, "x"]})
    assert found == {"a": [1.0, None], "2": [3.0, None], "c": [None, "x"]}
    json.dumps(found, allow_nan=False)


def test_tables_leave_out_optional_columns_without_values() -> None:
    table = markdown(["a", "b", "c"], [[1, None, 0.5], ["x|y", None, None]], optional=["b"])
    assert table.splitlines() == ["| a | c |", "| --- | --- |", "| 1 | 0.500 |", "| x\\|y | – |"]


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        ("data/tiny-imagenet-100-*.zip", "tiny-imagenet-100"),
        ("cifar10:/tmp/x", "cifar10"),
        (["data/imagenet-20-train.zip", "nyuv2:PATH"], "imagenet-20 + nyuv2"),
        ("scenes", "scenes"),
    ],
)
def test_data_is_named_without_its_folder(spec: Any, label: str) -> None:
    assert data_label(spec) == label
