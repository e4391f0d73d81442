"""Every long command on two processes (gloo, on the CPU) writes the numbers that one process writes.

The processes are forked from one that has loaded torch, with the variables that torchrun or srun would set. Each pair
runs its command lines one after the other. `tests/train/test_parallel.py` goes through torchrun itself.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import start
from quick import blank_figures
from tiny_run import train_tiny

from raptor.certificate import measure
from raptor.cli import main

# 13 images in batches of 4: the ranks have unequal shares, and the last batch is short.
MEASURED = ["--data", "scenes", "--num_images", "13", "--batch_size", "4", "--device", "cpu"]
ONE = ["--data", "scenes", "--num_images", "1", "--batch_size", "4", "--device", "cpu"]
ODD = ["--data", "scenes", "--num_images", "13", "--batch_size", "3", "--device", "cpu"]
PROBED = ["probe", "MODEL", "--data", "scenes", "--train_images", "14", "--num_images", "5", "--device", "cpu"]
FEW_PROBED = ["probe", "MODEL", "--data", "scenes", "--train_images", "4", "--num_images", "5", "--device", "cpu"]
DENSE = ["--size", "24", "--lr", "0.01", "--budget", "2epochs"]
# At such a learning rate the weights stay as they are, and only what is measured can differ.
STILL = ["--data", "scenes", "--train_images", "64", "--num_images", "13", "--batch_size", "8", "--budget", "2steps"]
STILL += ["--lr", "1e-12", "--device", "cpu"]
COMMANDS = {
    "phases": ["phases", "MODEL", *MEASURED, "--k", "2", "--twin", "true"],
    "standardised": ["phases", "MODEL", *MEASURED, "--k", "2", "--standardise", "true", "--tokens", "all"],
    "one-image": ["phases", "MODEL", *ONE, "--k", "2", "--twin", "true"],
    "distill": ["distill", "MODEL", *STILL, "--k", "2"],
    "evaluate": ["evaluate", "RUN", *MEASURED, "--train_images", "9"],
    "one-certified": ["evaluate", "RUN", *ONE, "--train_images", "5"],
    "dynamics": [
        *("dynamics", "RUN", *ODD, "--sample_images", "5", "--num_classes", "2"),
    ],
    "one-followed": ["dynamics", "MODEL", *ONE, "--k", "2"],
    "classify": [*PROBED, "--lr", "0.01", "0.1", "--budget", "2epochs", "--batch_size", "5"],
    "closed-form": [*PROBED, "--closed_form", "ridge", "--batch_size", "5"],
    "segment": [*PROBED, "--task", "segment", *DENSE, "--batch_size", "5"],
    "depth": [*PROBED, "--task", "depth", *DENSE, "--batch_size", "5"],
    "one-by-one": [*FEW_PROBED, "--task", "depth", *DENSE, "--batch_size", "1"],
    "states": ["states", "MODEL", "--data", "scenes", "--num_images", "9", "--batch_size", "2", "--device", "cpu"],
}
PLANNED = ["--train_images", "64", "--num_images", "13", "--batch_size", "8", "--device", "cpu", "--dry_run", "--json"]
PLANS = {
    "distill": ["distill", "MODEL", "--data", "scenes", *PLANNED, "--k", "2", "--budget", "6steps"],
}
DIFFERENT = ("provenance", "seconds", "folder", "num_processes")
"""Keys that hold times and places."""
HASHED = (".surrogate.fingerprint", ".subject.weights")
"""The fingerprint of weights that two processes train to the same values only up to rounding."""

Place = tuple[str, str]
"""The teacher and the run that commands are about."""


def words(line: Sequence[str], place: Place, out: Path) -> list[str]:
    places = dict(zip(("MODEL", "RUN"), place))
    return [*(places.get(word, word) for word in line), "--out", str(out)]


def numbers(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of JSON by their path, without times and places."""
    if isinstance(value, dict):
        pairs = [(str(key), entry) for key, entry in value.items() if key not in DIFFERENT]
    elif isinstance(value, list):
        pairs = [(str(i), entry) for i, entry in enumerate(value)]
    else:
        return {} if path.endswith(HASHED) else {path: value}
    return {leaf: v for key, entry in pairs for leaf, v in numbers(entry, f"{path}.{key}").items()}


def same(one: Any, two: Any) -> bool:
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=1e-6, abs_tol=1e-6)
    return one == two


def written(folder: Path) -> dict[str, Any]:
    """Every number in the JSON files and arrays of a folder."""
    found = {f"{path.name}{leaf}": v for path in folder.glob("*.json") for leaf, v in _leaves(path).items()}
    arrays = {path.name: np.load(path).ravel().tolist() for path in folder.glob("*.npy")}
    return found | {f"{name}[{i}]": v for name, values in arrays.items() for i, v in enumerate(values)}


def _leaves(path: Path) -> dict[str, Any]:
    return numbers(json.loads(path.read_text()))


def check_same(one: Path, two: Path) -> None:
    ours, theirs = written(one), written(two)
    assert ours and ours.keys() == theirs.keys()
    different = {leaf: (ours[leaf], theirs[leaf]) for leaf in ours if not same(ours[leaf], theirs[leaf])}
    assert not different, f"{len(different)} of {len(ours)}: {dict(list(different.items())[:5])}"


