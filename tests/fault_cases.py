from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fault_artefacts import Artefacts
from fault_runs import run
from forked import start

MODEL = {"distil": "surrogate", "teacher": "teacher"}


class Faults:
    """Runs and faults of a test, and what they left; the counts of all tests are printed at the end."""

    def __init__(self, counts: dict[str, int], report: Path) -> None:
        self.counts = counts
        self.report = report

    def start(self, kind: str, out: Path, fault: dict[str, Any] | None = None, **options: Any) -> Any:
        self.counts["runs"] += 1
        self.report.unlink(missing_ok=True)
        return start(_run, kind, out, self.report, fault, options)

    def finish(self, kind: str, out: Path, fault: dict[str, Any] | None = None, **options: Any) -> int:
        """The exit code of a run that is waited for."""
        process = self.start(kind, out, fault, **options)
        process.join()
        return process.exitcode

    def said(self) -> str:
        """The line that the last run ended with."""
        return self.report.read_text() if self.report.exists() else ""

    def fault(self, kind: str, artefacts: Artefacts | None = None) -> None:
        """Count a fault, and look at what it left."""
        self.counts[kind] += 1
        if artefacts is not None:
            before = artefacts.num_checked, len(artefacts.problems)
            artefacts.look()
            self.counts["artefacts checked"] += artefacts.num_checked - before[0]
            self.counts["lost or damaged"] += len(artefacts.problems) - before[1]

    def ends_like(self, artefacts: Artefacts, whole: Path) -> None:
        """Nothing was lost on the way, and the finished run is the same as without faults."""
        artefacts.look()
        different = artefacts.differences(whole)
        self.counts["lost or damaged"] += len(different)
        assert not artefacts.problems and not different, [*artefacts.problems, *different]


def _run(kind: str, out: Path, report: Path, fault: dict[str, Any] | None, options: dict[str, Any]) -> None:
    run(kind, out, report, fault, **options)


WholeRuns = Callable[[str], tuple[Path, float]]
"""The folder of a run of this kind that met no fault, and how long it took."""
