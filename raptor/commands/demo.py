"""raptor demo: the whole argument on the built-in default, offline, in a few minutes on a laptop."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raptor.commands.distill import distill
from raptor.commands.dynamics import Dynamics, dynamics
from raptor.commands.evaluate import Evaluation, evaluate
from raptor.commands.phases import phases
from raptor.commands.probe import Probed, probe
from raptor.commands.report import Page, report
from raptor.config import DemoConfig
from raptor.data import open_data
from raptor.phases.study import ModelPhases
from raptor.progress import clock
from raptor.provenance import command
from raptor.report.phases import SavedPhases
from raptor.run import check_folder
from raptor.streaming import Result
from raptor.train import Distilled, Scores, Validator
from raptor.train.schedule import Budget
from raptor.vit.pair import open_pair


@dataclass
class Demo(Result):
    """What the demo found: the result of each command, the page, and what they say in a few lines."""

    folder: Path
    page: Page
    findings: list[str]
    phases: SavedPhases
    distilled: dict[int, Distilled]
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
        return "\n".join([*self.findings, f"the page: {self.page.path}"])


@command(DemoConfig)
def demo(config: DemoConfig) -> Demo:
    """Phases, distillation, certificate, probes, dynamics and the page, on the built-in scenes."""
    started = time.monotonic()
    out, num_images, device = config.out, config.num_images, config.device
    Budget.parse(config.budget)
    folder = check_folder(out)
    _say("1 of 6: the phases depth falls into")
    # The shipped surrogates were cut by all tokens.
    found = phases(["scenes"], data="scenes", k=[2, 3, 4], tokens="all", num_images=num_images, out=out, device=device)
    print(found.text())
    _say("2 of 6: rewrite 12 blocks as 2, and as 3")
    places = {2: str(folder / "k2"), 3: out}
    distilled = {k: _distil(k, place, config) for k, place in places.items()}
    _say("3 of 6: the certificate")
    judged = evaluate(out, data="scenes", num_images=num_images, train_images=num_images, device=device)
    _say("4 of 6: three linear probes, teacher against surrogate")
    probes: dict[str, Probed] = {}
    for task in ("classify", "segment", "depth"):
        probes[task] = probe(
            out,
            task=task,
            data="scenes",
            lrs=[1e-3, 1e-2, 1e-1],
            limit=3 * num_images // 2,
            val_images=num_images,
            epochs=4,
            batch_size=min(64, num_images),
            device=device,
        )
        print(probes[task].text().splitlines()[-2])
    _say("5 of 6: depth as a dynamical system")
    moved = dynamics(
        out,
        data="scenes",
        num_images=num_images // 2,
        stability_images=max(1, num_images // 64),
        rank_images=max(1, num_images // 8),
        intervention_images=max(1, num_images // 16),
        device=device,
    )
    _say("6 of 6: the page")
    page = report(out)
    _say(f"done in {clock(time.monotonic() - started)}")
    recovered = {task: done.recovery or 0.0 for task, done in probes.items()}
    lines = _findings(found.models[0], judged.certificate, distilled[3].summary.validation, recovered)
    return Demo(folder, page, lines, found, distilled, judged, probes, moved)


def _distil(k: int, out: str, config: DemoConfig) -> Distilled:
    """Refine a shipped surrogate (or train one from the teacher's blocks), and say what that changed."""
    num_images, start = config.num_images, None if config.from_scratch else f"scenes-k{k}"
    surrogate, teacher = open_pair(f"scenes-k{k}", device="cpu")
    assert surrogate is not None and surrogate.phases is not None
    options: dict[str, Any] = dict(
        phases=surrogate.phases, start=start, recipe="quick", budget=config.budget, device=config.device
    )
    train = open_data("scenes", "train", limit=4 * num_images, size=48)
    held_out = open_data("scenes", "val", limit=num_images, size=48)
    before = Validator(teacher, train, held_out).validate(surrogate).accuracy if start else float("nan")
    done = distill("scenes", "scenes", out=out, val_images=num_images, head_images=2 * num_images, **options)
    assert isinstance(done, Distilled)
    after = done.summary.validation
    print(
        f"k={k}: accuracy {before:.1%} as shipped, {after.accuracy:.1%} after {config.budget} here, "
        f"{after.recovery_head:.1%} of the teacher's {after.teacher_accuracy:.1%}"
    )
    return done


def _findings(entry: ModelPhases, certificate: Any, after: Scores, recovered: dict[str, float]) -> list[str]:
    cut = entry.phases[3]
    within, across = entry.within[3]
    eps = certificate.eps["relative"]["all"]
    trained, overall = certificate.judged.lines()[:2]
    kept = ", ".join(f"{task} {share:.0%}" for task, share in recovered.items())
    return [
        f"verdict: {trained}",
        f"verdict: {overall}",
        f"phases: {entry.suggestion}",
        f"phases: three give {cut}; layers of one phase are {within:.2f} alike, of different ones {across:.2f}",
        f"surrogate: 3 tied blocks for 12, accuracy {after.recovery_head:.1%} of the teacher's; every layer within "
        f"{eps.value:.0%} of the teacher's norm (the worst is layer {eps.layer})",
        f"probes: share of the teacher's score that the surrogate keeps: {kept}",
    ]


def _say(text: str) -> None:
    print(f"\n== {text}", flush=True)
