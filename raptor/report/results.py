"""What a run folder holds, as the page reads it: every file is optional, a damaged one is an error that names it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from raptor.run import RunError, read_json

FILES = (
    "summary", "phases", "certificate", "complexity", "probe-classify", "probe-segment", "probe-depth", "dynamics",
    "interventions", "images",
)  # fmt: skip
TASKS = ("classify", "segment", "depth")


@dataclass
class Results:
    """A run folder's results.

    Attributes:
        folder: where they lie.
        files: name (without `.json`) -> what the file holds; absent files are absent here.
        config: `config.yaml`, empty when there is none.
        metrics: the lines of `metrics.jsonl`.
        notes: what kept a part from being made, by the name of the file.
    """

    folder: Path
    files: dict[str, dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    def get(self, name: str) -> dict[str, Any] | None:
        return self.files.get(name)

    @property
    def phase_lengths(self) -> list[int] | None:
        """Phases the page draws: those of the surrogate, else of the dynamics, else the ones chosen from similarity."""
        for name in ("certificate", "summary", "dynamics"):
            lengths = (self.get(name) or {}).get("phases")
            if lengths:
                return [int(n) for n in lengths]
        models = (self.get("phases") or {}).get("models") or []
        return chosen_phases(models[0]) if models else None

    @property
    def facts(self) -> dict[str, Any]:
        """`ViT.describe()` of the teacher, empty when no file has it."""
        summary, phases, dynamics = self.get("summary"), self.get("phases"), self.get("dynamics")
        if summary and summary.get("teacher"):
            return dict(summary["teacher"])
        if phases and phases.get("models"):
            return dict(phases["models"][0]["model"])
        model = (dynamics or {}).get("model") or ((dynamics or {}).get("teacher") or {}).get("model")
        return dict(model) if isinstance(model, dict) else {}


def chosen_phases(entry: dict[str, Any]) -> list[int] | None:
    """Phase lengths at the chosen k of one entry of phases.json, or at the nearest k that was cut."""
    cuts = entry.get("phases") or {}
    if not cuts:
        return None
    wanted = int(entry.get("chosen_k") or 0)
    nearest = min(cuts, key=lambda k: (abs(int(k) - wanted), int(k)))
    return [int(n) for n in cuts[nearest]["lengths"]]


def read_results(folder: Path) -> Results:
    """Read every known file of `folder`; RunError when there is none, or when one is damaged."""
    if not folder.is_dir():
        raise RunError(f"{folder} is no folder: give the run folder that a command wrote with --out")
    files = {name: _read_object(folder / f"{name}.json") for name in FILES if (folder / f"{name}.json").exists()}
    if not files:
        raise RunError(f"{folder} holds no results yet: start with raptor phases MODEL --out {folder}")
    return Results(folder, files, _read_config(folder / "config.yaml"), _read_metrics(folder / "metrics.jsonl"))


def provenance_of(entry: dict[str, Any]) -> dict[str, Any]:
    """command, versions, device and seconds of a result file, at its top or under `provenance`."""
    nested = entry.get("provenance")
    return {**entry, **nested} if isinstance(nested, dict) else entry


def _read_object(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise RunError(f"{path} cannot be read (not an object): run the command that made it again")
    return value


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise RunError(f"{path} cannot be read ({reason}): run the command that made it again") from None
    return value if isinstance(value, dict) else {}


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line cut off by an interruption is passed over."""
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").splitlines()
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise RunError(f"{path} cannot be read (line {number}: {error}): delete that line") from None
    return rows
