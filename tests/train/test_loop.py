"""The loop: Ctrl-C, non-finite losses, full disks, damaged checkpoints, changed configs; a step and its rates."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import forked
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_timm
from tiny_run import blocks_of, metrics, run_and_report, tiny_run, tiny_teacher
from torch import Tensor, nn

from raptor import run as run_module
from raptor.devices import open_fabric
from raptor.files import RunError
from raptor.phases.cut import Phases
from raptor.report.results import read_results
from raptor.run import Interrupted, Run
from raptor.train import DistillSummary, distill, loop
from raptor.train.loop import Training, learning_rate
from raptor.train.optimizer import damaged_moment, parameter_groups
from raptor.train.stage import Stage
from raptor.train.validation import Scores, Validator
from raptor.vit.open import open_vit

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


def training_lines(folder: Path) -> list[dict[str, Any]]:
    """What of metrics.jsonl does not depend on the clock."""
    return [{k: v for k, v in line.items() if k not in ("images_per_s", "seconds")} for line in metrics(folder)]


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
    assert report.startswith("stopped ") and "\n" not in report
    found = re.search(r"after step (\d+) of (\w+);", report)  # also where the signal came within a validation
    assert found is not None, report
    step, stage = int(found[1]), found[2]
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


class Spoiled(nn.Module):
    """A teacher's block that gives a NaN from its `when`-th training batch on."""

    def __init__(self, block: nn.Module, when: int):
        super().__init__()
        self.block = block
        self.left = when

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.left -= len(x) == 8
        return self.block(x, *args, **kwargs) * (float("nan") if self.left < 0 else 1)


def test_a_non_finite_state_stops_with_step_layer_and_checkpoint(tmp_path):
    teacher = tiny_teacher()
    teacher.blocks[3] = Spoiled(teacher.blocks[3], 7)  # one batch is looked at before the first step
    options = dict(stage1_share=0.0, normalise="none", num_images=3)
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
    plain = run_module.save_file
    calls = []

    def save(tensors: dict[str, Tensor], path: Path) -> None:
        calls.append(path)
        if len(calls) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(tensors, path)

    monkeypatch.setattr(run_module, "save_file", save)
    with pytest.raises(RunError, match=r"the disk is full; the last good checkpoint is .*step-3$") as error:
        tiny_run(tmp_path / "run")
    assert "\n" not in str(error.value)
    tiny_run(tmp_path / "run")
    assert surrogate_bytes(tmp_path / "run") == surrogate_bytes_of(tmp_path)


def surrogate_bytes_of(folder: Path) -> bytes:
    tiny_run(folder / "again")
    return surrogate_bytes(folder / "again")


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
    options = dict(k=2, budget="2steps", batch_size=8, train_images=32, num_images=8, device="cpu")
    distill(teacher, "scenes", out=str(tmp_path / "run"), **options)
    distill(teacher, "scenes", out=str(tmp_path / "run"), **options)
    next(teacher.model.parameters()).data.add_(1.0)
    with pytest.raises(RunError, match=r"another config .*the weights of the teacher differ"):
        distill(teacher, "scenes", out=str(tmp_path / "run"), **options)


