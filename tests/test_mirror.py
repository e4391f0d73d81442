"""Every module raptor/x/y.py has its tests in tests/x/test_y.py."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "raptor"
TESTS = Path(__file__).parent

ELSEWHERE = {
    "__main__.py": "a start in ten lines, stopped by tests/test_cli.py",
}
"""Modules that are tested elsewhere, each with the reason."""


def modules() -> list[Path]:
    """All modules, relative to the package. A package's `__init__` only names what is in it."""
    paths = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    return sorted(path for path in paths if path.name != "__init__.py")


def mirror(module: Path) -> Path:
    return TESTS / module.parent / f"test_{module.name}"


def test_every_module_has_a_test_file() -> None:
    missing = [str(m) for m in modules() if str(m) not in ELSEWHERE and not mirror(m).exists()]
    assert not missing, f"no test file for: {', '.join(missing)}"


def test_every_mirror_imports_or_runs_its_module() -> None:
    """A file that never names its module does not test it."""
    idle = []
    for module in modules():
        dotted = ".".join(("raptor", *module.with_suffix("").parts))
        names = (dotted, f"from {dotted.rpartition('.')[0]} import")  # the package names what is in it
        if mirror(module).exists() and not any(name in mirror(module).read_text() for name in names):
            idle.append(str(module))
    assert not idle, f"the test file does not import: {', '.join(idle)}"


def test_the_exceptions_are_needed() -> None:
    assert all((PACKAGE / name).exists() and not mirror(Path(name)).exists() for name in ELSEWHERE)
