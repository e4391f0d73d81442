"""Budgets, how steps are timed, and what is said of other numbers of devices."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tiny_run import tiny_run

from raptor.data.stream import TrainStream
from raptor.devices import Ranks
from raptor.train import job, plan
from raptor.train.plan import Plan, PlannedPart
from raptor.train.stage import Training


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


@pytest.mark.parametrize(("seconds", "num_steps", "num_timed"), [(0.01, 9, [4, 2]), (20.0, 6, [2, 1])])
def test_a_slow_step_is_timed_once(tmp_path, monkeypatch, seconds: float, num_steps: int, num_timed: list[int]) -> None:
    done: list[int] = []
    step = Training.step
    monkeypatch.setattr(Training, "step", lambda self, i, num: (done.append(i), step(self, i, num))[1])
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
        self.now = 0.0
        self.last = -1

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