def saved_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The list that the number of each checkpoint is added to."""
    plain = Run.save_checkpoint
    numbers = []

    def save(self: Run, number: int, *rest: Any) -> None:
        numbers.append(number)
        plain(self, number, *rest)

    monkeypatch.setattr(Run, "save_checkpoint", save)
    return numbers


def test_checkpoints_come_by_the_clock_and_before_each_validation(tmp_path, monkeypatch):
    minutes = [0.0]
    numbers = saved_steps(monkeypatch)
    monkeypatch.setattr(loop, "_now", lambda: 60 * minutes[0])
    plain = Training.step

    def step(self: Any, number: int, *rest: Any) -> Tensor:
        minutes[0] += 4 if number < 12 else 1
        return plain(self, number, *rest)

    monkeypatch.setattr(Training, "step", step)
    options = dict(budget="24steps", stage1_share=0.0)
    tiny_run(tmp_path / "run", **options)  # validations after steps 5, 11, 17 and 23; every third step takes 12 minutes
    assert numbers == [2, 5, 8, 11, 17, 23]
    numbers.clear()
    tiny_run(tmp_path / "rare", checkpoint_minutes=60, **options)
    assert numbers == [5, 11, 17, 23]
    with pytest.raises(ValueError, match="--checkpoint_minutes must be at least 0, got -1"):
        tiny_run(tmp_path / "none", checkpoint_minutes=-1)


def test_neither_the_clock_nor_a_signal_changes_a_line_of_metrics(tmp_path, monkeypatch):
    """Checkpoints after every step, none but those of validations, and a run that was stopped and resumed."""
    options = dict(budget="90steps", stage1_share=0.5, batch_size=4)

    def lines(name: str, **changes: Any) -> list[dict[str, Any]]:
        tiny_run(tmp_path / name, **options, **changes)
        clock = ("images_per_s", "seconds")
        return [{k: v for k, v in line.items() if k not in clock} for line in metrics(tmp_path / name)]

    rare = lines("rare", checkpoint_minutes=60)
    assert [line["step"] for line in rare if "loss" in line][:6] == [10, 19, 21, 33, 39, 44]  # 45 steps, 4 validations
    assert lines("often", checkpoint_minutes=0) == rare
    verdicts = [DistillSummary.read(tmp_path / name).verdict for name in ("rare", "often")]
    assert verdicts[0] == verdicts[1]
    plain = Training.step
    asked = [30]

    def step(self: Any, number: int, *rest: Any) -> Tensor:
        asked[0] -= 1
        if asked[0] == 0:
            signal.raise_signal(signal.SIGTERM)
        return plain(self, number, *rest)

    monkeypatch.setattr(Training, "step", step)
    with pytest.raises(Interrupted, match="after step 29 of stage1"):
        tiny_run(tmp_path / "stopped", **options)
    assert lines("stopped") == rare


def interrupted_in_validation(monkeypatch: pytest.MonkeyPatch, folder: Path, number: int, when: int) -> str:
    """Start a run, give it a signal at the start of its validation `when`, and return what it said."""
    plain = Validator.validate
    left = [when]

    def validate(self: Validator, *models: Any) -> Scores:
        left[0] -= 1
        if left[0] < 0:
            signal.raise_signal(number)
        return plain(self, *models)

    with monkeypatch.context() as patch, pytest.raises(Interrupted) as error:
        patch.setattr(Validator, "validate", validate)
        tiny_run(folder, **LONG)
    return str(error.value)


def test_a_signal_in_a_validation_ends_it_and_the_next_run_repeats_it(tmp_path, uninterrupted, monkeypatch):
    folder = tmp_path / "run"
    said = [interrupted_in_validation(monkeypatch, folder, signal.SIGTERM, when) for when in (1, 0, 3, 4)]
    assert said[0] == said[1] == "stopped in the validation after step 4 of stage1; the same command goes on from there"
    assert said[2].startswith("stopped in the validation after step 1 of stage2")
    assert said[3].startswith("stopped between two batches; the same command goes on")  # while it took the last scores
    assert not (folder / "summary.json").exists()
    numbers = saved_steps(monkeypatch)
    tiny_run(folder, **LONG)
    assert numbers == []
    assert surrogate_bytes(folder) == surrogate_bytes(uninterrupted)
    assert training_lines(folder) == training_lines(uninterrupted)


def fits_up_to(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> list[int]:
    """Let memory be too small for batches of more than sizes[i] images in the i-th validation; the sizes tried."""
    plain = Validator._measure
    tried = []
    validate = Validator.validate
    number = [-1]

    def measure(self: Validator, student: Any, batches: Any, *rest: Any) -> Any:
        found = plain(self, student, batches, *rest)
        tried.append(self.val.batch_size)
        if self.val.batch_size > sizes[min(number[0], len(sizes) - 1)]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    def count(self: Validator, student: Any) -> Scores:
        number[0] += 1
        return validate(self, student)

    monkeypatch.setattr(Validator, "_measure", measure)
    monkeypatch.setattr(Validator, "validate", count)
    return tried


def test_a_validation_takes_the_batch_that_fits_and_costs_no_training(tmp_path, monkeypatch, capsys):
    whole = tiny_run(tmp_path / "whole", stage1_share=0.0)
    capsys.readouterr()
    tried = fits_up_to(monkeypatch, [4, 8, 0, 8])
    done = tiny_run(tmp_path / "run", stage1_share=0.0)
    assert tried[:4] == [8, 4, 4, 4]  # one batch is tried before a head is fitted on such batches
    told = capsys.readouterr().err.splitlines()
    assert "validation: no memory for batches of 8; 4 from here on" in told
    assert "validation after step 8 of stage2 is left out: no memory for a batch of 1" in told
    lines = metrics(tmp_path / "run")
    skipped = [line for line in lines if "validation_skipped" in line]
    assert skipped == [{"stage": "stage2", "step": 8, "validation_skipped": "no memory for a batch of 1"}]
    assert [line["step"] for line in lines if "validation" in line] == [2, 5, 11]
    assert done.summary.validation.r2_last == pytest.approx(whole.summary.validation.r2_last, rel=1e-6)
    assert surrogate_bytes(tmp_path / "run") == surrogate_bytes(tmp_path / "whole")
    assert list(read_results(tmp_path / "run").losses.values())[-1][-1][0] == 11


def test_a_surrogate_that_cannot_be_measured_is_kept_with_a_line(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        fits_up_to(patch, [8, 8, 8, 8, 0])
        with pytest.raises(RunError, match=r"cannot be measured \(no memory for a batch of 1\): free memory"):
            tiny_run(tmp_path / "run", stage1_share=0.0)
    numbers = saved_steps(monkeypatch)
    assert tiny_run(tmp_path / "run", stage1_share=0.0).summary.validation.num_images == 8 and not numbers


def test_a_budget_of_few_steps_is_announced_before_training(tmp_path, capsys):
    done = tiny_run(tmp_path / "run", budget="20steps")
    told = [line for line in capsys.readouterr().err.splitlines() if "--budget 20steps gives only" in line]
    assert len(told) == 2 and "undertrained; 100 steps need about --budget 200steps" in told[0]
    assert done.text().startswith("undertrained (fewer than 100 steps: 10 in stage1, 10 in stage2): trained 20 steps")
    saved = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert saved["verdict"]["lines"][0] in done.text() and saved["verdict"]["undertrained"]
    assert DistillSummary.read(tmp_path / "run").verdict.lines() == saved["verdict"]["lines"]


OPENED = {
    "train/loop.py",
    "train/step.py",
    "surrogate/block.py",
    "surrogate/fast.py",
    "vit/view.py",
    "vit/calls.py",
}
"""What a reader of one step opens, besides the files that make its images."""


def test_a_step_is_read_in_six_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    package = str(Path(loop.__file__).parents[1]) + os.sep
    plain = Training.step

    def note(frame: FrameType, event: str, _arg: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(package):
            seen.add(path.removeprefix(package))

    def step(self: Training, number: int, num_steps: int) -> Tensor:
        sys.setprofile(note)
        try:
            return plain(self, number, num_steps)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(Training, "step", step)
    tiny_run(tmp_path / "run")
    assert {path for path in seen if not path.startswith(("data", "devices"))} == OPENED


class Drawn(Stage):
    """A stage whose gradients are drawn by the step's number."""

    name = "drawn"
    clip = 1e9
    lr = 0.01
    min_lr = 0.01
    warmup = 0.0

    def __init__(self, name: str, weights: list[Tensor], average_last: float = 0.0):
        self.module = nn.ParameterList(nn.Parameter(value.clone()) for value in weights)
        named = [(f"{n}.weight", parameter) for n, parameter in enumerate(self.module)]
        self.groups = parameter_groups(named, name, weight_decay=0.1)
        self.average_last = average_last

    def losses(self, wrapped: Any, step: int, num_steps: int, propagate: Callable[[Tensor], None]) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        loss = torch.zeros(())
        for weight in self.module:
            loss = loss + (weight * torch.randn(weight.shape, generator=generator)).sum()
        propagate(loss)
        return loss[None]

    def tensors(self) -> dict[str, Tensor]:
        return {f"block.{n}": weight.detach() for n, weight in enumerate(self.module)}


