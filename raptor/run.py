"""The run folder: config, lock, metrics, checkpoints, resume, summary. Tensors are safetensors, the rest is text.

config.yaml       everything, resolved
metrics.jsonl     one line a log step or validation
checkpoint/       step-N/ folders (tensors.safetensors, state.json) and `latest`, which names the newest whole one
summary.json      what came out
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

KEPT_CHECKPOINTS = 2


class RunError(ValueError):
    """Something about a run folder that its user has to decide; the message is one line."""


class Run:
    """A run folder held by this process.

    Args:
        folder: made when it is not there.
        config: everything that decides the result. A folder made with another config is refused, not overwritten.
        resume: whether a folder that has a checkpoint may be continued.
        writer: False on the ranks that only read (they neither lock nor write).
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any], resume: bool = True, writer: bool = True):
        self.folder = Path(folder)
        self.writer = writer
        self._lock: TextIO | None = None
        if not writer:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.folder)
        config_path = self.folder / "config.yaml"
        if config_path.exists():
            _refuse_changes(config_path, config)
            if not resume and self.latest() is not None:
                raise RunError(f"{self.folder} already holds a run: choose another --out, or allow --resume")
        else:
            write_text(config_path, yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False))

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def latest(self) -> Path | None:
        """The newest whole checkpoint, or None."""
        pointer = self.folder / "checkpoint" / "latest"
        return pointer.parent / pointer.read_text().strip() if pointer.exists() else None

    def save_checkpoint(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write a checkpoint beside the others, then point `latest` at it; an interruption leaves the last one good."""
        if not self.writer:
            return
        root = self.folder / "checkpoint"
        final, partial = root / f"step-{step}", root / f"step-{step}.tmp"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, partial / "tensors.safetensors")
            size = (partial / "tensors.safetensors").stat().st_size
            write_text(partial / "state.json", json.dumps({**state, "step": step, "tensor_bytes": size}))
            _sync(partial / "tensors.safetensors")
            if final.exists():
                shutil.rmtree(final)
            os.rename(partial, final)
            write_text(root / "latest", final.name)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise _disk_error(error, root, self.latest()) from None
        for old in sorted(root.glob("step-*"), key=lambda p: p.stat().st_mtime)[:-KEPT_CHECKPOINTS]:
            if old != final:
                shutil.rmtree(old, ignore_errors=True)

    def load_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and state of the newest checkpoint; None when there is none."""
        path = self.latest()
        if path is None:
            return None
        hint = (
            f"delete {path} and write the name of an older one into {path.parent / 'latest'}, or choose another --out"
        )
        try:
            state = json.loads((path / "state.json").read_text())
            tensors_path = path / "tensors.safetensors"
            if tensors_path.stat().st_size != state["tensor_bytes"]:
                raise RunError(f"checkpoint {path} is truncated: {hint}")
            return load_file(tensors_path), state
        except (OSError, KeyError, json.JSONDecodeError) as error:
            raise RunError(f"checkpoint {path} cannot be read ({type(error).__name__}): {hint}") from None

    def log(self, **values: Any) -> None:
        """Append one line to metrics.jsonl."""
        if self.writer:
            try:
                with (self.folder / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(values) + "\n")
            except OSError as error:
                raise _disk_error(error, self.folder, self.latest()) from None

    def cut_metrics(self, keep: int) -> None:
        """Drop the lines of metrics.jsonl past the first `keep`: those after the checkpoint that is resumed."""
        path = self.folder / "metrics.jsonl"
        if self.writer and path.exists():
            lines = path.read_text().splitlines(keepends=True)
            write_text(path, "".join(lines[:keep]))

    def num_logged(self) -> int:
        path = self.folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        if self.writer:
            write_text(self.folder / "summary.json", json.dumps(summary, indent=1) + "\n")


def read_summary(folder: str | Path) -> dict[str, Any] | None:
    path = Path(folder) / "summary.json"
    return read_json(path) if path.exists() else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a run folder; a damaged one is an error that names it."""
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read ({error}): run the command that made it again") from None


def write_text(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old one or the new one, never a part."""
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(text)
    _sync(partial)
    os.replace(partial, path)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _lock(folder: Path) -> TextIO:
    file = (folder / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RunError(f"{folder} is in use by another process: choose another --out, or wait for it") from None
    return file


def _refuse_changes(path: Path, config: Mapping[str, Any]) -> None:
    old = yaml.safe_load(path.read_text()) or {}
    new = json.loads(json.dumps(config))
    changed = [f"{k}: {old.get(k)} -> {new.get(k)}" for k in sorted({*old, *new}) if old.get(k) != new.get(k)]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise RunError(
            f"{path.parent} holds a run with another config ({'; '.join(changed[:3])}{more}): choose another --out"
        )


def _disk_error(error: OSError, where: Path, latest: Path | None) -> RunError:
    kept = f"; the last good checkpoint is {latest}" if latest else "; no checkpoint was written yet"
    reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
    return RunError(f"cannot write to {where}: {reason}{kept}")
