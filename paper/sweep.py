"""What the scripts share: options from the command line and a recipe, cells of a sweep, tables and result files.

A sweep is a folder with one JSON file per cell: `FOLDER/cells/NAME.json` holds the options and the result of the cell.
A cell whose file is there is not done again, so the same command continues where it stopped.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tyro
import yaml

Json = dict[str, Any]
"""A JSON object: the options or the result of a cell."""
Cell = str | Callable[[Json], Any]
"""A column of a table: where its value stands in a row, or a function of the row."""
Config = TypeVar("Config")


@dataclass(kw_only=True)
class SweepConfig:
    """Options of every sweep. The comment of an option is its line in --help."""

    data: list[str]  # labelled images
    val: list[str] | None = None  # other images to judge on; by default the held-out part of the data
    limit: int | None = None  # use only this many training images
    val_images: int | None = None  # use only this many held-out images
    out: str  # folder of the results
    cells: list[str] | None = None  # do only these cells
    device: str = "auto"  # auto, cpu or cuda
    num_workers: int | None = None  # processes that decode images
    compile: bool | None = None  # compile the training step; by default on a GPU
    trust_hub: bool = False  # run the code of hub repositories

    def options(self, *left_out: str) -> Json:
        """What decides the results, which is kept with every cell; the machine does not, nor do the names given."""
        entries = dataclasses.asdict(self)
        for name in ("out", "cells", "device", "num_workers", "compile", "trust_hub", *left_out):
            entries.pop(name, None)
        return entries


def read_config(kind: type[Config], words: Sequence[str] | None = None) -> Config:
    """The command line as a `kind`. `--config FILE` gives defaults, and what is typed beside it wins."""
    rest = list(sys.argv[1:] if words is None else words)
    entries: Json = {}
    if "--config" in rest:
        place = rest.index("--config")
        if place + 1 == len(rest):
            sys.exit("--config needs a YAML file")
        entries = yaml.safe_load(Path(rest[place + 1]).read_text())
        del rest[place : place + 2]

    # A required option may stand in the recipe or on the command line.
    defaults: Json = {}
    known = set()
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        known.add(field.name)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            defaults[field.name] = tyro.MISSING
    unknown = sorted(set(entries) - known)
    if unknown:
        sys.exit(f"--config: no option is called {', '.join(unknown)}")
    default = kind(**{**defaults, **entries})
    return tyro.cli(kind, default=default, args=rest, config=(tyro.conf.FlagConversionOff,), description=kind.__doc__)


def run_cells(config: SweepConfig, cells: Mapping[str, Json], work: Callable[[Json], Json]) -> dict[str, Json]:
    """Do the cells that have no file yet. Returns the results that are there, by cell and in their order."""
    folder = Path(config.out) / "cells"
    folder.mkdir(parents=True, exist_ok=True)
    unknown = set(config.cells or ()) - set(cells)
    if unknown:
        raise ValueError(f"no cell {min(unknown)!r}: choose from {', '.join(cells)}")
    # All are checked before the first is done, which may take hours.
    for name, options in cells.items():
        path = folder / f"{name}.json"
        if path.exists():
            _check_options(path, options)

    results: dict[str, Json] = {}
    for number, (name, options) in enumerate(cells.items(), start=1):
        path = folder / f"{name}.json"
        is_wanted = config.cells is None or name in config.cells
        if is_wanted and not path.exists():
            began = time.monotonic()
            result = as_json(work(options))
            seconds = round(time.monotonic() - began, 2)
            saved = {"cell": name, "options": options, "seconds": seconds, "device": _device_name(), "result": result}
            write_json(path, saved)
            print(f"{name} in {seconds:.0f} s, cell {number} of {len(cells)}", file=sys.stderr, flush=True)
        if path.exists():
            results[name] = json.loads(path.read_text())["result"]
    return results


def _check_options(path: Path, options: Json) -> None:
    """Raise where a cell was made with other options: results of two experiments are not joined in one folder."""
    saved = json.loads(path.read_text())["options"]
    asked = as_json(options)
    for name in sorted({*saved, *asked}):
        if saved.get(name) != asked.get(name):
            change = f"{name}: {saved.get(name)} -> {asked.get(name)}"
            raise ValueError(f"{path} was made with other options ({change}): choose another --out")


def write_result(
    config: SweepConfig,
    name: str,
    cells: Mapping[str, Json],
    found: Json,
    table: str,
    draw: Callable[[], Any] | None = None,
) -> Json:
    """Write NAME.json, NAME.md and the figure (where some cell is done), print the table, and return the JSON."""
    # Imported here because `raptor` and torch take seconds, which --help need not wait for.
    import torch

    import raptor

    folder = Path(config.out)
    done = []
    missing = []
    for cell in cells:
        path = folder / "cells" / f"{cell}.json"
        if path.exists():
            done.append(json.loads(path.read_text()))
        else:
            missing.append(cell)
    python = sys.version.split()[0]
    result = {
        "experiment": name,
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"python": python, "torch": torch.__version__, "raptor": raptor.__version__},
        "device": ", ".join(dict.fromkeys(column(done, "device"))),
        "cell_seconds": round(sum(column(done, "seconds")), 1),
        "settings": config.options(),
        "missing": missing,
        **found,
    }
    write_json(folder / f"{name}.json", as_json(result))
    (folder / f"{name}.md").write_text(table + "\n")
    if draw is not None and done:
        draw().savefig(folder / f"{name}.png")
    print(table)
    print(f"written to {folder / name}.json")
    return result


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def write_json(path: Path, value: Any) -> None:
    """Written under another name first, so that a process that is killed leaves no half of a file."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, allow_nan=False))
    os.replace(part, path)