START = [torch.randn(shape, generator=torch.Generator().manual_seed(4)) for shape in ((24, 64), (64,), (40, 20))]


def training_of(stage: Stage, tensors: dict[str, Tensor] | None = None) -> Training:
    return Training(stage, open_fabric("cpu", "fp32"), tensors or {})


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("stop_after", [1, 3])  # before the mean of the last three steps began, and in it
def test_a_restored_training_goes_on_to_the_last_bit(name: str, stop_after: int) -> None:
    whole = training_of(Drawn(name, START, 0.6))
    for step in range(5):
        whole.step(step, 5)
    first = training_of(Drawn(name, START, 0.6))
    for step in range(stop_after + 1):
        first.step(step, 5)
    saved = {key: value.clone() for key, value in first.tensors().items()}
    assert any(key.startswith("average.") for key in saved) == (stop_after == 3)
    second = training_of(Drawn(name, [saved[f"block.{n}"] for n in range(3)], 0.6), saved)
    for step in range(stop_after + 1, 5):
        second.step(step, 5)
    assert all(torch.equal(one, other) for one, other in zip(whole.weights, second.weights))


def test_the_weights_end_as_the_mean_of_the_last_steps() -> None:
    plain = training_of(Drawn("adamw", START))
    averaged = training_of(Drawn("adamw", START, 0.6))
    seen = []
    for step in range(5):
        plain.step(step, 5)
        averaged.step(step, 5)
        seen.append([weight.detach().double().clone() for weight in plain.weights])
    for n, weight in enumerate(averaged.weights):
        mean = torch.stack([weights[n] for weights in seen[-3:]]).mean(0)
        torch.testing.assert_close(weight.double(), mean, rtol=1e-6, atol=1e-7)


