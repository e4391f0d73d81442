from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hostile_world import make_run, make_world


@pytest.fixture(scope="session")
def plain_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and images; see `make_world`."""
    return make_world(tmp_path_factory.mktemp("world with spaces"))


@pytest.fixture(scope="session")
def whole_world(plain_world: Path) -> Path:
    """The same with a finished distillation in `run`."""
    make_run(plain_world)
    return plain_world


@pytest.fixture
def world(whole_world: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of a case."""
    monkeypatch.chdir(whole_world)
    yield whole_world


@pytest.fixture(autouse=True)
def counted(record_property: Callable[[str, object], None]) -> None:
    """Each test of this folder is one case; the sum is printed at the end."""
    record_property("hostile input", {"cases": 1})
