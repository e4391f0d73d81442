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

# Names of Python functions, in which `train-teacher` is `train_teacher`. raptor.config has them as they are typed.
COMMANDS = (
    "correct",
    "demo",
    "depth",
    "distill",
    "dynamics",
    "edit",
    "evaluate",
    "explore",
    "export",
    "head",
    "models",
    "phases",
    "probe",
    "report",
    "show",
    "states",
    "study",
    "train_teacher",
    "watch",
)


class _Commands(ModuleType):
    """Importing `raptor.commands.phases` would make the name `phases` here the module; it stays the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets a module as an attribute of its package, and so replaces a function of the same name.
        if name in COMMANDS and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


# A command's module is imported when it is asked for, because torch alone takes over a second.
def __getattr__(name: str) -> Any:
    if name in COMMANDS:
        return getattr(import_module(f"raptor.commands.{name}"), name)
    raise AttributeError(f"module 'raptor.commands' has no attribute {name!r}")


# Python looks for `__setattr__` of a module in its class only: a function of this file would never be called.
sys.modules[__name__].__class__ = _Commands
