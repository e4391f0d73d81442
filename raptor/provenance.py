"""Where a result came from: the command and its options, the images, the versions, the machine and the time it took.

`command` makes a function of a config a command. While it runs, every stream of images notes which images it reads, and
every result file that is written gets a `Provenance`: that is the one rule by which all result files say where
they came from.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from raptor.config import Config
from raptor.devices import device_name, torch_defaults
from raptor.streaming import Record, jsonable

_NOT_DECISIVE = ("out", "device", "num_workers", "track")
"""Options that do not decide the numbers of a result."""

Value = TypeVar("Value")
Kind = TypeVar("Kind", bound=Config)


class Images(Protocol):
    """A set of images, as far as its origin is concerned."""

    name: str

    def __len__(self) -> int: ...

    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class ImagesRead(Record):
    """Images that a command has read; the fingerprint is `ImageData.fingerprint`."""

    name: str
    num_images: int
    fingerprint: str


@dataclass(frozen=True)
class Provenance(Record):
    """Where a result came from.

    Attributes:
        versions: of Python and of the packages that decide the numbers.
        seconds: from the start of the command to the result.
        config: a hash of the command and of its options that decide the result.
        images: the images it has read.
        module: FILE.py:FUNCTION of the user's own model, where the command line named it.
    """

    command: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    device: str | None = None
    seconds: float | None = None
    config: str | None = None
    images: list[ImagesRead] = field(default_factory=list)
    module: str | None = None

    @classmethod
    def since(cls, started: float, device: str | torch.device = "cpu") -> Provenance:
        """Of this process; `started` is `time.monotonic()` at the start of the work."""
        return replace(cls.here(), device=device_name(device), seconds=round(time.monotonic() - started, 1))

    @classmethod
    def here(cls) -> Provenance:
        """Of this process and of the command that runs in it."""
        scope = _SCOPE.get()
        name = Path(sys.argv[0]).name
        program = ["raptor"] if name in ("raptor", "__main__.py", "cli.py") else ["python", name]
        found = cls(shlex.join([*program, *sys.argv[1:]]), versions(), module=_MODULE.get())
        if scope is None:
            return found
        # Sorted, so that the same command writes the same file each time.
        return replace(found, config=scope.config, images=sorted(scope.images.values(), key=astuple))


def stamped(saved: dict[str, Any]) -> dict[str, Any]:
    """A result as JSON, with what its provenance lacks: every file that is written goes through here."""
    found = saved.get("provenance") or {}
    here = {name: value for name, value in Provenance.here().to_dict().items() if value not in (None, [], {})}
    kept = {name: value for name, value in found.items() if value not in (None, [], {})}
    # What a result says of itself wins: it knows its device and its time.
    return {**saved, "provenance": {**Provenance().to_dict(), **here, **kept}}


@dataclass
class _Scope:
    """What is known of the command that runs."""

    config: str
    images: dict[str, ImagesRead] = field(default_factory=dict)


_SCOPE: ContextVar[_Scope | None] = ContextVar("command", default=None)
_MODULE: ContextVar[str | None] = ContextVar("module", default=None)


def command(kind: type[Kind]) -> Callable[[Callable[[Kind], Value]], Callable[..., Value]]:
    """Makes a function of a config a command: it takes the config, or the arguments that the config is made of, and its
    results carry the hash of these options and the images that are read."""

    def of_config(function: Callable[[Kind], Value]) -> Callable[..., Value]:
        name = f"{function.__module__}.{function.__name__}"

        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Value:
            # The command line hands over a config that was checked. Python gives its arguments.
            is_config = bool(args) and isinstance(args[0], kind)
            token = None
            try:
                config = args[0] if is_config else kind.of(*args, **options)
                # With a token, because demo and study run commands inside a command.
                token = _SCOPE.set(_Scope(hash_config({"command": name, **vars(config)})))
                with torch_defaults():
                    return function(config)
            except ValueError as error:
                # Messages name options as they are typed. In a notebook or at a prompt they are arguments.
                if not is_config and hasattr(sys, "ps1") and error.args == (str(error),):
                    error.args = (as_arguments(str(error)),)
                raise
            finally:
                if token is not None:
                    _SCOPE.reset(token)
                    _MODULE.set(None)  # it was of this command only

        # help() and editors would follow it to a function of one config, and show no arguments.
        del run.__wrapped__  # type: ignore[attr-defined]
        run.__doc__ = f"{function.__doc__}\n\n    Its arguments are the fields of raptor.config.{kind.__name__}."
        return run

    return of_config


def as_arguments(text: str) -> str:
    """A message with `out=` for `--out`; a command line in it stays as it is."""
    if re.search(r"raptor [a-z-]+ .*--", text):
        return text
    # What follows may be the value: a number, a path or a placeholder such as FILE.
    return re.sub(r"(?<!\S)--(?!module\b)([a-z]\w*)(?: (?=[\d.A-Z/~]))?", r"\1=", text)


def note_images(images: Images, num_images: int | None = None) -> None:
    """Remember for the results of the running command that it reads these images."""
    scope = _SCOPE.get()
    if scope is not None:
        entry = ImagesRead(images.name, len(images) if num_images is None else num_images, images.fingerprint())
        # By what was read, so that images that are read several times are noted once.
        scope.images[f"{entry.fingerprint} {entry.num_images}"] = entry


def note_module(where: str | None) -> None:
    """Remember for the results of this process the FILE.py:FUNCTION of the user's own model."""
    _MODULE.set(where)


def module_option(*where: str | None) -> str:
    """The option that names the first module that is known; a placeholder where none is."""
    known = next((text for text in where if text), None)
    return "--module FILE.py:FUNCTION" if known is None else f"--module {shlex.quote(known)}"


def hash_config(config: Mapping[str, Any]) -> str:
    """A short name of options: equal for equal options, whatever their order. What does not decide a result is left
    out, and so is what is not given."""
    # Without those that are None: a new option that nobody gives leaves old hashes as they are.
    kept = {name: _plain(value) for name, value in config.items() if name not in _NOT_DECISIVE and value is not None}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """An option as JSON: a model or a set of images by its name."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | range):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return jsonable(value)
    return str(value) if isinstance(value, Path) else str(getattr(value, "name", type(value).__name__))


def versions() -> dict[str, str]:
    """Versions of Python, of the raptor that runs (which may be another than the installed one), and of its parts."""
    from importlib.metadata import version

    # The package itself stands right of this file, so it is not imported here.
    running = str(sys.modules["raptor"].__version__)
    found = {"python": platform.python_version(), "torch": str(torch.__version__), "raptor": running}
    return found | {name: version(name) for name in ("numpy", "timm")}
