"""A sweep: named cells, each with its own result file, run in any order and by several processes at once.

FOLDER/cells/NAME.json    the result of a finished cell, written whole
FOLDER/cells/NAME.claim   locked by the process that works on the cell; the lock ends with the process
FOLDER/cells/NAME.error   why the cell failed last time; the next command tries it again
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TextIO, TypedDict, TypeVar, Unpack

from raptor.data.apart import Described, changed_images
from raptor.devices import device_name
from raptor.options import Compiling, Decoding, HeldOut, Limited, OnDevice, Option, with_defaults
from raptor.progress import clock
from raptor.provenance import ImagesRead, Provenance, note_read, recording
from raptor.run import Interrupted, RunError, check_folder, hold_alone, let_go, read_json, write_text
from raptor.streaming import Record, jsonable

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """One measurement of a sweep. `options` decide its result and are kept beside it.

    made_of: fingerprints of what the options only name, such as the teacher's weights; kept beside it too.
    """

    name: str
    options: dict[str, Any]
    made_of: dict[str, str] = field(default_factory=dict)

    def check_contents(self, had: Mapping[str, str], path: Path) -> None:
        """Raise if `path` was made with something else under the same name; files of earlier versions do not say."""
        for name, value in self.made_of.items():
            if had.get(name, value) != value:
                raise RunError(f"{path} was made with another {name} under the same name: choose another --out")


_Work = Callable[[Cell], Record | dict[str, Any]]
"""Does a cell and returns its result. Has to be picklable, because other processes call it too."""


DescribedImages = dict[str, Described]
"""What is remembered of images, by the option that names them."""


@dataclass(frozen=True)
class Sweep:
    """Cells in the order in which they are done, the folder of their results, and the device they run on here.

    `images` are those of all cells. Beside its result each cell keeps the ones of its own options.
    """

    folder: Path
    cells: tuple[Cell, ...]
    device: str = "cpu"
    images: DescribedImages = field(default_factory=dict)

    def path(self, name: str, kind: str = "json") -> Path:
        return self.folder / "cells" / f"{name}.{kind}"

    def read(self, name: str) -> dict[str, Any]:
        """The saved result of a cell; RunError that names its file when it is damaged."""
        path = self.path(name)
        saved = read_json(path, "delete it, and the same command makes it again")
        kinds = {
            "options": dict,
            "result": dict,
            "seconds": int | float,
            "device": str,
            "versions": dict,
            "provenance": dict,
            "made_of": dict,
            "images": dict,
        }
        needed = ("options", "result", "seconds")
        for key, kind in kinds.items():
            if (key in needed or key in saved) and not isinstance(saved.get(key), kind):
                raise RunError(f"{path} has no whole {key}: delete it, and the same command makes it again")
        return saved

    def results(self) -> dict[str, dict[str, Any]]:
        """The results that are there, by cell, in the order of the cells."""
        found = {c.name: self.read(c.name) for c in self.cells if self.path(c.name).exists()}
        return {name: saved["result"] for name, saved in found.items()}

    def seconds(self) -> list[float]:
        """How long each finished cell took."""
        return [self.read(c.name)["seconds"] for c in self.cells if self.path(c.name).exists()]

    def made(self) -> dict[str, Any]:
        """Where and with which versions the finished cells ran, whatever machine puts them together; how long all of
        them took, and which failed. The images that they read are noted as those of the command."""
        found = [self.read(c.name) for c in self.cells if self.path(c.name).exists()]
        devices = dict.fromkeys(saved["device"] for saved in found if "device" in saved)
        named: dict[str, Any] = {"device": ", ".join(devices)} if devices else {}
        used = [saved["versions"] for saved in found if "versions" in saved]
        if used:
            named["versions"] = {name: ", ".join(dict.fromkeys(v[name] for v in used if name in v)) for name in used[0]}
        for saved in found:
            for entry in (saved.get("provenance") or {}).get("images", []):
                note_read(ImagesRead.from_dict(entry))
        failed = list(self.failed())
        return {
            **named,
            **({"failed": failed} if failed else {}),
            "cell_seconds": round(sum(saved["seconds"] for saved in found), 1),
        }

    def missing(self) -> list[Cell]:
        return [cell for cell in self.cells if not self.path(cell.name).exists()]

    def missing_names(self) -> list[str]:
        return [cell.name for cell in self.missing()]

    def failed(self) -> dict[str, str]:
        """Why each failed cell failed."""
        return {
            c.name: self.path(c.name, "error").read_text(encoding="utf-8", errors="replace")
            for c in self.missing()
            if self._has_error(c)
        }

    def _has_error(self, cell: Cell) -> bool:
        return self.path(cell.name, "error").exists()

    def check_options(self) -> None:
        """Raise if a result was made with other options, or with something else under the same name."""
        for cell in self.cells:
            if not self.path(cell.name).exists():
                continue
            saved = self.read(cell.name)
            old, new = saved["options"], json.loads(json.dumps(cell.options))
            changed = [k for k in sorted({*old, *new}) if old.get(k) != new.get(k)]
            if changed:
                what = "; ".join(f"{k}: {old.get(k)} -> {new.get(k)}" for k in changed[:3])
                raise RunError(f"{self.path(cell.name)} was made with other options ({what}): choose another --out")
            cell.check_contents(saved.get("made_of", {}), self.path(cell.name))

    def images_of(self, cell: Cell) -> DescribedImages:
        return {option: described for option, described in self.images.items() if option in cell.options}

    def check_images(self) -> None:
        """Raise if a result was made on other images. Those of earlier versions do not say on which."""
        for cell in self.cells:
            if self.path(cell.name).exists():
                check_same_images(self.path(cell.name), self.read(cell.name).get("images", {}), self.images_of(cell))

    def select(self, names: str | None) -> Sweep:
        """Only the cells named in `names`, separated by commas; all for None."""
        if names is None:
            return self
        wanted = [name.strip() for name in names.split(",") if name.strip()]
        known = {cell.name for cell in self.cells}
        strange = [name for name in wanted if name not in known]
        if strange or not wanted:
            missing = strange[0] if strange else names
            raise ValueError(f"no cell {missing!r}: choose from {', '.join(cell.name for cell in self.cells)}")
        return replace(self, cells=tuple(cell for cell in self.cells if cell.name in wanted))


def check_same_images(path: Path, saved: DescribedImages, found: DescribedImages) -> None:
    """Raise if the images that the file `path` was made on are others by now."""
    try:
        both = [(option, saved[option], found[option]) for option in saved if option in found]
        changed = [f"{option}, {part}" for option, old, new in both for part in changed_images(old, new)]
    except (AttributeError, KeyError, TypeError):
        raise RunError(f"{path} has no whole images: delete it, and the same command makes it again") from None
    if changed:
        raise RunError(f"{path} was made on other images ({'; '.join(changed[:3])}): choose another --out")


class CellOptions(TypedDict, total=False):
    """Which cells are done, by how many processes and for how long."""

    jobs: Annotated[int, Option(1, "processes that run at the same time, each with its own num_workers.")]
    cells: Annotated[str | None, Option(None, "only these, separated by commas.")]
    max_seconds: Annotated[float | None, Option(None, "stop cleanly after this time; the same command continues.")]


class SweepOptions(CellOptions, HeldOut, OnDevice, Decoding, total=False):
    """What every sweep takes."""


class TrainingSweepOptions(SweepOptions, Limited, Compiling, total=False):
    """What a sweep takes that trains."""


def run_sweep(
    sweep: Sweep, work: _Work, images: Callable[[], DescribedImages] = dict, **given: Unpack[CellOptions]
) -> dict[str, dict[str, Any]]:
    """Do the cells that have no result yet, and return the results of the whole sweep, by cell.

    `work` does one cell, and `images` describes what the cells read: results made on other images are refused. Other
    commands may work on the same folder at the same time. A training run that is stopped by `max_seconds` writes a
    checkpoint, and the next command continues it.
    """
    options = with_defaults(CellOptions, given)
    jobs, cells, max_seconds = options["jobs"], options["cells"], options["max_seconds"]
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {jobs}")
    sweep.check_options()
    sweep = replace(sweep, images=_describe(images, is_finished=not sweep.select(cells).missing()))
    sweep.check_images()
    chosen = sweep.select(cells)
    check_folder(sweep.folder)
    (sweep.folder / "cells").mkdir(parents=True, exist_ok=True)
    deadline = None if max_seconds is None else time.monotonic() + max_seconds
    num_missing = len(chosen.missing())
    try:
        with _stopping(deadline):
            if jobs == 1:
                do_cells(chosen, work, deadline)
            elif num_missing:
                _do_in_processes(chosen, work, deadline, min(jobs, num_missing))
    except (Interrupted, KeyboardInterrupt):
        _say(f"stopped with {len(chosen.missing())} cells left: the same command continues from there")
        if not _is_past(deadline):
            raise KeyboardInterrupt from None
    _report_failures(chosen)
    return sweep.results()


def _describe(images: Callable[[], DescribedImages], is_finished: bool) -> DescribedImages:
    """The images of a sweep; none where it is finished and they cannot be opened: results are put together anywhere."""
    try:
        return images()
    except ValueError as error:
        if is_finished and not isinstance(error, RunError):
            return {}
        raise


def _report_failures(sweep: Sweep) -> None:
    """Print why cells failed; RunError when all of them did."""
    reasons = {name: text.strip().splitlines()[-1] for name, text in sweep.failed().items()}
    if reasons and len(reasons) == len(sweep.cells):
        name, reason = next(iter(reasons.items()))
        raise RunError(f"every cell failed, {name} with: {reason} (see {sweep.folder}/cells)")
    for name, reason in reasons.items():
        _say(f"cell {name} failed: {reason} (see {sweep.path(name, 'error')})")


def do_cells(sweep: Sweep, work: _Work, deadline: float | None = None, jobs: int = 1) -> None:
    """Do, in this process, every cell that has no result and that no other process works on.

    Args:
        deadline: a `time.monotonic()`. No cell is started after it.
        jobs: number of processes that do the same, for the estimate of the time left.
    """
    tried: set[str] = set()
    for cell in (*sweep.cells, *sweep.cells):  # the second time for cells whose process has died since
        if cell.name in tried:
            continue
        if _is_past(deadline) or _is_orphan():
            raise Interrupted("no time left, or the command that started this process has ended")
        if _do_cell(sweep, cell, work, jobs):
            tried.add(cell.name)


def _is_past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _is_orphan() -> bool:
    """Whether this is a worker process whose parent has died."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