def test_a_checkpoint_without_a_moment_or_with_a_damaged_one_is_named() -> None:
    stage = Drawn("muon", [torch.ones(24, 64), torch.ones(64)])
    saved = training_of(stage).tensors()
    assert sorted(saved) == [
        "block.0",
        "block.1",
        "optimizer.exp_avg.1.weight",
        "optimizer.exp_avg_sq.1.weight",
        "optimizer.momentum_buffer.0.weight",
        "optimizer.step.1.weight",
    ]
    assert damaged_moment(stage.groups, saved) is None
    assert damaged_moment(stage.groups, {}) == "no momentum_buffer of 0.weight"
    saved["optimizer.exp_avg_sq.1.weight"][3] = float("nan")
    assert damaged_moment(stage.groups, saved) == "a damaged exp_avg_sq of 1.weight"


def test_the_papers_learning_rate():
    """Warm-up over 10,000 of 312,500 steps to 1e-4, cosine to 1e-6."""
    num = 312_500
    peak = 1e-4
    low = 1e-6
    rates = [learning_rate(step, num, peak, low, 0.032) for step in (0, 4_999, 9_999, 161_249, 312_499)]
    assert rates[:3] == pytest.approx([1e-8, 5e-5, 1e-4], rel=1e-12)
    assert rates[3] == pytest.approx((peak + low) / 2, rel=1e-4)
    assert rates[4] == pytest.approx(low, rel=1e-12)
    quarter = learning_rate(10_000 + 302_500 // 4 - 1, num, peak, low, 0.032)
    assert quarter == pytest.approx(low + (peak - low) * (1 + math.cos(math.pi / 4)) / 2, rel=1e-9)


def test_the_rate_never_leaves_its_bounds_and_peaks_once():
    for num in (1, 2, 3, 7, 40, 1000):
        for warmup in (0.0, 0.032, 0.5, 1.0):
            rates = [learning_rate(step, num, 1.0, 0.1, warmup) for step in range(num)]
            assert max(rates) == 1.0
            assert min(rates) > 0
            top = rates.index(1.0)
            assert rates[:top] == sorted(rates[:top])
            assert rates[top:] == sorted(rates[top:], reverse=True)
            if top < num - 1:
                assert rates[-1] == pytest.approx(0.1)
