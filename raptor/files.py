"""Files that hold text: read with an error of one line, and written so that a fault leaves the old one.

torch is not imported here.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

_MAX_TEXT = 1 << 30  # bytes of one text file
_MAX_YAML = 1 << 20  # characters
_MAX_NESTED = 64


class RunError(ValueError):
    """Something about a run folder that its user has to decide; the message is one line."""


class WriteError(RunError):
    """A file that could not be written, and the reason."""

    def __init__(self, path: str | Path, reason: str):
        super().__init__(f"cannot write {path}: {reason}; make room or choose another --out")
        self.reason = reason


def read_text(path: str | Path, remedy: str = "save it again, or move it away") -> str:
    """The text of a UTF-8 file. A pipe or a device, which might never end, and a file that is no text are refused."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise RunError(f"{path} is not a plain file: {remedy}")
    if path.stat().st_size > _MAX_TEXT:
        raise RunError(f"{path} has {path.stat().st_size:,} bytes, too many for a text file: {remedy}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RunError(f"{path} cannot be read, it is not UTF-8 text: {remedy}") from None


def read_parsed(path: Path, parse: Callable[[str], Any], remedy: str) -> Any:
    """What `parse` makes of a file's text; RunError that names the file and says what to do where it raises."""
    try:
        return parse(read_text(path, remedy))
    except RunError:
        raise
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({' '.join(str(error).split())[:300]}): {remedy}") from None


def read_json(path: Path, remedy: str = "run the command that made it again") -> dict[str, Any]:
    """A JSON object in a file."""
    return read_parsed(path, parse_json, remedy)


def read_yaml(path: Path, remedy: str) -> dict[str, Any]:
    """The entries of a YAML file."""
    return read_parsed(path, parse_yaml, remedy)


def parse_json(text: str) -> dict[str, Any]:
    """A JSON object; ValueError with the reason where the text is none."""
    try:
        # The parser calls itself at each level of nesting, and a stranger's file may have any number of them.
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    return value


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases, with which a small file can stand for more than any memory holds, and not nested deeply."""

    level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"aliases (*{self.peek_event().anchor}) are not taken")
        self.level += 1
        if self.level > _MAX_NESTED:
            raise yaml.YAMLError("it is nested too deeply")
        node = super().compose_node(parent, index)
        self.level -= 1
        return node


def parse_yaml(text: str) -> dict[str, Any]:
    """The entries of a YAML file, plain values only; ValueError with the reason where the text is none."""
    if len(text) > _MAX_YAML:
        raise ValueError(f"it has more than {_MAX_YAML:,} characters")
    depths = accumulate({"[": 1, "{": 1, "]": -1, "}": -1}.get(letter, 0) for letter in text)
    try:
        if max(depths, default=0) > _MAX_NESTED:  # the parser takes its time before it gives up
            raise RecursionError
        value = yaml.load(text, _PlainLoader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not names with values")
    # YAML reads `on:` and `1:` as names that are no text.
    if any(not isinstance(name, str) for name in value or {}):
        raise ValueError("it has a name that is not text")
    return value or {}


def write_text(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old one or the new one, never a part."""
    with replacing(path) as partial:
        # A file name may hold bytes that are not UTF-8. Python keeps them in a form that cannot be encoded.
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to, which on leaving takes the place of `path`, synced.

    A fault leaves the old file. Processes that write into one folder wait for each other, because two of them may
    write the same file.
    """
    partial = path.with_name(path.name + ".tmp")
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        # Some network file systems have no locks, and results are wanted there as well.
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield partial
        allow_readers(partial)
        # On the disk before it is renamed: after a power cut the name could otherwise stand for an empty file.
        sync(partial)
        os.replace(partial, path)
    except BaseException as error:
        # After Ctrl-C too no partial file stays.
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError | SafetensorError):
            raise WriteError(path, reason_of(error)) from None
        raise
    finally:
        os.close(folder)


def reason_of(error: OSError | SafetensorError | WriteError) -> str:
    """Why a write failed, without a path."""
    if isinstance(error, WriteError):
        return error.reason
    # An error of safetensors has no number, only its text.
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
        return "the disk is full"
    return str(error)


def allow_readers(path: Path) -> None:
    """Give a file the permissions that the umask leaves, as an ordinary new file has them."""
    # safetensors lets only the owner read its files, whatever the umask. The umask can only be read by setting it.
    umask = os.umask(0o077)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def slug(name: str) -> str:
    """A model's name as part of a folder's name: `timm/vit` is `timm_vit`."""
    return "".join(c if c.isalnum() or c in "-._" else "_" for c in name).strip("._") or "model"
