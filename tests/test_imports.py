"""The imports follow the order of the flow: each module imports only what stands left of it, and there is no cycle.

Every import statement under raptor/ counts, also those inside functions and under `TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "raptor"

# Left to right. The entries of one tuple may import each other, as long as there is no cycle between modules.
ORDER: tuple[tuple[str, ...], ...] = (
    ("checks", "config", "files", "recipes", "run", "devices", "progress", "provenance", "streaming", "subject"),
    ("data",),
    ("vit",),
    ("phases",),
    ("surrogate",),
    ("vit.saved", "vit.shared", "vit.open", "vit.pair"),  # a surrogate is opened like any other model
    ("certificate",),
    ("export", "timm"),
    ("train",),
    ("probes", "dynamics", "recurrence"),
    ("report",),
    ("commands",),
    ("terminal",),
    ("cli", "__init__", "__main__"),
)
RANK = {name: place for place, names in enumerate(ORDER) for name in names}
MAX_ROOT_MODULES = 11


def find_modules() -> dict[str, Path]:
    """Dotted name below `raptor` -> file. A package has the name of its folder, the root package `__init__`."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(ROOT.rglob("*.py"))}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


MODULES = find_modules()


def imported_names(source: str, package: str) -> Iterator[str]:
    """Absolute dotted names of everything that a file of `package` imports, `from a import b` as `a.b`."""
    parents = package.split(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def target_module(name: str) -> str | None:
    """The module of raptor that an imported name is or is defined in; None for a name from elsewhere."""
    top, *parts = name.split(".")
    if top != "raptor":
        return None
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in MODULES:
            return ".".join(parts[:length])
    return "__init__"


def edges(modules: dict[str, Path]) -> set[tuple[str, str]]:
    """Pairs (module, module it imports)."""
    found = set()
    for name, path in modules.items():
        package = ".".join(["raptor", *path.relative_to(ROOT).parent.parts])
        found |= {(name, target_module(imported)) for imported in imported_names(path.read_text(), package)}
    return {(name, target) for name, target in found if target is not None and target != name}


def rank(module: str) -> int:
    """The place of a module by itself, else of its folder."""
    return RANK[module] if module in RANK else RANK[module.partition(".")[0]]


def find_cycles(pairs: set[tuple[str, str]]) -> set[frozenset[str]]:
    """One cycle of modules after another, each broken once it is found, until none is left."""
    pairs, cycles = set(pairs), set()
    while True:
        graph: dict[str, set[str]] = {}
        for name, target in sorted(pairs):
            graph.setdefault(name, set()).add(target)
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            cycle = error.args[1]  # each entry is imported by the next one
            cycles.add(frozenset(cycle))
            pairs.discard((cycle[1], cycle[0]))
        else:
            return cycles


def test_every_module_has_a_place_in_the_order() -> None:
    assert {name.partition(".")[0] for name in MODULES} <= set(RANK)


def test_no_module_imports_what_stands_right_of_it() -> None:
    against = {(name, target) for name, target in edges(MODULES) if rank(name) < rank(target)}
    assert against == set()


def test_modules_do_not_import_each_other_in_a_cycle() -> None:
    assert find_cycles(edges(MODULES)) == set()


def test_the_root_holds_few_modules() -> None:
    entry_points = {"__init__", "__main__"}
    modules = {path.stem for path in ROOT.glob("*.py")} - entry_points
    assert len(modules) <= MAX_ROOT_MODULES, f"{len(modules)} modules in raptor/: put new ones into a folder"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import raptor.vit.view", {"raptor.vit.view"}),
        ("def f():\n    from raptor.data import stream", {"raptor.data.stream"}),
        ("if TYPE_CHECKING:\n    from raptor.phases import Phases", {"raptor.phases.Phases"}),
        ("from .view import ViT", {"raptor.vit.view.ViT"}),
        ("from ..phases import Phases", {"raptor.phases.Phases"}),
        ("from . import view", {"raptor.vit.view"}),
    ],
)
def test_imports_are_found_wherever_they_stand(source: str, expected: set[str]) -> None:
    assert set(imported_names(source, "raptor.vit")) == expected


def test_cycles_are_found() -> None:
    assert find_cycles({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")}) == {frozenset("abc")}
    assert find_cycles({("a", "b"), ("b", "c"), ("a", "c")}) == set()
