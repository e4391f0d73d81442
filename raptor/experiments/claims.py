"""The paper's claims against our numbers: "paper says / we measured / agrees?", computed from the experiments' JSON."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from raptor.experiments.outcome import data_label, markdown
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
from raptor.streaming import jsonable

Values = dict[str, Any]


class Section(NamedTuple):
    """One experiment on the page."""

    title: str
    question: str
    claims: Callable[[Values | None], list[Claim]]
    figure: str


SECTIONS = {
    "stochastic-depth": Section(
        "When block recurrence emerges",
        "Teachers trained from scratch with more and more stochastic depth, and a raptor of each. Similarity is "
        "measured on training images, R2 and accuracy on held-out ones.",
        claims_stochastic_depth,
        "stochastic-depth",
    ),
    "untrained": Section(
        "Whether training makes it",
        "A trained teacher, the weights it started from, and a twin that learned few images by heart.",
        claims_untrained,
        "untrained",
    ),
    "partitions": Section(
        "Whether it matters where depth is cut",
        "The same teacher, the same budget, and different contiguous partitions.",
        claims_partitions,
        "partitions",
    ),
    "swaps": Section(
        "Whether phases are functional",
        "Every pair of blocks exchanged, within a phase and across phases.",
        claims_swaps,
        "swaps",
    ),
    "ablation": Section(
        "What each ingredient adds",
        "The same total steps a row; rows 1 to 4 are stage-1 blocks chained, rows 1 to 5 under the untouched head.",
        claims_ablation,
        "ablation",
    ),
    "table1": Section(
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

    def to_dict(self) -> Values:
        return jsonable({"claims": [claim._asdict() for claim in self.claims], "path": str(self.path)})

    def text(self) -> str:
        return f"{self.table}\nwritten to {self.path}"


def run(*, results: str = "docs/results/experiments", out: str | None = None) -> Page:
    """Write the page "paper says / we measured / agrees?" from the JSON files the experiments left.

    Args:
        results: folder that holds them, in itself or in folders inside it.
        out: the page; by default experiments.md in that folder.

    What you make of the results goes into reading.md, in that folder for the whole and beside each JSON for its part;
    the page takes it in.
    """
    folder = Path(results)
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}: give --results, where the experiments wrote their JSON")
    path = Path(out) if out else folder / "experiments.md"
    found = find_results(folder)
    if not found:
        raise ValueError(f"no results in {folder}: give --results, where the experiments wrote their JSON")
    every = [claim for name, section in SECTIONS.items() for claim in _claims(name, section, found)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page(found, path.parent, folder))
    return Page(every, path, claims_table(every))


def find_results(folder: Path) -> dict[str, list[tuple[Path, Values]]]:
    """The experiments' JSON files under `folder`, by experiment."""
    found: dict[str, list[tuple[Path, Values]]] = defaultdict(list)
    for path in sorted([*folder.glob("*.json"), *folder.glob("*/*.json")]):
        values = read_json(path)
        if isinstance(values, dict) and values.get("experiment") in SECTIONS:
            found[values["experiment"]].append((path, values))
    return found


def page(found: dict[str, list[tuple[Path, Values]]], base: Path, folder: Path) -> str:
    """The whole page, figures and files linked relative to `base`; `folder` may hold a text that opens it."""
    every = [claim for name, section in SECTIONS.items() for claim in _claims(name, section, found)]
    parts = [
        "# The paper's small-scale experiments, run again",
        "Tables and verdicts are computed from the JSON files named below by `raptor reproduce claims`; the paragraphs "
        'about them are not. What has not been run says "not run"; its recipe is in `raptor/recipes`.',
        *_reading(folder),
        "## Paper says / we measured / agrees?",
        claims_table(every),
        RULES,
    ]
    for name, section in SECTIONS.items():
        parts += [f"## {section.title}", section.question]
        for path, values in found.get(name, []):
            parts += _shown(path, values, section, base)
            parts += _reading(path.parent) if path.parent != folder else []
        if not found.get(name):
            parts.append(f"Not run: `raptor reproduce {name} --help` says how.")
    return "\n\n".join(parts) + "\n"


def claims_table(claims: list[Claim]) -> str:
    return markdown(
        ("experiment", "paper says", "we measured", "agrees?"),
        [[c.where, c.says, c.measured, c.agrees] for c in claims],
    )


def _claims(name: str, section: Section, found: dict[str, list[tuple[Path, Values]]]) -> list[Claim]:
    runs: list[tuple[Path, Values | None]] = [*found.get(name, [])] or [(Path(), None)]
    return [
        claim._replace(where=name if values is None else f"{name}, {run_label(values)}")
        for _, values in runs
        for claim in section.claims(values)
    ]


def _shown(path: Path, values: Values, section: Section, base: Path) -> list[str]:
    """One run: how it was made, its table and its figure."""
    where = Path(os.path.relpath(path, base))
    parts = [f"### {run_label(values)}", f"`{values['command']}` on {values['device']} ([{where}]({where}))."]
    parts.append(_settings(values.get("settings", {})))
    if values.get("missing"):
        parts.append(f"Not run yet: {', '.join(values['missing'])}.")
    table = path.with_suffix(".md")
    if table.exists():
        parts.append(table.read_text().strip())
    image = path.with_name(f"{section.figure}.png")
    if image.exists():
        parts.append(f"![{section.title}]({where.parent / image.name})")
    return parts


def _reading(folder: Path) -> list[str]:
    """What somebody wrote about the results in `folder`, if anything."""
    path = folder / "reading.md"
    return [path.read_text().strip()] if path.exists() else []


def _settings(settings: Values) -> str:
    """What decides the numbers, without the paths of data and weights."""
    shown = {k: v for k, v in settings.items() if v is not None and k not in ("data", "model", "weights", "teachers")}
    paths = {k: data_label(str(v)) for k, v in shown.items() if k in ("segment", "depth") and isinstance(v, str)}
    return "Settings: " + ", ".join(f"{name} {value}" for name, value in (shown | paths).items()) + "."


def run_label(values: Values) -> str:
    """What a run was made on, in a few words: its teacher if it names one, and its data."""
    settings = values.get("settings", {})
    model = settings.get("model")
    names = [Path(model).name if model and model.startswith("timm/") else None, data_label(settings.get("data", ""))]
    return ", ".join(name for name in names if name)
