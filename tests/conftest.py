from __future__ import annotations

import gc
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from quick import DRAWN, blank_figures, short_run_times
from remembered_scenes import remembered
from tiny_models import tiny_timm
from torch import Tensor, nn

from raptor.vit.view import ViT

torch.set_num_threads(1)
for _ignored in (signal.SIGHUP, signal.SIGINT):  # by nohup, or by a shell that runs the tests in the background
    if signal.getsignal(_ignored) is signal.SIG_IGN:
        signal.signal(_ignored, signal.SIG_DFL if _ignored == signal.SIGHUP else signal.default_int_handler)


TOGETHER = {
    "tests/paper/": "the sweep of their conftest.py",
    "tests/report/": "the run folder of their conftest.py",
    "tests/faults/": "a process that has imported everything, from which others are forked",
    "tests/journeys/test_ranks.py": "a process that has imported everything, from which others are forked",
}
"""Files that share something that takes seconds to make, and what it is. One worker runs all that share it."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files, as with `--dist loadfile`, and `TOGETHER`."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = (what for start, what in TOGETHER.items() if nodeid.startswith(start))
            return next(shared, super()._split_scope(nodeid))

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, since a worker runs whole files."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """A collection of garbage no longer visits the million objects that the imports made."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def remembered_scenes() -> Iterator[None]:
    """Data sets of scenes draw each image once. Tests of the drawing itself call `draw_scenes` in its module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raptor.data.scenes.drawn.draw_scenes", remembered)
        yield


@pytest.fixture(scope="session", autouse=True)
def short_times() -> Iterator[None]:
    """Every certificate times its models, and no test reads how long they took. Every command draws its figures, and
    few tests read the files; `drawn_figures` is for these."""
    with pytest.MonkeyPatch.context() as patch:
        short_run_times(patch)
        blank_figures(patch)
        yield


@pytest.fixture
def drawn_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures in files look as a user sees them."""
    monkeypatch.setattr(Figure, "savefig", DRAWN)


@pytest.fixture
def teacher() -> ViT:
    """Four blocks, a cls token, two registers, four patches, five classes."""
    return tiny_timm("vit_small_patch14_reg4_dinov2", reg_tokens=2, num_classes=5)


@pytest.fixture
def rotary() -> ViT:
    """Four rotary blocks whose arguments come from the model."""
    return tiny_timm("vit_small_patch16_dinov3", num_classes=5)


@pytest.fixture
def snapshot() -> Callable[[nn.Module], dict[str, Tensor]]:
    """A copy of a module's state dict."""
    return lambda model: {k: v.clone() for k, v in model.state_dict().items()}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests counted with `record_property(NAME, {what: number})`, summed over all tests."""
    totals: dict[str, Counter[str]] = {}
    reports = [report for kind in terminalreporter.stats.values() for report in kind]
    calls = [report for report in reports if getattr(report, "when", "") == "call"]
    for name, counts in (entry for report in calls for entry in report.user_properties):
        if isinstance(counts, dict):
            totals.setdefault(name, Counter()).update(counts)
    for name, counts in totals.items():
        terminalreporter.write_line(f"{name}: " + ", ".join(f"{number} {what}" for what, number in counts.items()))
