"""The loop: Ctrl-C, non-finite losses, full disks, damaged checkpoints, changed configs, timed steps."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_timm
from tiny_run import blocks_of, metrics, run_and_report, tiny_run, tiny_teacher
from torch import Tensor, nn

from raptor import run as run_module
from raptor.open import open_vit
from raptor.phases import Phases
from raptor.run import RunError
from raptor.train import DistillSummary, distill, loop
from raptor.train.loop import LoopState

LONG = dict(budget="20steps", normalise="group")


def start(out: Path, options: dict[str, Any]) -> BaseProcess:
    return forked.start(run_and_report, out, options, out.parent / "report")


def num_lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def signal_after(process: BaseProcess, folder: Path, lines: int, number: int) -> bool:
    """Send a signal once metrics.jsonl has so many lines and a moment more; False when the run ended before."""
    while num_lines(folder) < lines and process.is_alive():
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.04))
    if process.is_alive() and process.pid:
        os.kill(process.pid, number)
    process.join()
    return process.exitcode == -number


def surrogate_bytes(folder: Path) -> bytes:
    return (folder / "surrogate" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    start(folder, LONG).join()
    assert (folder / "summary.json").exists()
    return folder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stop_signal_saves_and_ends_with_one_line(tmp_path, uninterrupted, number):
    folder = tmp_path / "run"
    lines = num_lines(uninterrupted) * (3 if number == signal.SIGINT else 1) // 4
    signal_after(start(folder, LONG), folder, lines, number)
    report = (tmp_path / "report").read_text()
    assert report.startswith("stopped after step ")
    assert "\n" not in report
    stage, step = report.split(";")[0].split(" of ")[1], int(report.split()[3])
    latest = (folder / "checkpoint" / "latest").read_text()
    state = json.loads((folder / "checkpoint" / latest / "state.json").read_text())
    assert (state["stage"], state["step"]) == (stage, step)
    start(folder, LONG).join()
    assert surrogate_bytes(folder) == surrogate_bytes(uninterrupted)


def test_a_finished_run_is_given_back_untouched(tmp_path):
    first = tiny_run(tmp_path / "run")
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != "lock"}
    again = tiny_run(tmp_path / "run")
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps
    assert again.summary == DistillSummary.from_dict(json.loads(json.dumps(first.summary.to_dict())))
    assert all(torch.equal(blocks_of(first)[n], v) for n, v in blocks_of(again).items())
    for path in (tmp_path / "run" / "checkpoint").rglob("*"):
        path.unlink() if path.is_file() else None
    without = tiny_run(tmp_path / "run")
    assert all(torch.equal(blocks_of(first)[n], v) for n, v in blocks_of(without).items())
    with pytest.raises(RunError, match="already holds a run"):
        tiny_run(tmp_path / "run", resume=False)


class Spoiled(nn.Module):
    """A teacher's block that gives a NaN from its `when`-th training batch on."""

    def __init__(self, block: nn.Module, when: int):
        super().__init__()
        self.block, self.left = block, when

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.left -= len(x) == 8
        return self.block(x, *args, **kwargs) * (float("nan") if self.left < 0 else 1)


def test_a_non_finite_state_stops_with_step_layer_and_checkpoint(tmp_path):
    teacher = tiny_teacher()
    teacher.blocks[3] = Spoiled(teacher.blocks[3], 6)
    options = dict(stage1_share=0.0, normalise="none", val_images=3)
    with pytest.raises(RunError) as error:
        tiny_run(tmp_path / "run", teacher, **options)
    message = str(error.value)
    assert "the loss is not finite at step 6 of stage2, layer 4" in message
    assert "last good checkpoint is" in message and message.split("step-")[1].startswith("5")
    assert "\n" not in message
    tensors = load_file(tmp_path / "run" / "checkpoint" / "step-5" / "tensors.safetensors")
    assert all(v.isfinite().all() for v in tensors.values())
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_rate_that_blows_up_never_leaves_a_bad_checkpoint(tmp_path):
    with pytest.raises(RunError, match=r"not finite .* step 1 of stage1.*layer \d: .*; try a smaller --lr"):
        tiny_run(tmp_path / "run", lr=1e30)
    for path in (tmp_path / "run").rglob("tensors.safetensors"):
        assert all(v.isfinite().all() for v in load_file(path).values())


def test_a_full_disk_stops_the_run_and_loses_nothing(tmp_path, monkeypatch):
    plain, calls = run_module.save_file, []

    def save(tensors: dict[str, Tensor], path: Path) -> None:
        calls.append(path)
        if len(calls) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(tensors, path)

    monkeypatch.setattr(run_module, "save_file", save)
    with pytest.raises(RunError, match=r"the disk is full; the last good checkpoint is .*step-2$") as error:
        tiny_run(tmp_path / "run")
    assert "\n" not in str(error.value)
    tiny_run(tmp_path / "run")
    assert surrogate_bytes(tmp_path / "run") == surrogate_bytes_of(tmp_path)


