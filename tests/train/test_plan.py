"""Budgets, how steps are timed, and what is said of other numbers of devices."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny_run import tiny_run

from raptor.data.stream import TrainStream
from raptor.train import job, plan, stage
from raptor.train.loop import Training
from raptor.train.plan import Plan, PlannedPart


def made(**changes: Any) -> Plan:
    parts = [PlannedPart("stage1", 100, 64, 0.5, 3), PlannedPart("stage2", 300, 64, 0.25, 3)]
    values = dict(command="distill", model="m", data="d", folder="f", device="cpu", checked=[], parts=parts)
    values |= dict(other_seconds=25.0, memory_bytes=9.0 * 2**30, written_bytes={"all": 3.0}, free_bytes=8.0)
    return Plan(**{**values, **changes})


def test_time_and_rate_are_those_of_all_stages() -> None:
    plan = made()
    assert plan.seconds == 150.0  # 50 s, 75 s and the rest
    assert plan.images_per_s == pytest.approx(400 * 64 / 125)
    assert "on 1 device, as measured: 2 min 30 s, 205 images/s, 9.0 GiB of memory each" in plan.text()
    assert "on 2 devices, as measured: " in made(num_devices=2).text()
    saved = json.loads(json.dumps(plan.to_dict()))
    assert saved["seconds"] == 150.0 and Plan.from_dict(saved) == plan


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
