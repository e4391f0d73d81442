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
Work = Callable[[Json], Json]
"""Does a cell: options -> result."""


@dataclass(kw_only=True)
class SweepConfig:
    """Options of every sweep. Those of the machine decide no result and are not kept with the cells."""

    data: list[str]
    """Labelled images."""
    val: list[str] | None = None
    """Other images to judge on; by default the held-out part of the data."""
    limit: int | None = None
    """Use only this many training images."""
    val_images: int | None = None
    """Use only this many held-out images."""
    out: str
    """Folder of the results."""
    cells: list[str] | None = None
    """Do only these cells."""
    device: str = "auto"
    """auto, cpu or cuda."""
    num_workers: int | None = None
    """Processes that decode images."""
    compile: bool | None = None
    """Compile the training step; by default on a GPU."""
    trust_hub: bool = False
    """Run the code of hub repositories."""

    def options(self) -> Json:
        """What decides the results."""
        entries = dataclasses.asdict(self)
        return {name: value for name, value in entries.items() if name not in _OF_THE_MACHINE}


_OF_THE_MACHINE = ("out", "cells", "device", "num_workers", "compile", "trust_hub")
Config = TypeVar("Config")


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
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    unknown = sorted(set(entries) - {field.name for field in fields})
    if unknown:
        sys.exit(f"--config: no option is called {', '.join(unknown)}")
    # A required option may stand in the recipe or on the command line.
    absent = dataclasses.MISSING
    required = {f.name: tyro.MISSING for f in fields if f.default is absent and f.default_factory is absent}
    default = kind(**{**required, **entries})
    return tyro.cli(kind, default=default, args=rest, config=(tyro.conf.FlagConversionOff,), description=kind.__doc__)


def run_cells(config: SweepConfig, cells: Mapping[str, Json], work: Work) -> dict[str, Json]:
    """Do the cells that have no file yet. Returns the results that are there, by cell and in their order."""
    folder = Path(config.out) / "cells"
    folder.mkdir(parents=True, exist_ok=True)
    unknown = set(config.cells or ()) - set(cells)
    if unknown:
        raise ValueError(f"no cell {min(unknown)!r}: choose from {', '.join(cells)}")
    for name, options in cells.items():
        path = folder / f"{name}.json"
        if path.exists():
            _check_options(path, options)
    for number, (name, options) in enumerate(cells.items(), start=1):
        path = folder / f"{name}.json"
        if path.exists() or (config.cells is not None and name not in config.cells):
            continue
        began = time.monotonic()
        result = as_json(work(options))
        seconds = round(time.monotonic() - began, 2)
        write_json(
            path, {"cell": name, "options": options, "seconds": seconds, "device": device_name(), "result": result}
        )
        print(f"{name} in {seconds:.0f} s, cell {number} of {len(cells)}", file=sys.stderr, flush=True)
    done = {name: folder / f"{name}.json" for name in cells}
    return {name: json.loads(path.read_text())["result"] for name, path in done.items() if path.exists()}


def _check_options(path: Path, options: Json) -> None:
    """Raise where a cell was made with other options: results of two experiments are not joined in one folder."""
    saved, asked = json.loads(path.read_text())["options"], as_json(options)
    for name in sorted({*saved, *asked}):
        if saved.get(name) != asked.get(name):
            change = f"{name}: {saved.get(name)} -> {asked.get(name)}"
            raise ValueError(f"{path} was made with other options ({change}): choose another --out")


def write_result(
    config: SweepConfig, name: str, cells: Mapping[str, Json], found: Json, table: str, figure: Any = None
) -> Json:
    """Write NAME.json, NAME.md and the figure, print the table, and return what NAME.json holds."""
    folder = Path(config.out)
    files = [folder / "cells" / f"{cell}.json" for cell in cells]
    done = [json.loads(path.read_text()) for path in files if path.exists()]
    result = {
        "experiment": name,
        "command": shlex.join(["python", *sys.argv]),
        "versions": versions(),
        "device": ", ".join(dict.fromkeys(saved["device"] for saved in done)),
        "cell_seconds": round(sum(saved["seconds"] for saved in done), 1),
        "settings": config.options(),
        "missing": [path.stem for path in files if not path.exists()],
        **found,
    }
    write_json(folder / f"{name}.json", as_json(result))
    (folder / f"{name}.md").write_text(table + "\n")
    if figure is not None:
        save_figure(figure, folder / name)
    print(table)
    print(f"written to {folder / name}.json")
    return result


def save_figure(figure: Any, stem: Path) -> None:
    for kind in ("png", "svg"):
        figure.savefig(stem.with_suffix(f".{kind}"))


def write_json(path: Path, value: Any) -> None:
    """Written under another name first, so that a process that is killed leaves no half of a file."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, allow_nan=False))
    os.replace(part, path)


def as_json(value: Any) -> Any:
    """`value` as JSON has it: arrays and tuples as lists, None for what is not finite."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): as_json(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def entry(tree: Any, path: str) -> Any:
    """The entry of a JSON tree at `a/b/-1`; None where there is none."""
    for name in path.split("/"):
        if isinstance(tree, list):
            tree = tree[int(name)] if tree else None
        else:
            tree = tree.get(name) if tree is not None else None
    return tree


def versions() -> dict[str, str]:
    import torch

    import raptor

    return {"python": sys.version.split()[0], "torch": torch.__version__, "raptor": raptor.__version__}


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]], optional: Sequence[str] = ()) -> str:
    """A table as Markdown: numbers to three digits, None as a dash. `optional` columns need a value in some row."""
    kept = [i for i, name in enumerate(columns) if name not in optional or any(row[i] is not None for row in rows)]
    lines = [[columns[i] for i in kept], ["---"] * len(kept)]
    for row in rows:
        lines.append([_shown(row[i]) for i in kept])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3f}"
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
