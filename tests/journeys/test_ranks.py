"""Every long command on two processes (gloo, on the CPU) writes the numbers that one process writes.

As a script: command lines given as JSON, run one after the other, so that the two processes load torch only once.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import train_tiny

from raptor.cli import main
from raptor.fidelity import certificate

ROOT = Path(__file__).parents[2]
# 13 images in batches of 4: the ranks have unequal shares, and the last batch is short.
MEASURED = ["--data", "scenes", "--num_images", "13", "--batch_size", "4", "--device", "cpu"]
PROBED = [
    "probe",
    "MODEL",
    "--data",
    "scenes",
    "--limit",
    "14",
    "--val_images",
    "5",
    "--epochs",
    "2",
    "--device",
    "cpu",
]
COMMANDS = {
    "classify": [*PROBED, "--lrs", "0.01", "0.1", "--epochs", "2", "--batch_size", "5"],
    "closed-form": [*PROBED, "--closed_form", "ridge", "--batch_size", "5"],
    "segment": [*PROBED, "--task", "segment", "--size", "24", "--lrs", "0.01", "--epochs", "2", "--batch_size", "5"],
    "depth": [*PROBED, "--task", "depth", "--size", "24", "--lrs", "0.01", "--epochs", "2", "--batch_size", "5"],
    "one-by-one": [
        *PROBED,
        "--task",
        "depth",
        "--size",
        "24",
        "--lrs",
        "0.01",
        "--epochs",
        "2",
        "--batch_size",
        "1",
        "--limit",
        "4",
    ],
    "phases": ["phases", "MODEL", *MEASURED, "--k", "2"],
    "standardised": ["phases", "MODEL", *MEASURED, "--k", "2", "--standardise", "true", "--tokens", "all"],
    "one-image": ["phases", "MODEL", *MEASURED, "--num_images", "1", "--k", "2"],
    "one-followed": ["dynamics", "MODEL", *MEASURED, "--num_images", "1", "--k", "2"],
    "evaluate": ["evaluate", "RUN", *MEASURED, "--train_images", "9", "--bootstrap", "20"],
    "dynamics": [
        *("dynamics", "RUN", *MEASURED, "--batch_size", "3", "--rank_images", "5", "--stability_images", "5"),
        *("--num_classes", "2", "--intervention_images", "3"),
    ],
    "one-certified": ["evaluate", "RUN", *MEASURED, "--num_images", "1", "--train_images", "5", "--bootstrap", "20"],
}
DIFFERENT = ("provenance", "seconds", "folder")
"""Keys that hold times and places."""


def words(name: str, model: str, run: str, out: Path) -> list[str]:
    places = {"MODEL": model, "RUN": run}
    return [*(places.get(word, word) for word in COMMANDS[name]), "--out", str(out / name)]


def numbers(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of JSON by their path, without times and places."""
    if isinstance(value, dict):
        pairs = [(str(key), entry) for key, entry in value.items() if key not in DIFFERENT]
    elif isinstance(value, list):
        pairs = [(str(i), entry) for i, entry in enumerate(value)]
    else:
        return {path: value}
    return {leaf: v for key, entry in pairs for leaf, v in numbers(entry, f"{path}.{key}").items()}


def same(one: Any, two: Any) -> bool:
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=1e-6, abs_tol=1e-6)
    return one == two


def written(folder: Path) -> dict[str, Any]:
    """Every number in the JSON files of a folder."""
    files = sorted(folder.glob("*.json"))
    return {f"{path.name}{leaf}": v for path in files for leaf, v in numbers(json.loads(path.read_text())).items()}


@pytest.fixture(scope="module")
def outs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Where one process and two have written the results of all commands."""
    folder = tmp_path_factory.mktemp("ranks")
    train_tiny(folder / "teacher", budget="4steps", seed=3)
    model, run = str(folder / "teacher"), str(folder / "run")
    common = ["--data", "scenes", "--limit", "64", "--val_images", "13", "--device", "cpu"]
    torch.manual_seed(0)
    assert (
        main(["distill", model, *common, "--phases", "2", "1", "--budget", "4steps", "--batch_size", "8", "--out", run])
        == 0
    )
    one, two = folder / "one", folder / "two"
    with pytest.MonkeyPatch.context() as patch:
        save_time(patch)
        for name in COMMANDS:
            assert main(words(name, model, run, one)) == 0
    torchrun({name: words(name, model, run, two) for name in COMMANDS})
    return one, two


def save_time(patch: pytest.MonkeyPatch) -> None:
    """No figures are drawn, and run times are not measured for a second each."""
    patch.setattr("matplotlib.figure.Figure.savefig", lambda *_args, **_options: None)
    patch.setattr(certificate, "run_times", lambda models, *_: dict.fromkeys(models, 1.0))


def torchrun(lines: dict[str, list[str]]) -> None:
    """This file as a script on two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run([*command, json.dumps(lines)], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", COMMANDS)
def test_two_processes_write_what_one_writes(outs: tuple[Path, Path], name: str) -> None:
    one, two = (written(folder / name) for folder in outs)
    assert one and one.keys() == two.keys()
    different = {leaf: (one[leaf], two[leaf]) for leaf in one if not same(one[leaf], two[leaf])}
    assert not different, f"{len(different)} of {len(one)}: {dict(list(different.items())[:5])}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    save_time(pytest.MonkeyPatch())
    codes = {name: main(line) for name, line in json.loads(sys.argv[1]).items()}
    sys.exit(0 if not any(codes.values()) else f"{codes}")
