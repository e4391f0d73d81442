"""docs/method.md names, for each definition, the function that computes it: every name must exist."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

METHOD = Path(__file__).parents[2] / "docs" / "method.md"
NAMES = sorted(set(re.findall(r"`(raptor(?:\.\w+)+)`", METHOD.read_text())))


def _find(name: str) -> Any:
    """The object behind a dotted name: the longest importable module, then attributes."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            found = getattr(found, attribute)
        return found
    raise AssertionError(name)


@pytest.mark.parametrize("name", NAMES)
def test_every_named_function_exists(name: str) -> None:
    assert callable(_find(name)) or _find(name).__doc__


def test_the_page_names_functions_of_every_step() -> None:
    packages = {name.split(".")[1] for name in NAMES}
    assert {"vit", "phases", "surrogate", "certificate", "train", "probes", "dynamics"} <= packages