def as_json(value: Any) -> Any:
    """`value` as JSON has it: arrays and tuples as lists, None for what is not finite."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): as_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def entry(tree: Any, path: str) -> Any:
    """The entry of a JSON tree at `a/b/-1`; None where there is none."""
    for name in path.split("/"):
        if not tree:
            return None
        tree = tree[int(name)] if isinstance(tree, list) else tree.get(name)
    return tree


def where(rows: Sequence[Json], **wanted: Any) -> list[Json]:
    """The rows that have these entries."""
    found = list(rows)
    for name, value in wanted.items():
        found = [row for row in found if row[name] == value]
    return found


def column(rows: Sequence[Json], path: str) -> list[Any]:
    """The entry of each row at `a/b/-1`; None for a row without one."""
    return [entry(row, path) for row in rows]


def table(rows: Sequence[Json], columns: Mapping[str, Cell], optional: Sequence[str] = ()) -> str:
    """The rows as a table: for each column the entry of a row at `a/b/-1`, or what a function makes of the row."""
    lines = []
    for row in rows:
        lines.append([cell(row) if callable(cell) else entry(row, cell) for cell in columns.values()])
    return markdown(list(columns), lines, optional)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]], optional: Sequence[str] = ()) -> str:
    """A table as Markdown: numbers to three digits, None as a dash. `optional` columns need a value in some row."""
    shown = []
    for place, name in enumerate(columns):
        cells = [row[place] for row in rows]
        if name not in optional or cells.count(None) < len(cells):
            shown.append([name, "---", *map(_shown, cells)])
    lines = []
    for line in zip(*shown):
        lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):  # phase lengths
        return sum_of(value)
    return str(value).replace("|", "\\|")


def sum_of(lengths: Sequence[int]) -> str:
    """Phase lengths as the tables show them: `7+3+2`."""
    return "+".join(map(str, lengths))


def data_label(spec: str | Sequence[str]) -> str:
    """The name of the data without its folder, archive parts and ending: `tiny-imagenet-100`."""
    if not isinstance(spec, str):
        return " + ".join(map(data_label, spec))
    kind = spec.partition(":")[0]
    if kind in ("cifar10", "cifar100", "imagenet", "nyuv2", "ade20k"):
        return kind
    last = Path(spec.split(",")[0].rstrip("/")).name
    last = re.sub(r"\.(zip|tar)$", "", last)
    return re.sub(r"[-_](train|val|test|\*|\{).*$", "", last).rstrip("-_*")
