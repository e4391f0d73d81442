"""What a run folder must hold after a fault: every file whole, and nothing that was there before lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import same_tensors
from torch import Tensor

from raptor.run import load_checkpoint, read_metrics

CLOCK = ("images_per_s", "seconds", "provenance")


class Artefacts:
    """Looks at one run folder after each fault, and counts what is damaged or gone."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder
        self.model = folder / model
        self.num_checked = 0
        self.problems: list[str] = []
        self.step = -1
        self.present: set[str] = set()

    def look(self) -> None:
        """After a fault: whatever is there is whole, and is not older than at the last look."""
        self._try("config.yaml", lambda path: yaml.safe_load(path.read_text())["seed"])
        self._try("checkpoint/latest", self._checkpoint)
        self._try("metrics.jsonl", lambda path: read_metrics(self.folder))
        self._try("head.safetensors", load_file)
        self._try("summary.json", self._summary)
        if (self.model / "config.json").exists():
            self._try(f"{self.model.name}/config.json", lambda path: json.loads(path.read_text())["format"])
            self._try(f"{self.model.name}/model.safetensors", load_file, needed=True)

    def _try(self, name: str, read: Any, needed: bool = False) -> None:
        path = self.folder / name
        if not path.exists():
            if needed or name in self.present:
                self.problems.append(f"{name} is lost")
            return
        self.num_checked += 1
        if not name.startswith(self.model.name):  # a model that is replaced is gone for a moment, by design
            self.present.add(name)
        try:
            read(path)
        except Exception as error:
            self.problems.append(f"{name} is damaged: {error!r}")

    def _checkpoint(self, _path: Path) -> None:
        saved = load_checkpoint(self.folder)
        assert saved is not None
        number = int((self.folder / "checkpoint" / "latest").read_text().removeprefix("step-"))
        assert number >= self.step, f"step {self.step} was saved, and now it is {number}"
        assert len(read_metrics(self.folder)) >= saved[1]["num_logged"], "lines of metrics.jsonl are lost"
        self.step = number

    def _summary(self, path: Path) -> None:
        json.loads(path.read_text())
        with safe_open(self.model / "model.safetensors", "pt"):  # a summary says that the model is there
            assert (self.model / "config.json").exists()

    def differences(self, whole: Path) -> list[str]:
        """What of a finished run is not as in the run `whole`, which met no fault."""
        other = whole / self.model.name
        found = []
        if not same_tensors(_tensors(self.model), _tensors(other)):
            found.append("the weights differ")
        if _without_clock(read_metrics(self.folder)) != _without_clock(read_metrics(whole)):
            found.append("metrics.jsonl differs")
        summaries = (json.loads((folder / "summary.json").read_text()) for folder in (self.folder, whole))
        if len({json.dumps(_without_clock(summary), sort_keys=True) for summary in summaries}) > 1:
            found.append("summary.json differs")
        return found


def _tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def _without_clock(value: Any) -> Any:
    """Parsed JSON without the fields that tell the time or the command."""
    if isinstance(value, dict):
        return {key: _without_clock(entry) for key, entry in value.items() if key not in CLOCK}
    return [_without_clock(entry) for entry in value] if isinstance(value, list) else value
