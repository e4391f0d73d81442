"""Every command, given twice, writes the same results, and they say with which versions, options and images."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fault_runs import image_folder

from raptor.cli import COMMANDS, main
from raptor.provenance import versions
from raptor.run import ResultFile

pytestmark = pytest.mark.slow
CPU = "--device cpu --num_workers 0"
MODEL = "--size 24 --patch 8 --dim 16 --depth 3 --heads 2 --registers 1"
LINES = [
    f"train-teacher --data images {MODEL} --budget 3steps --batch_size 4 --out teacher {CPU}",
    f"distill teacher --data images --k 2 --budget 4steps --batch_size 4 --num_images 6 --out run {CPU}",
    f"phases run --k 2 --num_images 6 --out run {CPU}",
    f"head run --num_images 6 --train_images 6 --batch_size 4 --budget 2steps {CPU}",
    f"evaluate run --num_images 6 --train_images 6 {CPU}",
    f"probe run --closed_form ridge {CPU}",
    f"probe run --task segment --data scenes --train_images 4 --num_images 2 --budget 1epochs --lr 0.1 --size 24 {CPU}",
    f"dynamics run --num_images 6 {CPU}",
    f"watch run --num_images 8 --false_alarms 0.5 {CPU}",
    f"correct run --num_images 6 --extra 1 {CPU}",
    "report run --device cpu",
    f"states run --num_images 4 {CPU}",
]
NO_JSON = {
    "demo": "runs the commands above one after the other",
    "study": "runs phases, dynamics and report",
    "models": "only prints",
    "show": "writes pictures",
    "depth": "its numbers are times",
    "edit": "needs a model that tells classes apart",
    "explore": "serves a page",
    "export": "its numbers are of the file that it writes",
}
TIME = re.compile(r"seconds|images_per_s|run_time")
"""Fields that tell the time."""


def without_time(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_time(entry) for key, entry in value.items() if not TIME.search(key)}
    return [without_time(entry) for entry in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON files of all commands by name, made twice, in two folders."""
    images = image_folder(tmp_path_factory.mktemp("data") / "images")
    found: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        for number in range(2):
            folder = tmp_path_factory.mktemp(f"made-{number}")
            (folder / "images").symlink_to(images)
            patch.chdir(folder)
            for line in LINES:
                patch.setattr("sys.argv", ["raptor", *line.split()])
                assert main(line.split()) == 0, line
            files = sorted(path for path in folder.rglob("*.json") if "checkpoint" not in path.parts)
            found.append({str(path.relative_to(folder)): json.loads(path.read_text()) for path in files})
    return found[0], found[1]


def test_the_same_command_writes_the_same_json(twice) -> None:
    first, second = twice
    assert first.keys() == second.keys() and len(first) > 12
    for name in first:
        assert without_time(first[name]) == without_time(second[name]), name


def test_every_result_says_where_it_came_from(twice) -> None:
    assert {"python", "torch", "raptor", "numpy", "timm"} <= versions().keys()
    for name, saved in twice[0].items():
        if name.endswith("config.json"):  # how to build a model
            continue
        about = saved["provenance"]
        assert about["versions"] == versions() and {"python", "torch", "raptor", "numpy", "timm"} <= set(versions()), (
            name
        )
        assert about["command"].startswith("raptor ") and len(about["config"]) == 16, name
        assert about["images"] and all(len(entry["fingerprint"]) == 32 for entry in about["images"]), name


def test_every_command_is_among_them() -> None:
    assert {line.split()[0] for line in LINES} == COMMANDS.keys() - NO_JSON.keys()


def _kinds(kind: type) -> set[type]:
    return {kind} | {lower for direct in kind.__subclasses__() for lower in _kinds(direct)}


def test_every_kind_of_result_keeps_its_provenance() -> None:
    """What is written is stamped by one rule (`raptor.provenance.stamped`); what is read must give it back."""
    import raptor.commands.states
    import raptor.report.results  # noqa: F401

    kinds = [kind for kind in _kinds(ResultFile) if kind.__module__.startswith("raptor.") and hasattr(kind, "FILE")]
    assert len(kinds) > 8
    for kind in kinds:
        within_another = kind.__name__ == "ProbeResult"  # read as a part of ProbeReport, which has it
        assert within_another or "provenance" in kind.__dataclass_fields__, kind
        assert kind.write_file is ResultFile.write_file, f"{kind} is written without a stamp"
