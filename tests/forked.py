"""Processes forked from a server that has imported everything: a run that is killed costs a tenth of a second, not
the import of torch."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

_PRELOADED = [
    "raptor.train",
    "raptor.commands.evaluate",
    "raptor.commands.phases",
    "raptor.commands.probe",
    "raptor.commands.states",
    "raptor.report.fidelity",
    "raptor.report.phases",
    "lightning_fabric",
    "lightning_fabric.strategies",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "rich.console",
    "timm",
]


def start(function: Callable[..., Any], *args: Any) -> BaseProcess:
    """`function(*args)` in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=_call, args=(function, *args))
    process.start()
    return process


def _call(function: Callable[..., Any], *args: Any) -> None:
    """A collection of garbage then visits none of the half a million objects that the imports made."""
    gc.freeze()
    function(*args)
