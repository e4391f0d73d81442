"""Two processes under torchrun (gloo, on the CPU) against one at the same global batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import metrics, tiny_run, train_tiny

from raptor.train import loop

OPTIONS = dict(budget="8steps", normalise="group", cosine=0.1, optimizer="muon", lr=1e-3)
PAPER = dict(budget="8steps", block="paper", conditioning="mlp", normalise="none", head_weight=0.1)
VARIED = dict(budget="8steps", mixup=0.5, cutmix=0.5, jitter=0.4, grey=0.2, sizes=[24, 32], first_size_until=0.6)
VARIED |= dict(adapters=2, adapted="mlp", average_last=0.5)

pytestmark = pytest.mark.slow  # each process imports everything
TEACHER = dict(budget="10steps", drop=0.4, mixup=0.4, cutmix=1.0)
AUTO = dict(phases=None, k="r2=-9", budget="2steps")


def torchrun(runs: dict[str, dict[str, Any]]) -> None:
    """`tiny_run` as a script on two processes."""
    root = Path(__file__).parents[2]
    script = str(root / "tests" / "tiny_run.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}  # this tree, whatever is installed
    done = subprocess.run([*command, json.dumps(runs)], env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]


def reports(out: Path) -> list[dict[str, Any]]:
    return [json.loads(Path(f"{out}-rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Runs of one process and of two: both stages, the paper's block and a teacher; and `auto` of two."""
    folder = tmp_path_factory.mktemp("parallel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "LOG_EVERY", 1)
        tiny_run(folder / "one", **OPTIONS)
        tiny_run(folder / "paper-one", **PAPER)
        tiny_run(folder / "varied-one", **VARIED)
        train_tiny(folder / "teacher-one", **TEACHER)
    runs = {
        "two": OPTIONS,
        "paper-two": PAPER,
        "varied-two": VARIED,
        "auto": AUTO,
        "teacher-two": {**TEACHER, "teacher": True},
    }
    torchrun({str(folder / name): options for name, options in runs.items()})
    return folder / "one", folder / "two"


# Muon iterates in bf16: gradients that differ in their last bit give steps that differ in a bf16's last bit.
@pytest.mark.parametrize(("kind", "tolerance"), [("", 1e-3), ("paper-", 1e-5), ("varied-", 1e-5)])
def test_two_processes_have_the_losses_of_one(both, kind, tolerance):
    folders = [folder.with_name(kind + folder.name) for folder in both]
    one, two = ([line for line in metrics(folder) if "loss" in line] for folder in folders)
    assert [(line["stage"], line["step"]) for line in one] == [(line["stage"], line["step"]) for line in two]
    assert {line["stage"] for line in one} == {"stage1", "stage2"}
    for a, b in zip(one, two):
        assert b["loss"] == pytest.approx(a["loss"], rel=tolerance)
        assert b["layer_loss"] == pytest.approx(a["layer_loss"], rel=max(1e-4, tolerance), abs=1e-5)
        assert ("head_loss" in b) == ("head_loss" in a)
        assert b.get("head_loss", 0.0) == pytest.approx(a.get("head_loss", 0.0), rel=max(1e-4, tolerance))
    assert one[-1]["loss"] < one[4]["loss"]


def test_ranks_end_with_equal_weights_and_the_same_result(both):
    first, second = reports(both[1])
    assert first["checksum"] == second["checksum"]
    assert first["r2"] == second["r2"]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in both]
    scores = [summary["validation"]["r2_last"] for summary in summaries]
    assert scores[1] == pytest.approx(scores[0], abs=1e-4)


def test_auto_k_ends_alike_on_every_rank(both):
    auto = both[1].with_name("auto")
    first, second = reports(auto)
    assert first == second
    assert first["folder"] == str(auto / "k1")


def test_a_teacher_on_two_processes_has_the_losses_of_one(both):
    """With dropped blocks, and images mixed across the border between the ranks."""
    folders = [folder.with_name(f"teacher-{folder.name}") for folder in both]
    one, two = (metrics(folder) for folder in folders)
    assert [line["step"] for line in one] == [line["step"] for line in two] == list(range(10))
    for a, b in zip(one, two):
        assert b["loss"] == pytest.approx(a["loss"], abs=2e-5)  # it is rounded to 5 digits
    first, second = reports(folders[1])
    assert first == second
    weights = [load_file(folder / "teacher" / "model.safetensors") for folder in folders]
    for name, value in weights[0].items():
        assert torch.allclose(weights[1][name], value, atol=1e-4), name
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    assert summaries[0]["accuracy"] == pytest.approx(summaries[1]["accuracy"], abs=0.1)
