"""The run folder: config, lock, metrics, checkpoints, resume, result files. Tensors are safetensors, the rest is text.

config.yaml       everything, resolved
metrics.jsonl     one line per log step or validation
checkpoint/       step-N/ folders (tensors.safetensors, state.json) and `latest`, which names the newest whole one
summary.json      what came out
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ContextDecorator, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Self, TextIO
from weakref import WeakSet

import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from raptor.checks import expand_home
from raptor.devices import Ranks
from raptor.files import (
    RunError,
    WriteError,
    allow_readers,
    parse_json,
    read_json,
    read_parsed,
    read_text,
    read_yaml,
    reason_of,
    slug,
    sync,
    write_text,
)
from raptor.progress import started_processes
from raptor.provenance import stamped
from raptor.streaming import Record

# Where one is damaged, the error names the other.
_KEPT_CHECKPOINTS = 2
_SHARED_SECONDS = 5.0  # that a network disk may take to show a new file on another node
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_HELD: WeakSet[TextIO] = WeakSet()


class Interrupted(RunError):
    """Ctrl-C, SIGTERM or SIGHUP stopped a run after its checkpoint was written."""


class Run:
    """A run folder held by this process. Only rank 0 locks it and writes to it; the others read.

    Args:
        folder: made when it is not there.
        config: everything that decides the result. A folder that holds something made with another config is refused,
            not overwritten.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any]):
        self.folder = Path(folder)
        self.writer = started_processes()[0] == 0
        self._lock: TextIO | None = None
        if not self.writer:
            return
        check_folder(self.folder)
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            # Before the config is read: of two starts at once only one may find the folder free.
            self._lock = _lock(self.folder)
        try:
            if check_config(self.folder, config):
                with self.writing():
                    # Through JSON, as it is compared later. It also holds no object twice, for which YAML would write
                    # an alias.
                    text = yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False)
                    write_text(self.folder / "config.yaml", text)
            # A process that is killed while it writes a checkpoint leaves a part behind, as large as a whole one.
            for partial in (self.folder / "checkpoint").glob("*.tmp"):
                if partial.is_dir():
                    shutil.rmtree(partial, ignore_errors=True)
                else:
                    partial.unlink(missing_ok=True)
        except BaseException:
            # For Ctrl-C too: a program that goes on would keep the lock.
            self.close()
            raise

    def close(self) -> None:
        if self._lock is not None:
            with suppress(OSError):
                # The lock belongs to the open file, which a process that was forked just now shares: closing it here
                # would not be enough.
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def latest(self) -> Path | None:
        """The newest whole checkpoint, or None."""
        return _latest_checkpoint(self.folder)

    def kept(self) -> str:
        """What a message about a fault says of what is left."""
        where = self.latest()
        return f"the last good checkpoint is {where}" if where else "no checkpoint was written yet"

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turns a failed write (a full disk) into one line that names the last good checkpoint."""
        try:
            yield
        except (OSError, SafetensorError, WriteError) as error:
            raise RunError(f"cannot write to {self.folder}: {reason_of(error)}; {self.kept()}") from None

    def save_checkpoint(self, number: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write a checkpoint beside the others, then point `latest` at it; an interruption leaves the last one good.

        number: names the checkpoint, and rises over a run.
        """
        if not self.writer:
            return
        root = self.folder / "checkpoint"
        final = root / f"step-{number}"
        partial = root / f"step-{number}.tmp"
        with self.writing():
            try:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                path = partial / "tensors.safetensors"
                # safetensors refuses tensors that are not contiguous.
                save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, path)
                allow_readers(path)
                sync(path)
                write_text(partial / "state.json", json.dumps({**state, "tensor_bytes": path.stat().st_size}))
                if (self.folder / "metrics.jsonl").exists():
                    sync(self.folder / "metrics.jsonl")  # the state counts its lines
                # A rename does not replace a folder that holds files, and a resumed run may reach this step again.
                if final.exists():
                    shutil.rmtree(final)
                os.rename(partial, final)
                # The new name is on the disk before `latest` points to it.
                sync(root)
                write_text(root / "latest", final.name)
            except (OSError, SafetensorError, WriteError):
                shutil.rmtree(partial, ignore_errors=True)
                raise
        for old in _checkpoints(root)[:-_KEPT_CHECKPOINTS]:
            # A resumed run may have gone back, so the highest number need not be the newest checkpoint.
            if old != final:
                shutil.rmtree(old, ignore_errors=True)

    def amend_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Write a newer state beside the tensors of the newest checkpoint, as after a validation of these weights."""
        where = self.latest()
        if self.writer and where is not None:
            path = where / "state.json"
            with self.writing():
                write_text(path, json.dumps({**state, "tensor_bytes": read_json(path)["tensor_bytes"]}))

    def load_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and state of the newest checkpoint; None when there is none."""
        return load_checkpoint(self.folder)

    def log(self, **values: Any) -> None:
        """Append one line to metrics.jsonl."""
        if self.writer:
            with self.writing(), (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")

    def cut_metrics(self, keep: int) -> None:
        """Drop the lines of metrics.jsonl past the first `keep`: those after the checkpoint that is resumed."""
        if self.writer and (self.folder / "metrics.jsonl").exists():
            lines = _metric_lines(self.folder)
            with self.writing():
                write_text(self.folder / "metrics.jsonl", "".join(lines[:keep]))

    def num_logged(self) -> int:
        return len(_metric_lines(self.folder))


def _lock(folder: Path) -> TextIO:
    """Hold the folder until the file is closed or this process ends, however it ends."""
    file = (folder / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise RunError(f"{folder} is in use by another process: choose another --out, or wait for it") from None
    except OSError as error:  # some network file systems have no locks
        print(f"{folder} cannot be locked ({error.strerror}): start no second run in it", file=sys.stderr)
    _HELD.add(file)
    return file


def _close_held() -> None:
    """In a forked process, such as one that decodes images: it would hold the lock for the seconds by which it outlives
    a run that was killed."""
    for file in list(_HELD):
        file.close()


os.register_at_fork(after_in_child=_close_held)


class StopSignal(ContextDecorator):
    """Inside the context Ctrl-C, SIGTERM and SIGHUP (a closed terminal) set `given`.

    A loop reads it between steps, and `check_stop` raises on it between batches. A second signal acts at once. Inside
    such a context a further one changes nothing.
    """

    _open: ClassVar[StopSignal | None] = None

    def __init__(self) -> None:
        self.given = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        # Python lets only the main thread set handlers.
        if StopSignal._open is not None or threading.current_thread() is not threading.main_thread():
            return StopSignal._open or self
        self.given = False
        StopSignal._open = self
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                self._old[number] = signal.signal(number, self._set)
        return self

    def __exit__(self, *_exc: object) -> None:
        if StopSignal._open is self:
            StopSignal._open = None
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}

    def _set(self, *_signal: object) -> None:
        self.given = True
        self._restore()


def check_stop() -> None:
    """Raise Interrupted if a stop signal came; between batches, where there is nothing to save."""
    if StopSignal._open is not None and StopSignal._open.given:
        raise Interrupted("stopped between two batches; the same command goes on from the last checkpoint")


class ResultFile(Record):
    """A record that is a file of a run folder. It begins with its `subject`, where it has one."""

    FILE: ClassVar[str]

    def write(self, folder: str | Path) -> Path:
        return self.write_file(Path(folder) / self.FILE)

    def write_file(self, path: Path) -> Path:
        saved = stamped(self.to_dict())
        subject: Record | None = getattr(self, "subject", None)
        if subject is not None:
            saved = {"subject": subject.to_dict()} | saved
        # NaN is no JSON, and no browser reads it. Records write null for it.
        write_text(path, json.dumps(saved, allow_nan=False))
        return path

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """The file of `folder`; RunError that names it when it is missing or damaged."""
        return cls.read_file(Path(folder) / cls.FILE)

    @classmethod
    def read_file(cls, path: Path) -> Self:
        return read_parsed(path, cls.from_json, "run the command that made it again")


# What a run folder holds.


def _checkpoints(root: Path) -> list[Path]:
    """The whole checkpoints under `root`, oldest first."""
    found = [path for path in root.glob("step-*") if re.fullmatch(r"step-[0-9]{1,18}", path.name)]
    # By number: as text step-1000 comes before step-200.
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _way_out(folder: str | Path, path: Path) -> str:
    root = Path(folder) / "checkpoint"
    others = [p.name for p in _checkpoints(root) if p != path]
    older = f"write {others[-1]} into {root / 'latest'}, or " if others else ""
    return f"{older}choose another --out"


def _latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest whole checkpoint of a run folder, or None."""
    pointer = Path(folder) / "checkpoint" / "latest"
    if not pointer.exists():
        return None
    name = read_text(pointer, _way_out(folder, pointer)).strip()
    # A pointer that was edited must not lead out of the folder.
    if not re.fullmatch(r"step-[0-9]{1,18}", name):
        raise RunError(f"{pointer} does not name a checkpoint: {_way_out(folder, pointer)}")
    return pointer.parent / name


def load_checkpoint(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Tensors and state of the newest checkpoint of a run folder; None when there is none."""
    path = _latest_checkpoint(folder)
    if path is None:
        return None
    try:
        state = read_json(path / "state.json")
        tensors_path = path / "tensors.safetensors"
        if tensors_path.stat().st_size == state["tensor_bytes"]:
            return load_file(tensors_path), state
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise RunError(f"checkpoint {path} cannot be read ({type(error).__name__}): {_way_out(folder, path)}") from None
    raise RunError(f"checkpoint {path} is truncated: {_way_out(folder, path)}")


def read_summary(folder: str | Path) -> dict[str, Any] | None:
    path = Path(folder) / "summary.json"
    return read_json(path) if path.exists() else None


def run_folder(place: object) -> Path | None:
    """The run folder that `place` names or lies in, as a surrogate lies in its run; None if there is none."""
    if isinstance(place, str | Path):
        folder = Path(place).expanduser()
        for found in (folder, folder.parent):
            if (found / "config.yaml").is_file():
                return found
    return None


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config a run folder was made with."""
    return read_yaml(Path(folder) / "config.yaml", "choose another --out")


def _metric_lines(folder: str | Path) -> list[str]:
    path = Path(folder) / "metrics.jsonl"
    return read_text(path).splitlines(keepends=True) if path.exists() else []


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; empty when there is none. A line that is being written does not count yet."""
    rows = []
    for number, line in enumerate(_metric_lines(folder), start=1):
        if not line.endswith("\n"):
            continue
        try:
            rows.append(parse_json(line))
        except ValueError as error:
            path = Path(folder) / "metrics.jsonl"
            raise RunError(f"{path} cannot be read (line {number}: {error}): delete that line") from None
    return rows


def unfinished(folder: Path) -> str:
    """What to say of a run folder whose training has not ended; empty for other folders."""
    if not (folder / "config.yaml").is_file() or (folder / "summary.json").is_file():
        return ""
    lines = [line for line in read_metrics(folder) if {"stage", "step", "num_steps"} <= line.keys()]
    where = "no step is logged yet"
    if lines and isinstance(lines[-1]["step"], int):
        where = f"{lines[-1]['stage']}: step {lines[-1]['step'] + 1} of {lines[-1]['num_steps']}"
    return f"{folder} is not finished ({where}): the same command that began it goes on"


# Whether a folder may be written to.


def result_folder(out: str | Path | None, source: Any, command: str, weights: str = "") -> Path:
    """Where the results about `source` go: `out`, else the run folder that it is, else `runs/COMMAND-NAME-WEIGHTS`.

    source: a name, a folder, or a model that is already open.
    weights: what tells it from the published model of its name, as `Opening.weights_name` gives it.
    """
    if not isinstance(source, str | Path):
        name = str(getattr(source, "name", type(source).__name__))
        return check_folder(out or f"runs/{command}-{slug(name)}")
    if out is None and Path(source).is_dir():
        return check_folder(source, of=source)
    name = f"{source}-{weights}" if weights else str(source)
    return check_folder(out or f"runs/{command}-{slug(name)}", of=source)


def check_folder(folder: str | Path, of: str | Path | None = None) -> Path:
    """A folder that can be made or written to, checked before the work whose result goes there; nothing is left in it.

    of: the run the result is about; another run's folder is refused.
    """
    folder = Path(folder)
    inside = of is None or Path(of).resolve().is_relative_to(folder.resolve())
    if not inside and (folder / "config.yaml").exists():
        raise RunError(f"{folder} is a run of its own: choose another --out for what is measured of {of}")
    # In the nearest folder that is there, so that a command that is refused later leaves nothing behind.
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    trial = there / f".trial-{os.getpid()}"
    try:
        # A file of its own, because permissions do not tell of a read-only mount.
        trial.write_text("")
        trial.unlink()
    except OSError as error:
        where = _latest_checkpoint(folder)
        kept = f"; the last good checkpoint is {where}" if where else ""
        raise RunError(f"cannot write to {folder} ({error.strerror}){kept}: choose another --out") from None
    return folder


def check_shared(folder: str | Path, ranks: Ranks) -> None:
    """Raise unless every rank sees the folder that rank 0 writes to. Training reads its checkpoints on all of them."""
    if ranks.size == 1:
        return
    folder = Path(folder)

    def leave_token() -> str:
        name = f".seen-{secrets.token_hex(8)}"
        check_folder(folder).mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
        return name

    token = folder / ranks.first(leave_token)
    # A network disk may show it a few seconds late.
    until = time.monotonic() + _SHARED_SECONDS
    while not token.exists() and time.monotonic() < until:
        time.sleep(0.1)
    found = ranks.gather((socket.gethostname(), token.exists()))
    if ranks.is_first:
        token.unlink()
    blind = sorted({host for host, sees in found if not sees})
    if blind:
        raise RunError(
            f"{folder} as rank 0 on {found[0][0]} sees it is not there for ranks on {', '.join(blind)}: put --out on a "
            "file system that all nodes share"
        )


def check_config(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether the config of a run in `folder` has to be written; a folder whose work was made with another config is
    refused, naming the entries that differ."""
    is_finished = (folder / "summary.json").exists()
    if _latest_checkpoint(folder) is None and not is_finished:
        # The run would save its own model over one that was put there, as by the demo.
        for name in ("surrogate", "teacher"):
            if (folder / name / "model.safetensors").exists() and not (folder / "config.yaml").exists():
                raise RunError(f"{folder / name} holds a model of something else: choose another --out")
        return True
    # The new one goes through JSON, because a tuple is a list once it was written.
    old = expand_home(_flat(read_config(folder)))
    new = _flat(json.loads(json.dumps(config)))
    differing = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    # A relative path and a whole one may be the same model.
    places = {os.path.realpath(str(flat.get("model"))) for flat in (old, new)}
    if len(places) == 1:
        differing = [name for name in differing if name != "model"]
    images = [name for name in differing if name.startswith("images.")]
    if not images:  # the same images at another place
        differing = [name for name in differing if name not in ("data", "val")]
    elif set(differing) <= {*images, "data", "val"}:
        part = images[0].split(".")[1]
        counts = " -> ".join(str(flat.get(f"images.{part}.num_images")) for flat in (old, new))
        raise RunError(
            f"the {part} images changed since {folder} began ({counts} images, or other files): bring them back, "
            "or choose another --out"
        )
    if not differing:
        return False
    # More budget for a finished run is a common wish, and this is the way to it.
    if differing == ["recipe.budget"] and is_finished:
        raise RunError(
            f"{folder} is finished with a budget of {old['recipe.budget']}: to go on from its weights add "
            f"--start {folder} and choose another --out"
        )
    # Other images follow from another --data, which is what somebody typed.
    differing = [name for name in differing if not name.startswith("images.")]
    changed = []
    for name in differing[:3]:
        if name == "fingerprint":
            changed.append("the weights of the teacher differ")
        else:
            option = name.removeprefix("recipe.")
            changed.append(f"--{option}: {old.get(name)} -> {new.get(name)}")
    more = ""
    if len(differing) > 3:
        more = f" and {len(differing) - 3} more"
    raise RunError(
        f"{folder} holds a run with another config ({'; '.join(changed)}{more}): choose another --out, "
        "or remove the folder to start over"
    )


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested entries by their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