def _do_cell(sweep: Sweep, cell: Cell, work: _Work, jobs: int) -> bool:
    """Do a cell unless it is done or another process works on it; False when another process does."""
    with claim(sweep.path(cell.name, "claim")) as mine:
        if not mine or sweep.path(cell.name).exists():
            return mine
        began = time.monotonic()
        sweep.path(cell.name, "error").unlink(missing_ok=True)
        try:
            with recording(cell.name, cell.options):
                result, about = work(cell), Provenance.here()
        except Interrupted:
            raise
        except Exception:  # the other cells still have to be done
            write_text(sweep.path(cell.name, "error"), traceback.format_exc())
            return True
        seconds = round(time.monotonic() - began, 2)
        where = {"device": device_name(sweep.device), "versions": about.versions, "provenance": about.to_dict()}
        made = {"options": cell.options, "made_of": cell.made_of, "images": sweep.images_of(cell)}
        saved = {"cell": cell.name, **made, "seconds": seconds, **where, "result": jsonable(result)}
        write_text(sweep.path(cell.name), json.dumps(saved, allow_nan=False))
        _say(f"{cell.name} in {clock(seconds)}; {time_left(sweep, jobs)}")
    return True


def time_left(sweep: Sweep, jobs: int) -> str:
    """How many cells are done and how long the rest will take, from the mean of those done."""
    seconds, num_left = sweep.seconds(), len(sweep.missing())
    text = f"{len(seconds)} of {len(sweep.cells)} cells"
    if seconds and num_left:
        left = sum(seconds) / len(seconds) * -(-num_left // jobs)
        text += f", about {clock(left)} left"
    return text


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Whether this process may work on what `path` stands for.

    The claim is a lock on the file, so that it ends with the process that holds it, however that ends.
    """
    file: TextIO = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        yield False
        return
    except OSError as error:  # some network file systems have no locks
        _say(f"{path} cannot be locked ({error.strerror}): let no second command work on these cells")
    hold_alone(file)
    try:
        yield True
    finally:
        let_go(file)


@contextmanager
def _stopping(deadline: float | None = None) -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt as Ctrl-C does, and comes by itself at the deadline.

    A training loop listens for SIGTERM and Ctrl-C itself and ends at a checkpoint.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main:
        yield
        return
    old = signal.signal(signal.SIGTERM, signal.default_int_handler)
    seconds = 0.0 if deadline is None else max(0.001, deadline - time.monotonic())
    timer = threading.Timer(seconds, lambda: signal.pthread_kill(main.ident, signal.SIGTERM))  # type: ignore[arg-type]
    timer.daemon = True
    try:
        if deadline is not None:
            timer.start()
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, old)


def _do_in_processes(sweep: Sweep, work: _Work, deadline: float | None, jobs: int) -> None:
    """Let `jobs` processes do the cells. They live for many cells, because each has to decode the data once.

    They divide the cells by their claims, so that the cell of a process that dies is done by another one.
    """
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_worker, args=(sweep, work, deadline, jobs)) for _ in range(jobs)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    except KeyboardInterrupt:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
        for worker in workers:
            worker.join()
        raise
    codes = [worker.exitcode for worker in workers if worker.exitcode]
    if codes and sweep.missing():
        _say(f"{len(codes)} of {jobs} processes ended early (exit {codes[0]}): the same command continues from there")


def _worker(sweep: Sweep, work: _Work, deadline: float | None, jobs: int) -> None:
    os.setpgrp()  # Ctrl-C reaches only the parent, which passes it on once: a second signal would not wait
    multiprocessing.set_start_method(None, force=True)  # otherwise loaders are spawned and import torch
    with _stopping():
        try:
            do_cells(sweep, work, deadline, jobs)
        except (Interrupted, KeyboardInterrupt):
            sys.exit(130)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
