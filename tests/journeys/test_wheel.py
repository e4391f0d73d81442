"""The wheel in an environment that holds it and its core dependencies only: `raptor demo`, outside the source tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKED = ("raptor", "pyproject.toml", "README.md", "LICENSE")
EXTRAS = ("transformers", "datasets", "wandb", "tensorboard", "h5py", "gradio", "pandas", "pytest")


def run(*words: object, cwd: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because files of an earlier build in the source tree would be packed too."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in PACKED:
        source, copy = ROOT / name, folder / "source" / name
        copy.parent.mkdir(exist_ok=True)
        shutil.copytree(source, copy, ignore=ignored) if source.is_dir() else shutil.copy(source, copy)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", folder, folder / "source", cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def required(lines: list[str], extras: frozenset[str] = frozenset({""})) -> Iterator[Requirement]:
    for requirement in map(Requirement, lines):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            yield requirement


def with_dependencies(lines: list[str]) -> dict[str, metadata.Distribution]:
    """The installed distributions that requirements stand for, with all that these require in turn."""
    found: dict[str, metadata.Distribution] = {}
    seen, open_ = set(), list(required(lines))
    while open_:
        requirement = open_.pop()
        key = (re.sub(r"[-_.]+", "-", requirement.name).lower(), frozenset(requirement.extras))
        if key not in seen:
            seen.add(key)
            found[key[0]] = distribution = metadata.distribution(requirement.name)
            open_ += required(distribution.requires or [], frozenset({"", *requirement.extras}))
    return found


@pytest.fixture(scope="module")
def bare(wheel: Path) -> Path:
    """An environment without pip. Dependencies are links to the ones installed here; the wheel is really installed."""
    folder = wheel.parent / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=wheel.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = message_from_bytes(file.read(name)).get_all("Requires-Dist") or []
    for distribution in with_dependencies(lines).values():
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=wheel.parent)
    run(*pip, "check", cwd=wheel.parent)
    return folder / "bin"


def test_the_environment_has_the_wheel_and_no_extra(bare: Path, tmp_path: Path) -> None:
    code = "import importlib.util, raptor; print(raptor.__file__); "
    code += f"print([name for name in {EXTRAS} if importlib.util.find_spec(name)])"
    where, extras = run(bare / "python", "-c", code, cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(bare.parent) and extras == "[]"
    assert (Path(where).parent / "py.typed").exists()


@pytest.mark.slow
def test_the_demo_ends_with_findings_and_a_page(bare: Path, tmp_path: Path) -> None:
    options = "--out demo --num_images 16 --device cpu"
    printed = run(bare / "raptor", "demo", *options.split(), cwd=tmp_path)
    for step in range(1, 6):
        assert f"== {step} of 5" in printed
    for start in ("phases: three give", "verdict: ", "depth: the surrogate keeps"):
        assert start in printed
    assert printed.strip().endswith("the page: demo/report.html")
    out = tmp_path / "demo"
    assert (out / "report.html").stat().st_size > 1_000_000
    names = ("phases", "certificate", "probe-classify", "probe-segment", "probe-depth", "dynamics", "interventions")
    assert all((out / f"{name}.json").is_file() for name in names)
