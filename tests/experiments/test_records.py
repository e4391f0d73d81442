"""Every result that is in the docs can be read, and nothing of it is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raptor.experiments.records import (
    Ablation,
    ExperimentFile,
    Figure5,
    NullCurves,
    Partitions,
    StochasticDepth,
    Swaps,
    Table1,
    Untrained,
    Ways,
)
from raptor.run import RunError

DOCS = Path(__file__).parents[2] / "docs" / "results" / "experiments"
KINDS = {kind.name(): kind for kind in (Ablation, Figure5, Partitions, StochasticDepth, Swaps, Table1, Untrained)}


def lost(old: Any, new: Any, where: str = "") -> list[str]:
    """Where `new` differs from `old`, apart from keys that only `new` has."""
    if isinstance(old, dict) and isinstance(new, dict):
        missing = [f"{where}.{key}" for key in old if key not in new]
        return missing + [w for key in old if key in new for w in lost(old[key], new[key], f"{where}.{key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [w for i, (a, b) in enumerate(zip(old, new)) for w in lost(a, b, f"{where}[{i}]")]
    return [] if old == new else [where]


BESIDE = ("training", "other-images")  # beside table1.json: of its trainings, and its surrogate on other images
RESULTS = [path for path in sorted(DOCS.glob("*/*.json")) if path.stem not in BESIDE]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_result_in_the_docs_is_read_and_written_unchanged(path: Path) -> None:
    saved = json.loads(path.read_text())
    if path.stem == "nulls":  # null models measured later, for rows of untrained.json
        for row in saved["rows"]:
            for groups in row["nulls"].values():
                assert all(NullCurves.from_dict(curves).to_dict() == curves for curves in groups.values())
        return
    kind: type[ExperimentFile] = KINDS[saved["experiment"]]
    assert lost(saved, kind.read(path.parent).to_dict()) == []


def test_the_docs_hold_results_of_every_kind() -> None:
    found = {json.loads(path.read_text()).get("experiment") for path in DOCS.glob("*/*.json")}
    assert set(KINDS) <= found


def test_ways_are_one_object_in_json() -> None:
    ways = Ways(chosen={"maxcut": [7, 5], "dp-mean": [6, 6]}, random=[[1, 11]])
    assert ways.to_dict() == {"maxcut": [7, 5], "dp-mean": [6, 6], "random": [[1, 11]]}
    assert Ways.from_dict(ways.to_dict()) == ways


def test_what_is_not_there_or_damaged_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run raptor reproduce swaps --out"):
        Swaps.read(tmp_path)
    (tmp_path / "swaps.json").write_text('{"rows": 3}')
    with pytest.raises(RunError, match=r"swaps.json cannot be read \(rows: expected a list.*run the command"):
        Swaps.read(tmp_path)
