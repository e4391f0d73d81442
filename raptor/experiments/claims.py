"""The paper's claims beside our numbers: "paper says / we measured / agrees?", computed from the experiments' JSON."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from raptor.experiments.outcome import data_label, markdown
from raptor.experiments.records import (
    Ablation,
    ExperimentFile,
    Partitions,
    StochasticDepth,
    Swaps,
    Table1,
    Untrained,
)
from raptor.experiments.verdicts import (
    RULES,
    Claim,
    claims_ablation,
    claims_partitions,
    claims_stochastic_depth,
    claims_swaps,
    claims_table1,
    claims_untrained,
)
from raptor.run import read_json, write_text

File = TypeVar("File", bound=ExperimentFile)
_Found = dict[str, list[tuple[Path, ExperimentFile]]]
"""Experiment -> its results, each with the file it was read from."""


@dataclass(frozen=True)
class _Section(Generic[File]):
    """One experiment on the page."""

    file: type[File]
    title: str
    question: str
    claims: Callable[[File | None], list[Claim]]
    figure: str


_SECTIONS: dict[str, _Section[Any]] = {
    "stochastic-depth": _Section(
        StochasticDepth,
        "When block recurrence emerges",
        "Teachers trained from scratch with increasing stochastic depth, and a raptor of each. Similarity is "
        "measured on training images, R2 and accuracy on held-out ones.",
        claims_stochastic_depth,
        "stochastic-depth",
    ),
    "untrained": _Section(
        Untrained,
        "Whether training creates it",
        "A trained teacher, the weights it started from, and a copy that is overfitted to few images.",
        claims_untrained,
        "untrained",
    ),
    "partitions": _Section(
        Partitions,
        "Whether it matters where depth is cut",
        "The same teacher, the same budget, and different contiguous partitions.",
        claims_partitions,
        "partitions",
    ),
    "swaps": _Section(
        Swaps,
        "Whether phases are functional",
        "Every pair of blocks exchanged, within a phase and across phases.",
        claims_swaps,
        "swaps",
    ),
    "ablation": _Section(
        Ablation,
        "What each ingredient adds",
        "The same total steps per row. Rows 1 to 4 chain the stage-1 blocks; rows 1 to 5 use the unchanged head.",
        claims_ablation,
        "ablation",
    ),
    "table1": _Section(
        Table1,
        "How much a surrogate keeps",
        "Linear probes of the teacher and of surrogates, several distillation seeds each.",
        claims_table1,
        "figure5",
    ),
}


@dataclass
class Page:
    """The claims table and the page around it."""

    claims: list[Claim]
    path: Path
    table: str

    def to_dict(self) -> dict[str, Any]:
        return {"claims": [claim._asdict() for claim in self.claims], "path": str(self.path)}

    def text(self) -> str:
        return f"{self.table}\nwritten to {self.path}"


def run(*, results: str = "docs/results/experiments", out: str | None = None) -> Page:
    """Write the page "paper says / we measured / agrees?" from the JSON files the experiments left.

    Args:
        results: folder that holds them, in itself or in folders inside it.
        out: the page; by default experiments.md in that folder.

    Your interpretation goes into reading.md, in that folder for the whole page and beside each JSON for its
    section; the page includes it.
    """
    folder = Path(results)
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}: give --results, where the experiments wrote their JSON")
    path = Path(out) if out else folder / "experiments.md"
    found = _find_results(folder)
    if not found:
        raise ValueError(f"no results in {folder}: give --results, where the experiments wrote their JSON")
    every = [claim for name, section in _SECTIONS.items() for claim in _claims(name, section, found)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, _page(found, path.parent, folder))
    return Page(every, path, _claims_table(every))


def _find_results(folder: Path) -> _Found:
    """The JSON files of experiments in `folder` and in the folders inside it."""
    found: _Found = defaultdict(list)
    for path in sorted([*folder.glob("*.json"), *folder.glob("*/*.json")]):
        saved = read_json(path)
        name = saved.get("experiment") if isinstance(saved, dict) else None
        if name in _SECTIONS:
            found[name].append((path, _SECTIONS[name].file.read_file(path)))
    return found


def _page(found: _Found, base: Path, folder: Path) -> str:
    """The whole page, figures and files linked relative to `base`; `folder` may hold a text that opens it."""
    every = [claim for name, section in _SECTIONS.items() for claim in _claims(name, section, found)]
    parts = [
        "# The paper's small-scale experiments, run again",
        "Tables and verdicts are computed from the JSON files named below by `raptor reproduce claims`; the paragraphs "
        'about them are not. What has not been run says "not run"; its recipe is in `raptor/recipes`.',
        *_reading(folder),
        "## Paper says / we measured / agrees?",
        _claims_table(every),
        RULES,
    ]
    for name, section in _SECTIONS.items():
        parts += [f"## {section.title}", section.question]
        for path, result in found.get(name, []):
            parts += _shown(path, result, section, base)
            parts += _reading(path.parent) if path.parent != folder else []
        if not found.get(name):
            parts.append(f"Not run: `raptor reproduce {name} --help` says how.")
    return "\n\n".join(parts) + "\n"


def _claims_table(claims: Sequence[Claim]) -> str:
    return markdown(
        ("experiment", "paper says", "we measured", "agrees?"),
        [[c.where, c.says, c.measured, c.agrees] for c in claims],
    )


def _claims(name: str, section: _Section[Any], found: _Found) -> list[Claim]:
    results: list[ExperimentFile | None] = [result for _, result in found.get(name, [])] or [None]
    return [
        claim._replace(where=name if result is None else f"{name}, {_run_label(result)}")
        for result in results
        for claim in section.claims(result)
    ]


def _shown(path: Path, result: ExperimentFile, section: _Section[Any], base: Path) -> list[str]:
    """One run: how it was made, its table and its figure."""
    where = Path(os.path.relpath(path, base))
    parts = [f"### {_run_label(result)}", f"`{result.command}` on {result.device} ([{where}]({where}))."]
    parts.append(_settings(result.settings))
    if result.missing:
        parts.append(f"Not run yet: {', '.join(result.missing)}.")
    table = path.with_suffix(".md")
    if table.exists():
        parts.append(table.read_text().strip())
    image = path.with_name(f"{section.figure}.png")
    if image.exists():
        parts.append(f"![{section.title}]({where.parent / image.name})")
    return parts


def _reading(folder: Path) -> list[str]:
    """The text of reading.md in `folder`, if it exists."""
    path = folder / "reading.md"
    return [path.read_text().strip()] if path.exists() else []


def _settings(settings: dict[str, Any]) -> str:
    """What decides the numbers, without the paths of data and weights."""
    shown = {k: v for k, v in settings.items() if v is not None and k not in ("data", "model", "weights", "teachers")}
    paths = {k: data_label(str(v)) for k, v in shown.items() if k in ("segment", "depth") and isinstance(v, str)}
    return "Settings: " + ", ".join(f"{name} {value}" for name, value in (shown | paths).items()) + "."


def _run_label(result: ExperimentFile) -> str:
    """What a run was made on, in a few words: its teacher if it names one, and its data."""
    settings = result.settings
    model = settings.get("model")
    names = [Path(model).name if model and model.startswith("timm/") else None, data_label(settings.get("data", ""))]
    return ", ".join(name for name in names if name)
