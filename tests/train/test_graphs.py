"""Which passes are captured as graphs, and what happens where one cannot be.

A stand-in for the captured graph runs the same module at once, so that the decisions are seen without a GPU.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from tiny_run import blocks_of, metrics, tiny_run
from torch import Tensor, nn

from raptor.train import graphs, loop
from raptor.train.graphs import NotCapturable, StepGraphs
from raptor.train.job import Job
from raptor.train.step import DistillStep, Parts

LINE = "this model's step runs without a CUDA graph: called a synchronizing CUDA operation"


class EagerGraph:
    """Takes the place of a captured graph; `captured` lists what was asked for."""

    captured: list[tuple[str, Parts]] = []

    def __init__(self, module: DistillStep, name: str, images: Tensor, parts: Parts, precision: str):
        self.module = module
        self.name = name
        self.parts = parts
        self.captured.append((name, parts))

    def __call__(self, images: Tensor, lam: float) -> Tensor:
        self.module.zero_grad()
        loss, layer_losses = self.module(images, self.name, torch.tensor(lam), self.parts)
        loss.backward()
        return layer_losses.detach()


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> type[EagerGraph]:
    monkeypatch.setattr(Job, "graphed", lambda self: True)
    monkeypatch.setattr(graphs, "GraphedStep", EagerGraph)
    monkeypatch.setattr(EagerGraph, "captured", [])
    return EagerGraph


def test_one_graph_for_each_set_of_losses(tmp_path, graphed, monkeypatch):
    """lambda falls 1, 1/3, 0: teacher forcing alone, both, none of it; stage 2 has none."""
    monkeypatch.setattr(loop, "LOG_EVERY", 1)
    tiny_run(tmp_path / "graphed", lam=1.0)
    forced = Parts(False, True)
    both = Parts(True, True)
    free = Parts(True, False)
    assert graphed.captured == [("stage1", forced), ("stage1", both), ("stage1", free), ("stage2", free)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "graphed", lambda self: False)
        tiny_run(tmp_path / "plain", lam=1.0)
    ours, theirs = (
        [line["loss"] for line in metrics(tmp_path / run) if "loss" in line] for run in ("graphed", "plain")
    )
    assert len(ours) == 12 and ours == pytest.approx(theirs, rel=1e-4)


def test_the_graph_not_in_use_is_let_go(graphed):
    one = StepGraphs(nn.Identity(), "stage1", "fp32")  # type: ignore[arg-type]
    for lam in (0.5, 0.25, 0.0):
        with pytest.raises(TypeError):  # the stand-in has no step to run
            one.run(torch.zeros(1), lam, Parts.of(lam))
    assert graphed.captured == [("stage1", Parts(True, True)), ("stage1", Parts(True, False))]
    assert [parts for parts, _ in one.graphs] == [Parts(True, False)]


def test_a_finished_stage_holds_no_memory_of_its_graphs(tmp_path, graphed, monkeypatch):
    """When stage 2 is captured, neither a graph of stage 1 nor a gradient in its memory is left."""
    held = []
    capture = EagerGraph.__init__

    def look(self: EagerGraph, module: DistillStep, name: str, *args: Any) -> None:
        kept = [n for n, p in module.named_parameters() if p.grad is not None]
        held.append((name, len(alive), kept))
        capture(self, module, name, *args)
        alive.add(self)

    alive: weakref.WeakSet[EagerGraph] = weakref.WeakSet()
    monkeypatch.setattr(EagerGraph, "__init__", look)
    done = tiny_run(tmp_path / "run", lam=0.0)
    assert held == [("stage1", 0, []), ("stage2", 0, [])]
    assert len(alive) == 0
    assert done.summary.cuda_graph  # of the steps that ran, whatever is left of them


def test_each_image_size_has_a_graph(tmp_path, graphed):
    tiny_run(tmp_path / "run", sizes=[24, 32], budget="16steps", lam=0.0)
    free = Parts(True, False)
    assert graphed.captured == [("stage1", free)] * 2 + [("stage2", free)] * 2


def test_a_step_that_waits_for_the_host_runs_without_a_graph(tmp_path, monkeypatch, capfd, graphed):
    tries = []

    def refuse(*args: Any) -> None:
        tries.append(args)
        raise NotCapturable("called a synchronizing CUDA operation")

    monkeypatch.setattr(graphs, "GraphedStep", refuse)
    done = tiny_run(tmp_path / "refused")
    assert capfd.readouterr().err.count(LINE) == len(tries) == 2  # once a stage
    monkeypatch.setattr(Job, "graphed", lambda self: False)
    plain = tiny_run(tmp_path / "plain")
    assert LINE not in capfd.readouterr().err
    ours = blocks_of(done)
    theirs = blocks_of(plain)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_other_failures_of_a_capture_are_not_hidden(tmp_path, monkeypatch, graphed):
    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(graphs, "GraphedStep", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        tiny_run(tmp_path / "run")


def test_the_checked_pass_tells_host_syncs_from_other_errors_and_puts_the_mode_back(monkeypatch):
    modes: list[Any] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.raises(NotCapturable), graphs._no_host_sync():
        raise RuntimeError("called a synchronizing CUDA operation")
    with pytest.raises(RuntimeError, match="shapes") as error, graphs._no_host_sync():
        raise RuntimeError("shapes do not fit")
    assert not isinstance(error.value, NotCapturable)
    assert modes == [0, "error", 0, "error", 0]
