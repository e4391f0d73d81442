"""Commands that are killed while they write their results: the old file is there or the new one, never half of one."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from fault_cases import Faults
from fault_runs import count_whole, image_folder, whole_results

pytestmark = pytest.mark.slow
COMMANDS = {
    "phases": ["phases", "scenes", "--k", "2", "--twin", "false"],
    "evaluate": ["evaluate", "scenes-k2", "--train_images", "4"],
    "probe": ["probe", "scenes", "--closed_form", "ridge"],
}
NUM = {"phases": "--num_images", "evaluate": "--num_images", "probe": "--num_images"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_killed_before_each_of_its_writes(command: str, tmp_path: Path, faults: Faults) -> None:
    images = image_folder(tmp_path / "images")
    out = tmp_path / "out"
    words = [*COMMANDS[command], "--data", str(images), "--device", "cpu"]
    assert faults.finish("command", out, words=[*words, NUM[command], "3"]) == 0
    old = whole_results(out)
    look = partial(count_whole, old=frozenset(old))
    assert faults.finish("command", out, {"each": look}, words=[*words, NUM[command], "4"]) == 0
    found = json.loads(faults.said())
    for name, number in found.items():
        faults.counts[name] += number
    assert found["kills"] >= 5 and found["lost or damaged"] == 0
    assert whole_results(out) != old and not list(out.rglob("*.tmp"))
