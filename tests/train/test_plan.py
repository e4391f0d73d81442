"""Plans: how steps are timed, every check of a run without its work, and nothing written."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_run import tiny_run, tiny_teacher

from raptor.data.stream import TrainStream
from raptor.files import RunError
from raptor.surrogate.surrogate import shared_blocks
from raptor.train import job, loop, plan, stage
from raptor.train.job import Job
from raptor.train.loop import Training
from raptor.train.optimizer import is_matrix
from raptor.train.plan import Plan, PlannedPart


def made(**changes: Any) -> Plan:
    parts = [PlannedPart("stage1", 100, 64, 0.5, 3), PlannedPart("stage2", 300, 64, 0.25, 3)]
    values = dict(command="distill", model="m", data="d", folder="f", device="cpu", checked=[], parts=parts)
    values |= dict(other_seconds=25.0, memory_bytes=9.0, fixed_bytes=1.0, written_bytes={"all": 3.0}, free_bytes=8.0)
    return Plan(**{**values, **changes})


def test_more_devices_divide_time_rate_and_the_memory_of_the_batch() -> None:
    one, eight = made().estimates()
    assert (one.num_devices, one.is_measured, one.batch, one.memory_bytes) == (1, True, 64, 9.0)
    assert one.seconds == 150.0  # 50 s, 75 s and the rest
    assert one.images_per_s == pytest.approx(400 * 64 / 125)
    assert (eight.num_devices, eight.is_measured, eight.batch, eight.memory_bytes) == (8, False, 8, 2.0)
    assert eight.seconds == pytest.approx(150 / 8)
    assert eight.images_per_s == pytest.approx(8 * 400 * 64 / 125)
    assert [estimate.num_devices for estimate in made(num_devices=2).estimates()] == [1, 2, 8]
    assert made(num_devices=2).on(1).seconds == 300.0
    # A budget in seconds is spent on any number of devices.
    timed = made(parts=[PlannedPart("stage2", 100, 64, 0.5, 3, is_timed=True)])
    assert timed.on(8).seconds == pytest.approx(50 + 25 / 8)
    assert Plan.from_dict(json.loads(json.dumps(made().to_dict()))) == made()


def test_each_number_of_devices_is_a_line() -> None:
    lines = made(memory_bytes=9.0 * 2**30, fixed_bytes=2.0**30).text()
    assert "on 1 device: 2 min 30 s, 205 images/s, 9.0 GiB of memory each (measured)" in lines
    computed = "(computed, without the time to exchange gradients)"
    assert f"on 8 devices: 19 s, 1,638 images/s, 2.0 GiB of memory each {computed}" in lines
    odd = made(parts=[PlannedPart("stage2", 100, 12, 0.5, 3)])
    assert odd.on(8).seconds is None and "on 8 devices: the batch does not divide by 8" in odd.text()


@pytest.mark.parametrize(("seconds", "num_steps", "num_timed"), [(0.01, 9, [4, 2]), (20.0, 6, [2, 1])])
def test_a_slow_step_is_timed_once(tmp_path, monkeypatch, seconds: float, num_steps: int, num_timed: list[int]) -> None:
    done: list[int] = []
    step = Training.step
    monkeypatch.setattr(Training, "step", lambda self, i, num: (done.append(i), step(self, i, num))[1])
    monkeypatch.setattr(stage, "_clock", lambda device: seconds * len(done))
    kept: list[int] = []
    monkeypatch.setattr(
        job,
        "TrainStream",
        lambda *args, **options: (kept.append(options["num_decoded"]), TrainStream(*args, **options))[1],
    )
    found = tiny_run(tmp_path / "run", dry_run=True)  # two kinds of steps in stage 1, one in stage 2
    assert kept == [plan.NUM_DECODED]
    assert len(done) == num_steps and [part.num_timed for part in found.parts] == num_timed
    assert [part.seconds for part in found.parts] == pytest.approx([seconds, seconds])


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_plan_says_what_it_estimates_before_it_times_steps(tmp_path, monkeypatch, capsys) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "mean_seconds", stopped)
    with pytest.raises(KeyboardInterrupt):
        tiny_run(tmp_path, dry_run=True)
    said = capsys.readouterr().err
    assert "distill: about " in said and "timing a few steps of 8 images" in said


def test_a_distillation_is_planned_and_nothing_written(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(loop, "mean_seconds", lambda step, *_: (step(0, 8), (0.5, 3))[1])
    teacher = tiny_teacher()
    before = {name: value.clone() for name, value in teacher.model.state_dict().items()}
    found = tiny_run(tmp_path / "runs" / "new", teacher, dry_run=True, phases=None, k=3)
    assert "stage1: 0.5 s a step" in capsys.readouterr().err  # before the next stage is timed
    assert isinstance(found, Plan)
    assert [(p.name, p.num_steps, p.batch_size, p.seconds) for p in found.parts] == [
        ("stage1", 6, 8, 0.5),
        ("stage2", 6, 8, 0.5),
    ]
    one = found.on(1)
    assert one.seconds == pytest.approx(6.0 + found.other_seconds) and one.images_per_s == 16.0
    assert 0 < found.fixed_bytes < 2 * found.memory_bytes
    assert "4 blocks, width 32, 12 tokens at 24 px, k = 3" in found.checked[0]
    assert "64 images to train on, 8 held out, labels of 20 classes; head: the model's own" in found.checked[1]
    assert files(tmp_path) == [tmp_path / "runs" / "recipe.yaml"]
    assert all(torch.equal(value, before[name]) for name, value in teacher.model.state_dict().items())
    text = found.text()
    assert text.startswith("distill, a dry run: ") and "of memory each (measured)" in text and "would write" in text
    assert "stage1: 6 steps of 8 images, 500 ms each (3 timed)" in text
    blocks = shared_blocks(tiny_run(tmp_path / "done").surrogate)
    trained = 4 * sum(p.numel() for p in blocks.parameters())
    two = tiny_run(tmp_path / "two", dry_run=True)
    assert two.written_bytes["three checkpoints"] == 9 * trained
    muon = tiny_run(tmp_path / "muon", dry_run=True, optimizer="muon")
    matrices = 4 * sum(p.numel() for name, p in blocks.named_parameters() if is_matrix(name, p))
    assert muon.written_bytes["three checkpoints"] == 9 * trained - 3 * matrices  # one moment of each instead of two
    kept = sum(path.stat().st_size for path in files(tmp_path / "done" / "checkpoint"))
    assert kept == pytest.approx(2 * 3 * trained, rel=0.2)  # names and moments of scalars come on top


def test_a_plan_makes_the_checks_of_a_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(loop, "mean_seconds", lambda *_: (0.5, 3))
    tiny_run(tmp_path / "run", budget="2steps")
    assert "finished: the command gives it back" in tiny_run(tmp_path / "run", budget="2steps", dry_run=True).notes[-1]
    (tmp_path / "run" / "summary.json").unlink()
    assert "goes on from its last checkpoint" in tiny_run(tmp_path / "run", budget="2steps", dry_run=True).notes[-1]
    with pytest.raises(RunError, match=r"another config \(--lr"):
        tiny_run(tmp_path / "run", budget="2steps", lr=0.5, dry_run=True)
    with pytest.raises(RunError, match=r"another config \(--phases"):
        tiny_run(tmp_path / "run", budget="2steps", phases=[1, 3], dry_run=True)
    spoiled = tiny_teacher()
    next(spoiled.model.parameters()).data.fill_(float("nan"))
    with pytest.raises(ValueError, match="are NaN or infinite: give weights that are whole"):
        tiny_run(tmp_path / "new", spoiled, dry_run=True)
    with monkeypatch.context() as patch, pytest.raises(RunError, match=r"new needs .* and has 0\.0 KiB free: choose"):
        patch.setattr(plan.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
        tiny_run(tmp_path / "new", dry_run=True)

    def no_memory(*_: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loop, "mean_seconds", no_memory)
    with pytest.raises(ValueError, match="a step of 8 images does not fit into memory: lower --batch_size"):
        tiny_run(tmp_path / "new", dry_run=True)
    assert not (tmp_path / "new").exists()


def test_a_plan_measured_with_cuda_graphs_says_that_several_devices_have_none(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(loop, "mean_seconds", lambda *_: (0.5, 3))
    assert tiny_run(tmp_path / "run", dry_run=True).notes == []
    monkeypatch.setattr(Job, "graphed", lambda job: True)
    assert "several devices run it without" in tiny_run(tmp_path / "run", dry_run=True).notes[0]


@pytest.mark.parametrize(("k", "lengths"), [(1, (5,)), (2, (3, 2)), (3, (2, 2, 1)), (5, (1, 1, 1, 1, 1))])
def test_without_similarity_a_plan_takes_phases_of_nearly_equal_length(
    tmp_path: Path, k: int, lengths: tuple[int, ...]
) -> None:
    assert tuple(plan._likely_phases(SimpleNamespace(teacher=tiny_teacher(depth=5)), k, tmp_path)) == lengths
