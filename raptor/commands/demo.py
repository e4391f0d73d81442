"""raptor demo: the whole argument on the built-in default, offline, in a few minutes on a laptop."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raptor.commands.dynamics import Dynamics, dynamics
from raptor.commands.evaluate import Evaluation, evaluate
from raptor.commands.phases import SavedPhases, phases
from raptor.commands.probe import Probed, probe
from raptor.commands.report import Page, report
from raptor.config import DemoConfig
from raptor.phases.study import ModelPhases
from raptor.progress import clock
from raptor.provenance import command
from raptor.run import check_folder
from raptor.streaming import Result
from raptor.vit.pair import open_pair
from raptor.vit.saved import check_folder_of, save_vit

# Comes with the package, so that the demo trains nothing and needs no network.
_SURROGATE = "scenes-k3"


@dataclass
class Demo(Result):
    """What the demo found: the result of each command, the page, and what they say in a few lines."""

    folder: Path
    page: Page
    findings: list[str]
    phases: SavedPhases
    evaluation: Evaluation
    probes: dict[str, Probed]
    dynamics: Dynamics

    def to_dict(self) -> dict[str, Any]:
        recovery = {task: found.recovery for task, found in self.probes.items()}
        page = self.page.to_dict()
        return {"folder": str(self.folder), "page": page, "findings": self.findings, "recovery": recovery}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per finding."""
        return [dict(zip(("about", "finding"), line.split(": ", 1))) for line in self.findings]

    def plot(self) -> Any:
        """The error curves of the surrogate with three blocks."""
        return self.evaluation.plot()

    def text(self) -> str:
        # The findings were printed as they came.
        return f"the page: {self.page.path}"


@command(DemoConfig)
def demo(config: DemoConfig) -> Demo:
    """Phases, certificate, probes, dynamics and the page, on the built-in model, surrogate and scenes."""
    started = time.monotonic()
    folder = check_folder(config.out, of=_SURROGATE)
    with _free_threads():
        found = _run(config, folder)
    print(f"done in {clock(time.monotonic() - started)}", flush=True)
    return found


def _run(config: DemoConfig, folder: Path) -> Demo:
    num_images, out = config.num_images, str(folder)
    findings: list[str] = []

    def tell(lines: list[str]) -> None:
        # Printed as they come, because the demo takes minutes.
        findings.extend(lines)
        print(*lines, sep="\n", flush=True)

    surrogate, teacher = open_pair(_SURROGATE, device="cpu")
    assert surrogate is not None
    check_folder_of(folder, _SURROGATE, surrogate, teacher)
    _begin("1 of 5: the phases depth falls into")
    # A run folder like those of `raptor distill`, so that the other commands can be tried on it afterwards.
    save_vit(surrogate, folder / "surrogate")
    shared: dict[str, Any] = {"data": "scenes", "device": config.device}
    # The shipped surrogate was cut by all tokens.
    cut = phases(["scenes"], k=[2, 3, 4], tokens="all", num_images=num_images, out=out, **shared)
    tell(_of_phases(cut.models[0]))

    _begin("2 of 5: the certificate of the built-in surrogate, three tied blocks for twelve")
    # Stitching and rates run each image some thirty times, and 16 images show their curves.
    certified = evaluate(
        out, num_images=num_images, train_images=num_images, sample_images=min(16, num_images), **shared
    )
    tell(_of_certificate(certified))

    _begin("3 of 5: three linear probes, teacher against surrogate")
    probes: dict[str, Probed] = {}
    for task in ("classify", "segment", "depth"):
        probes[task] = probe(
            out,
            task=task,
            lr=[1e-2, 1e-1],
            train_images=num_images,
            num_images=num_images // 2,
            budget="3epochs",
            batch_size=min(64, num_images),
            **shared,
        )
        tell([f"{task}: the surrogate keeps {probes[task].recovery or 0:.0%} of the teacher's score"])

    _begin("4 of 5: depth as a dynamical system")
    # A perturbed image costs about a hundred forward passes (raptor.commands.study counts them), so a few must do.
    few = max(1, num_images // 128)
    moved = dynamics(out, num_images=num_images // 4, sample_images=few, **shared)
    tell([f"dynamics: {line}" for line in moved.measured.teacher.findings])

    _begin("5 of 5: the page")
    page = report(out, num_images=2, **shared)
    return Demo(folder, page, findings, cut, certified, probes, moved)


def _of_phases(entry: ModelPhases) -> list[str]:
    within, across = entry.within[3]
    alike = f"layers of one phase are {within:.2f} alike, of different ones {across:.2f}"
    return [f"phases: {entry.suggestion}", f"phases: three give {entry.phases[3]}; {alike}"]


def _of_certificate(found: Evaluation) -> list[str]:
    certificate = found.certificate
    eps = certificate.eps["relative"]["all"]
    lines = [f"verdict: {line}" for line in certificate.judged.lines()[:2]]
    lines.append(
        f"surrogate: every layer within {eps.value:.0%} of the teacher's norm (the worst is layer {eps.layer})"
    )
    # A share says little by itself: one class for all images keeps some of it too.
    for name, (share, _, floor) in certificate.kept().items():
        lines.append(f"surrogate: {name} kept {share or 0:.1%}; one class for all images keeps {floor or 0:.1%}")
    return lines


@contextmanager
def _free_threads() -> Iterator[None]:
    """Inside, torch takes as many threads as cores are free.

    Threads that wait for a core take it from each other: on a machine with a load of 10, the demo took 48 minutes.
    """
    before = torch.get_num_threads()
    # The load of the last minute tells how many cores other programs use.
    num_busy = round(os.getloadavg()[0])
    torch.set_num_threads(max(1, before - num_busy))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _begin(text: str) -> None:
    print(f"\n== {text}", flush=True)