def test_a_truncated_checkpoint_is_named_and_left_alone(tmp_path):
    tiny_run(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    path = tmp_path / "run" / "checkpoint" / "step-11" / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(RunError, match=r"step-11 is truncated: write step-10 into .*latest") as error:
        tiny_run(tmp_path / "run")
    assert "\n" not in str(error.value)
    assert path.stat().st_size == 1000
    (tmp_path / "run" / "checkpoint" / "latest").write_text("step-10")
    tiny_run(tmp_path / "run")
    assert surrogate_bytes(tmp_path / "run") == surrogate_bytes_of(tmp_path)


def surrogate_bytes_of(folder: Path) -> bytes:
    tiny_run(folder / "again")
    return surrogate_bytes(folder / "again")


def test_a_changed_config_is_refused_naming_the_change(tmp_path):
    tiny_run(tmp_path / "run")
    before = (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(RunError, match=r"another config \(recipe\.lr: 0\.001 -> 0\.5\): choose another --out") as error:
        tiny_run(tmp_path / "run", lr=0.5)
    assert "\n" not in str(error.value)
    with pytest.raises(RunError, match=r"seed: 0 -> 1"):
        tiny_run(tmp_path / "run", seed=1)
    assert (tmp_path / "run" / "config.yaml").read_text() == before


def test_a_run_of_an_own_module_says_that_it_needs_it(tmp_path):
    tiny_run(tmp_path / "run", budget="2steps")
    with pytest.raises(ValueError, match="was made from a module of your own: open it with teacher=that module"):
        open_vit(tmp_path / "run")
    assert open_vit(tmp_path / "run", teacher=tiny_teacher()).phases == Phases((2, 2))


def test_metrics_of_a_run_that_never_saved_are_not_kept(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"stage": "stage1", "step": 0, "loss": 1.0}\n{"st')
    tiny_run(tmp_path / "run", budget="4steps")
    steps = [(line["stage"], line["step"]) for line in metrics(tmp_path / "run") if "loss" in line]
    assert len(set(steps)) == len(steps) == 4


def test_another_teacher_of_the_same_name_is_refused(tmp_path):
    teacher = tiny_timm()
    options = dict(k=2, budget="2steps", batch_size=8, limit=32, val_images=8, phase_images=8, device="cpu")
    distill(teacher, "scenes", out=str(tmp_path / "run"), **options)
    distill(teacher, "scenes", out=str(tmp_path / "run"), **options)
    next(teacher.model.parameters()).data.add_(1.0)
    with pytest.raises(RunError, match=r"another config .*fingerprint"):
        distill(teacher, "scenes", out=str(tmp_path / "run"), **options)


class Clock:
    """Steps that take the time they are said to, and ten seconds more where the loader has to start again."""

    def __init__(self) -> None:
        self.now, self.last = 0.0, -1

    def step(self, i: int, num: int) -> None:
        self.now += (3.0 if i < num / 4 else 1.0) + (10.0 if i != self.last + 1 or i == 0 else 0.0)
        self.last = i


@pytest.mark.parametrize(("first_alone", "expected"), [(False, (16 * 3 + 48 * 1) / 64), (True, (15 * 3 + 48 * 1) / 63)])
def test_each_kind_of_step_has_its_share_and_no_start_is_timed(monkeypatch, first_alone, expected):
    clock = Clock()
    monkeypatch.setattr(loop, "_clock", lambda device: clock.now)

    def kind(i: int, num: int) -> object:
        return "first" if first_alone and i == 0 else i < num / 4

    for device in ("cpu", "cuda"):
        assert loop.mean_seconds(clock.step, kind, torch.device(device)) == pytest.approx(expected)


def test_a_checkpoints_state_is_read_as_it_was_written():
    state = LoopState("stage2", 7, {"stage1": 4, "stage2": 9}, 1.5, [{"stage": "stage1", "r2_last": 0.5}], ["a.png"], 3)
    saved = json.loads(json.dumps({**state.to_dict(), "tensor_bytes": 12}))
    assert LoopState.from_dict(saved) == state
    old = LoopState.from_dict({"step": 5, "seconds": 2.0, "num_steps": 24, "num_logged": 6, "tensor_bytes": 1})
    assert old == LoopState("teacher", 5, {"teacher": 24}, 2.0, num_logged=6)


def test_a_budget_of_few_steps_is_announced_before_training(tmp_path, capsys):
    done = tiny_run(tmp_path / "run", budget="20steps")
    told = [line for line in capsys.readouterr().err.splitlines() if "--budget 20steps gives only" in line]
    assert len(told) == 2 and "undertrained; 100 steps need about --budget 200steps" in told[0]
    assert done.text().startswith("undertrained (fewer than 100 steps: 10 in stage1, 10 in stage2): trained 20 steps")
    saved = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert saved["verdict"]["lines"][0] in done.text() and saved["verdict"]["undertrained"]
    assert DistillSummary.read(tmp_path / "run").verdict.lines() == saved["verdict"]["lines"]
