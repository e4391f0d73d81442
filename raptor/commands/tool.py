"""The results of depth, watch, edit and correct: a file, its figures, and their place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raptor.commands.pair_job import SurrogateJob, open_job
from raptor.config import OnSurrogate
from raptor.recurrence.tool import ToolFile
from raptor.report.charts import Chart
from raptor.streaming import Result


@dataclass
class ToolResult(Result):
    """The result file of a tool, and where it was written."""

    measured: ToolFile
    folder: Path

    @property
    def name(self) -> str:
        return self.measured.FILE.removesuffix(".json")

    def charts(self) -> list[Chart]:
        raise NotImplementedError

    def plot(self) -> Any:
        """The main figure of the result."""
        from raptor.report.figures import drawn

        return drawn(self.name, self.charts(), self.measured.images)

    def to_dict(self) -> dict[str, Any]:
        return {self.name: self.measured.to_dict(), "folder": str(self.folder)}

    def told(self, lines: list[str], *more: str) -> str:
        """The lines, and where everything is."""
        files = " and ".join([", ".join([f"{self.name}.json", *more]), f"figures/{self.name}"])
        return "\n".join([*lines, f"written to {self.folder}: {files}"])


def open_tool(config: OnSurrogate, file: type[ToolFile]) -> SurrogateJob:
    """Both models, the images and a head, for a command whose result is `file`."""
    job = open_job(config, file.FILE.removesuffix(".json"), file.FILE)
    if len(job.judged) < 2:
        told = f"{job.data.name} has one image, and shares of images are measured"
        raise ValueError(f"{told}: give at least two with --data")
    job.find_head()
    return job
