"""raptor demo: the whole argument on the built-in default, offline, in a few minutes on a laptop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal, Unpack

from raptor.commands.distill import distill
from raptor.commands.dynamics import dynamics
from raptor.commands.evaluate import evaluate
from raptor.commands.phases import phases
from raptor.commands.probe import probe
from raptor.commands.report import report
from raptor.data import open_data
from raptor.open import open_pair
from raptor.options import OnDevice, with_defaults
from raptor.phases import ModelPhases
from raptor.progress import clock
from raptor.train import Scores, Validator


def demo(
    out: str = "runs/demo",
    *,
    budget: str = "25s",
    from_scratch: bool = False,
    num_images: int = 512,
    **given: Unpack[OnDevice],
) -> None:
    """Phases, distillation, certificate, probes, dynamics and the page, on the built-in scenes.

    Args:
        out: run folder; what is already there is not done again.
        budget: training time of each surrogate (k = 2 and 3).
        from_scratch: start from copies of the teacher's blocks instead of refining the shipped surrogates.
        num_images: held-out images of each measurement; heads and probes train on up to four times as many.
    """
    started = time.monotonic()
    device = with_defaults(OnDevice, given)["device"]
    folder = Path(out)
    _say("1 of 6: the phases depth falls into")
    # The shipped surrogates were cut by all tokens.
    found = phases(["scenes"], data="scenes", k=[2, 3, 4], tokens="all", num_images=num_images, out=out, device=device)
    print(found.text())
    _say("2 of 6: rewrite 12 blocks as 2, and as 3")
    _distil(2, str(folder / "k2"), budget, from_scratch, num_images, device)
    after = _distil(3, out, budget, from_scratch, num_images, device)
    _say("3 of 6: the certificate")
    certificate = evaluate(
        out, data="scenes", num_images=num_images, train_images=num_images, device=device
    ).certificate
    _say("4 of 6: three linear probes, teacher against surrogate")
    recovered: dict[str, float] = {}
    tasks: tuple[Literal["classify", "segment", "depth"], ...] = ("classify", "segment", "depth")
    for task in tasks:
        done = probe(
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
        recovered[task] = done.recovery or 0.0
        print(done.text().splitlines()[-2])
    _say("5 of 6: depth as a dynamical system")
    dynamics(
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
    for line in _findings(found.models[0], certificate, after, recovered):
        print(line)
    print(f"the page: {page}")


def _distil(k: int, out: str, budget: str, from_scratch: bool, num_images: int, device: str) -> Scores:
    """Refine a shipped surrogate (or train one from the teacher's blocks); scores afterwards."""
    start = None if from_scratch else f"scenes-k{k}"
    surrogate, teacher = open_pair(f"scenes-k{k}", device="cpu")
    assert surrogate is not None and surrogate.phases is not None
    options: dict[str, Any] = dict(phases=surrogate.phases, start=start, recipe="quick", budget=budget, device=device)
    train = open_data("scenes", "train", limit=4 * num_images, size=48)
    held_out = open_data("scenes", "val", limit=num_images, size=48)
    before = Validator(teacher, train, held_out).validate(surrogate).accuracy if start else float("nan")
    done = distill("scenes", "scenes", out=out, val_images=num_images, head_images=2 * num_images, **options)
    after = done.summary.validation
    print(
        f"k={k}: accuracy {before:.1%} as shipped, {after.accuracy:.1%} after {budget} here, "
        f"{after.recovery_head:.1%} of the teacher's {after.teacher_accuracy:.1%}"
    )
    return after


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
