"""docs/results/recurrence.md says what its result files hold."""

from __future__ import annotations

import pytest
from pages import ROOT, read

from raptor.recurrence.correct import CorrectFile
from raptor.recurrence.depth import DepthFile, DepthPoint
from raptor.recurrence.edit import EditFile, EditResult
from raptor.recurrence.watch import WatchFile

FOLDER = ROOT / "docs" / "results" / "recurrence"
PAGE = " ".join(read("docs/results/recurrence.md").split())
DEPTH = DepthFile.read(FOLDER)
WATCH = WatchFile.read(FOLDER)
EDIT = EditFile.read(FOLDER)
CORRECT = CorrectFile.read(FOLDER)


def _point(side: str, rule: str) -> DepthPoint:
    (found,) = [point for point in DEPTH.sides()[side] if point.rule == rule]
    return found


@pytest.mark.parametrize("file", [DEPTH, WATCH, EDIT, CORRECT])
def test_every_command_is_the_one_that_made_the_file(file: DepthFile | WatchFile | EditFile | CorrectFile) -> None:
    command = (file.provenance.command or "").split(" --out ")[0]
    # Options that are gone; the values typed then are the ones that are left.
    for gone in (" --rounds 1", " --attack_steps 6"):
        command = command.replace(gone, "")
    assert command in PAGE and f"{file.num_images} " in PAGE


def test_depth_on_demand() -> None:
    full = _point("surrogate", "full depth")
    best = _point("surrogate", "second<1.26")
    shorter = _point("surrogate", "shorter 2|2|4")
    entropy = _point("surrogate", "entropy<1.75")
    teacher = _point("teacher", "second<1.16")
    assert f"gives {best.speedup:.2f} times the throughput at {best.agreement:.1%} agreement" in PAGE
    assert best.agreement == full.agreement and f"{best.blocks:.0%} of the blocks" in PAGE
    assert f"gives {shorter.speedup:.2f} times at {shorter.agreement:.1%}" in PAGE
    assert f"{entropy.blocks:.0%} of the blocks at {entropy.agreement:.1%}" in PAGE
    assert f"({entropy.speedup:.2f} times)" in PAGE and f"the teacher gains {teacher.speedup:.2f} times" in PAGE
    low, high = shorter.lost_interval
    assert f"loses {100 * shorter.lost:.1f} points, with a 95 % interval of {100 * low:.1f} to {100 * high:.1f}" in PAGE
    # No rule that looks at images gains more for at most one point.
    for point in DEPTH.surrogate:
        if point.family not in ("shorter", "random") and point.lost <= 0.01:
            assert point.speedup <= best.speedup


def test_watching() -> None:
    usual = WATCH.sets[0]
    assert f"{usual.alarms:.1%} of {usual.num_images} usual images are alarms" in PAGE
    for one in WATCH.sets[1:]:
        assert one.scores is not None
        own = one.scores["surrogate"].auroc
        best = max(found.auroc for name, found in one.scores.items() if name != "surrogate")
        name = one.name.rsplit("/", 1)[-1].removesuffix(".zip")
        assert f"| {name} | {own:.3f} | {best:.3f} " in PAGE
    plain, aware = WATCH.sets[-2:]
    assert f"an alarm in {100 * aware.alarms:.0f} % of these images, not in {100 * plain.alarms:.0f} %" in PAGE
    assert aware.scores is not None
    low, high = aware.scores["surrogate"].auroc_interval
    assert f"({low:.2f} to {high:.2f})" in PAGE


def test_editing() -> None:
    def of(results: list[EditResult], phase: int) -> EditResult:
        return next(one for one in results if one.phase == phase)

    own, other = of(EDIT.surrogate, 2), of(EDIT.teacher, 2)
    assert own.random == other.random == 0 and own.at_the_end == 1
    assert f"flips {own.flipped:.0%} of {own.num_images} images" in PAGE and f"by {own.step:.2f} differences" in PAGE
    assert f"{own.stays:.0%} keep the class" in PAGE and f"of the teacher's {other.stays:.0%}" in PAGE
    assert f"gradient of the head {own.gradient:.0%}" in PAGE
    own, other = of(EDIT.surrogate, 3), of(EDIT.teacher, 3)
    assert f"(after edits at the end of phase 3, {own.stays:.0%} and {other.stays:.0%})" in PAGE


def test_correcting() -> None:
    most = 0.0
    for side in ("surrogate", "teacher"):
        for one in CORRECT.sides[side]:
            # One image that comes back by chance is all of what a weak disturbance takes.
            if one.recovered is not None and one.agreement[0] <= 0.95:
                most = max(most, *one.recovered[1:])
    assert f"at most {most:.0%} of the lost agreement" in PAGE
    for one in CORRECT.sides["surrogate"]:
        assert one.agreement_clean[-1] <= one.agreement_clean[0]
    lost_by_twin: list[float] = []
    for side, corrections in CORRECT.sides.items():
        for one in corrections:
            if one.phase != 3:
                continue
            if side == "twin":
                lost_by_twin += [one.agreement[0] - one.agreement[8], 1 - one.agreement_clean[8]]
                continue
            changes = [abs(kept - one.agreement[0]) for kept in one.agreement]
            assert max(changes[:8]) < 0.035 and changes[8] < 0.055
    assert f"the untrained twin has lost {100 * min(lost_by_twin):.0f} to {100 * max(lost_by_twin):.0f}" in PAGE
