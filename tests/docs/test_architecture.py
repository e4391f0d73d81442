"""ARCHITECTURE.md has a line for every file of the package."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_module_is_in_the_map() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    modules = [path for path in (ROOT / "raptor").rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    one_per_entry = {"commands"}  # described as a folder: one file per command
    missing = [
        str(path.relative_to(ROOT))
        for path in modules
        if f"`{path.name}`" not in text and path.parent.name not in one_per_entry
    ]
    assert not missing, f"not in ARCHITECTURE.md: {missing}"
