"""Plans: every check of a run without its work, and nothing written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import tiny_run, tiny_teacher

from raptor.data.stream import TrainStream
from raptor.devices import Ranks
from raptor.files import RunError
from raptor.surrogate.surrogate import shared_blocks
from raptor.train import job, loop, plan
from raptor.train.job import Job
from raptor.train.optimizer import is_matrix
from raptor.train.plan import Plan, PlannedPart


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def made(**changes: Any) -> Plan:
    parts = [PlannedPart("stage1", 100, 64, 0.5), PlannedPart("stage2", 300, 64, 0.25)]
    values = dict(command="distill", model="m", data="d", folder="f", device="cpu", checked=[], parts=parts)
    values |= dict(other_seconds=25.0, memory_bytes=9.0, fixed_bytes=1.0, written_bytes={"all": 3.0}, free_bytes=8.0)
    return Plan(**{**values, **changes})


def test_more_devices_divide_time_rate_and_the_memory_of_the_batch() -> None:
    one, eight = made().estimates()
    assert (one.num_devices, one.batch, one.is_measured, one.seconds, one.memory_bytes) == (1, 64, True, 150.0, 9.0)
    assert one.images_per_s == pytest.approx(400 * 64 / 125)
    assert (eight.num_devices, eight.batch, eight.is_measured, eight.memory_bytes) == (8, 8, False, 2.0)
    assert eight.seconds == pytest.approx(150 / 8) and eight.images_per_s == pytest.approx(8 * 400 * 64 / 125)
    assert [estimate.num_devices for estimate in made(num_devices=2).estimates()] == [1, 2, 8]
    assert made(num_devices=2).on(1).seconds == 300.0
    timed = made(parts=[PlannedPart("stage2", 100, 64, 0.5, is_timed=True)])
    assert timed.on(8).seconds == pytest.approx(50 + 25 / 8)
    odd = made(parts=[PlannedPart("stage2", 100, 12, 0.5)])
    assert odd.on(8).seconds is None and "the batch does not divide by 8" in odd.text()
    assert Plan.from_dict(json.loads(json.dumps(made().to_dict()))) == made()


def test_a_distillation_is_planned_and_nothing_written(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(plan, "mean_seconds", lambda step, *_: (step(0, 8), (0.5, 3))[1])
    teacher = tiny_teacher()
    before = {name: value.clone() for name, value in teacher.model.state_dict().items()}
    found = tiny_run(tmp_path / "runs" / "new", teacher, dry_run=True, phases=None, k=3)
    assert isinstance(found, Plan)
    assert [(p.name, p.num_steps, p.batch_size, p.seconds) for p in found.parts] == [
        ("stage1", 6, 8, 0.5),
        ("stage2", 6, 8, 0.5),
    ]
    assert found.on(1).seconds == pytest.approx(6.0 + found.other_seconds) and found.on(1).images_per_s == 16.0
    assert "4 blocks, width 32, 12 tokens at 24 px, k = 3" in found.checked[0]
    assert "64 images to train on, 8 held out, labels of 20 classes; head: the model's own" in found.checked[1]
    assert files(tmp_path) == [tmp_path / "runs" / "recipe.yaml"]
    assert all(torch.equal(value, before[name]) for name, value in teacher.model.state_dict().items())
    text = found.text()
    assert text.startswith("distill, a dry run: ") and "1 (measured)" in text and "would write" in text
    assert "stage1: 6 steps of 8 images, 500 ms each (3 timed)" in text
    blocks = shared_blocks(tiny_run(tmp_path / "done").surrogate)
    trained = 4 * sum(p.numel() for p in blocks.parameters())
    two = tiny_run(tmp_path / "two", dry_run=True)
    assert two.exchanged_bytes == trained and two.written_bytes["three checkpoints"] == 9 * trained
    muon = tiny_run(tmp_path / "muon", dry_run=True, optimizer="muon")
    matrices = 4 * sum(p.numel() for name, p in blocks.named_parameters() if is_matrix(name, p))
    assert muon.written_bytes["three checkpoints"] == 9 * trained - 3 * matrices  # one moment of each instead of two
    kept = sum(path.stat().st_size for path in files(tmp_path / "done" / "checkpoint"))
    assert kept == pytest.approx(2 * 3 * trained, rel=0.2)  # names and moments of scalars come on top


@pytest.mark.parametrize(("seconds", "num_steps", "num_timed"), [(0.01, 9, [4, 2]), (20.0, 6, [2, 1])])
def test_a_slow_step_is_timed_once(tmp_path, monkeypatch, seconds: float, num_steps: int, num_timed: list[int]) -> None:
    done: list[int] = []
    step = loop._Training.step
    monkeypatch.setattr(loop._Training, "step", lambda self, i, num: (done.append(i), step(self, i, num))[1])
    monkeypatch.setattr(plan, "_clock", lambda device: seconds * len(done))
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


def test_all_ranks_time_as_many_steps_as_the_first() -> None:
    class Second(Ranks):
        def first(self, function: Any) -> Any:
            function()
            return True  # rank 0 found its step slow

    done: list[int] = []
    timed = plan.time_steps(done.append, 1, 3, lambda: 0.1 * len(done), Second(1, 2))
    assert timed == (pytest.approx(0.1), 1) and done == [0, 1]


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
    monkeypatch.setattr(plan, "_clock", lambda device: clock.now)

    def kind(i: int, num: int) -> object:
        return "first" if first_alone and i == 0 else i < num / 4

    for device in ("cpu", "cuda"):
        found, num_timed = plan.mean_seconds(clock.step, kind, torch.device(device))
        assert found == pytest.approx(expected) and num_timed == (1 + 2 if device == "cpu" else 1 + 16)


def test_a_plan_makes_the_checks_of_a_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(plan, "mean_seconds", lambda *_: (0.5, 3))
    tiny_run(tmp_path / "run", budget="2steps")
    assert "finished: the command gives it back" in tiny_run(tmp_path / "run", budget="2steps", dry_run=True).notes[-1]
    (tmp_path / "run" / "summary.json").unlink()
    assert "goes on from its last checkpoint" in tiny_run(tmp_path / "run", budget="2steps", dry_run=True).notes[-1]
    with pytest.raises(RunError, match=r"another config \(recipe\.lr"):
        tiny_run(tmp_path / "run", budget="2steps", lr=0.5, dry_run=True)
    with pytest.raises(RunError, match=r"another config \(phases"):
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

    monkeypatch.setattr(plan, "mean_seconds", no_memory)
    with pytest.raises(ValueError, match="a step of 8 images does not fit into memory: lower --batch_size"):
        tiny_run(tmp_path / "new", dry_run=True)
    assert not (tmp_path / "new").exists()


def test_a_plan_measured_with_cuda_graphs_says_that_several_devices_have_none(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(plan, "mean_seconds", lambda *_: (0.5, 3))
    assert tiny_run(tmp_path / "run", dry_run=True).notes == []
    monkeypatch.setattr(Job, "graphed", lambda job: True)
    assert "several devices run it without" in tiny_run(tmp_path / "run", dry_run=True).notes[0]