def save_time(patch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn on figures, and run times are not measured for a second each."""
    blank_figures(patch)
    patch.setattr(measure, "run_times", lambda models, *_: dict.fromkeys(models, 1.0))


def torchrun_variables(rank: int, port: int) -> dict[str, str]:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    return {name: str(value) for name, value in {**own, **meeting}.items()}


def srun_variables(rank: int, port: int) -> dict[str, str]:
    own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": 0, "SLURM_NNODES": 1, "SLURM_JOB_NAME": "test"}
    own |= {"SLURM_NTASKS": 2, "SLURM_STEP_NUM_TASKS": 2, "SLURM_NTASKS_PER_NODE": 2, "SLURM_NODELIST": "localhost"}
    return {name: str(value) for name, value in {**own, "MASTER_PORT": port}.items()}


def run_lines(variables: dict[str, str], lines: Sequence[list[str]], said: Path) -> None:
    """One of the processes: its exit code is that of the first line that fails, else 0."""
    os.environ.update(variables)
    for stream, path in ((2, said), (1, said.with_suffix(".out"))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    torch.set_num_threads(1)
    save_time(pytest.MonkeyPatch())
    code = next((code for code in map(main, lines) if code), 0)
    atexit._run_exitfuncs()  # a forked process does not
    sys.exit(code)


def on_two(variables: Any, lines: Sequence[Sequence[list[str]]], folder: Path) -> tuple[list[int | None], str]:
    """Run each rank's lines; their exit codes, and what they said on standard error."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    said = [folder / f"rank-{rank}.txt" for rank in (0, 1)]
    ranks = [start(run_lines, variables(rank, port), lines[rank], said[rank]) for rank in (0, 1)]
    for process in ranks:
        process.join(timeout=240)
        if process.is_alive():
            process.kill()
    return [process.exitcode for process in ranks], "".join(path.read_text() for path in said)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("models")
    model, run = str(folder / "teacher"), str(folder / "run")
    train_tiny(folder / "teacher", budget="4steps", seed=3)
    common = ["--data", "scenes", "--train_images", "64", "--num_images", "13", "--device", "cpu", "--batch_size", "8"]
    assert main(["distill", model, *common, "--phases", "2", "1", "--budget", "4steps", "--out", run]) == 0
    return model, run


@pytest.fixture(scope="module")
def outs(place: Place, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Where one process and two have written the results of all commands."""
    folder = tmp_path_factory.mktemp("ranks")
    one, two = folder / "one", folder / "two"
    with pytest.MonkeyPatch.context() as patch:
        save_time(patch)
        for name, line in COMMANDS.items():
            assert main(words(line, place, one / name)) == 0
    lines = [words(line, place, two / name) for name, line in COMMANDS.items()]
    codes, said = on_two(torchrun_variables, [lines, lines], two)
    assert codes == [0, 0], said[-3000:]
    return one, two


@pytest.mark.parametrize("name", COMMANDS)
def test_two_processes_write_what_one_writes(outs: tuple[Path, Path], name: str) -> None:
    check_same(outs[0] / name, outs[1] / name)


def test_a_dry_run_on_two_processes_plans_once_and_writes_nothing(place: Place, tmp_path: Path) -> None:
    """Rank 0 gives the plan, measured on both; the warnings that torch has for a wrapper stay out of sight."""
    lines = [words(line, place, tmp_path / "planned" / name) for name, line in PLANS.items()]
    codes, said = on_two(torchrun_variables, [lines, lines], tmp_path)
    assert codes == [0, 0], said[-3000:]
    first, second = ((tmp_path / f"rank-{rank}.out").read_text() for rank in (0, 1))
    plans = [json.loads(line) for line in first.splitlines()]
    assert [plan["command"] for plan in plans] == ["distill"] and not second and "deprecated" not in said
    for plan in plans:
        rows = {row["num_devices"]: row for row in plan["estimates"]}
        assert plan["num_devices"] == 2 and rows[2]["is_measured"] and rows[2]["batch"] == 4 and rows[1]["batch"] == 8
        assert all(part["seconds"] > 0 and part["num_steps"] > 0 for part in plan["parts"])
    assert not (tmp_path / "planned").exists()


def test_srun_without_torchrun(outs: tuple[Path, Path], place: Place, tmp_path: Path) -> None:
    lines = [words(COMMANDS["phases"], place, tmp_path / "phases")]
    codes, said = on_two(srun_variables, [lines, lines], tmp_path)
    assert codes == [0, 0], said[-3000:]
    check_same(outs[0] / "phases", tmp_path / "phases")


def test_a_rank_that_fails_ends_the_other_with_one_line(place: Place, tmp_path: Path) -> None:
    """Rank 0 waits for the second rank, which has no such data, until torchrun ends it."""
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, sys\nfrom raptor.cli import main\nplace = {'0': 'scenes', '1': '/nowhere'}[os.environ['RANK']]\n"
        "sys.exit(main([word.replace('scenes', place) for word in sys.argv[1:]]))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    line = words(["phases", "MODEL", *MEASURED], place, tmp_path / "out")
    done = subprocess.run([*command, *line], capture_output=True, text=True, timeout=120)
    told = [line for line in done.stderr.splitlines() if line.startswith("raptor:") and line != "raptor: stopped"]
    assert done.returncode and len(told) == 1 and "exitcode  : 2" in done.stderr
    assert told[0].startswith(f"raptor: rank 1 on {socket.gethostname()}: ") and "/nowhere" in told[0]


def test_a_run_folder_that_ranks_do_not_share_is_refused(place: Place, tmp_path: Path) -> None:
    lines = [[words(["distill", "MODEL", *STILL], place, tmp_path / f"run-{rank}")] for rank in (0, 1)]
    codes, said = on_two(torchrun_variables, lines, tmp_path)
    assert codes == [2, 2]
    told = [line for line in said.splitlines() if line.startswith("raptor:")]
    assert len({line.rpartition("0 on ")[2] for line in told}) == 1  # each rank says the same
    assert "put --out on a file system that all nodes share" in told[0]
    assert socket.gethostname() in told[0] and "run-" in told[0]
