"""The verbs of the command, as Python functions with the same argument names.

    from raptor.commands import phases
    phases(["scenes"], data="scenes", k=[2, 3])

Each verb's module is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

VERBS = (
    "demo", "distill", "dynamics", "evaluate", "explore", "models", "phases", "probe", "report", "reproduce",
    "train_teacher",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in VERBS:
        return getattr(import_module(f"raptor.verbs.{name}"), name)
    raise AttributeError(f"module 'raptor.commands' has no attribute {name!r}")
