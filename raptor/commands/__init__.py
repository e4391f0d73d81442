"""The commands, as Python functions with the same argument names.

    from raptor.commands import phases
    phases(["scenes"], data="scenes", k=[2, 3])

Each command's module is imported on first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from raptor.config import COMMANDS

# As Python functions: `train-teacher` is `train_teacher`.
_FUNCTIONS = frozenset(name.replace("-", "_") for name in COMMANDS)


class _Commands(ModuleType):
    """Importing `raptor.commands.phases` would make the name `phases` here the module; it stays the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets a module as an attribute of its package, and so replaces a function of the same name.
        if name in _FUNCTIONS and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


# A command's module is imported when it is asked for, because torch alone takes over a second.
def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(import_module(f"raptor.commands.{name}"), name)
    raise AttributeError(f"module 'raptor.commands' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_FUNCTIONS)


# Python looks for `__setattr__` of a module in its class only: a function of this file would never be called.
sys.modules[__name__].__class__ = _Commands
