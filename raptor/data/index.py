"""The index of a large set of images: listed once, kept in the cache folder, read in a moment by later processes.

Listing a million images takes a minute and their names as Python strings take gigabytes. The index holds arrays that
are mapped into memory, so processes on one machine share them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from safetensors.torch import load_file

from raptor.data.names import PackedNames
from raptor.data.split import keep_shares

MIN_IMAGES = 10_000  # smaller sets are listed each time
_VERSION = 3  # raised where readers list the same files in another way
_FRESH_S = 2.0  # a source that changed this shortly before may change again within the clock's tick
_PATIENCE_S = 5.0


@dataclass
class Listing:
    """The images of a set, by columns over its N images.

    Attributes:
        names, keys: as in `ImageData`.
        labels: a class index per image, -1 for none, or None without classes.
        parts: the data's own split of each image, or None.
        sources: the files and folders it was listed from; another size or time of one makes it old.
        words: further lists of names that a reader needs, such as its archives.
        numbers: further int64 columns (N,), such as where an image lies in its archive.
    """

    names: PackedNames
    keys: PackedNames
    labels: list[int] | None
    classes: list[str] | None
    parts: Sequence[str | None]
    sources: list[str] = field(default_factory=list)
    words: dict[str, list[str]] = field(default_factory=dict)
    numbers: dict[str, np.ndarray] = field(default_factory=dict)


def cache_folder() -> Path:
    """Where downloads and indexes are kept: $RAPTOR_CACHE, else `raptor` in the user's cache folder."""
    own, shared = os.environ.get("RAPTOR_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own).expanduser() if own else Path(shared or Path.home() / ".cache") / "raptor"


def indexed(kind: str, addressed: Sequence[str], make: Callable[[], Listing]) -> Listing:
    """The listing of what is addressed: from the cache folder unless it is old, else made, and kept if it is large."""
    whole = json.dumps([_VERSION, kind, [os.path.abspath(path) for path in addressed]])
    path = cache_folder() / "index" / f"{hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()}.safetensors"
    found = _read(path)
    if found is not None:
        return found
    listing = make()
    if len(listing.names) < MIN_IMAGES:
        return listing
    stamps = _stamps(listing.sources)
    if max(stamp[1] for stamp in stamps) > time.time_ns() - _FRESH_S * 1e9:
        return listing
    try:
        _write(path, listing, stamps)
    except OSError as error:
        print(
            f"the index of {len(listing.names)} images could not be kept ({error}): they are listed again next time; "
            "set RAPTOR_CACHE to a folder that can be written",
            file=sys.stderr,
        )
        return listing
    return _read(path) or listing


def announced(archives: Iterable[str]) -> Iterator[str]:
    """The archives to list, with one line printed if that takes long."""
    began, said = time.monotonic(), False
    for number, archive in enumerate(archives):
        if not said and time.monotonic() - began > _PATIENCE_S:
            print(f"listing images ({number} archives done); later runs read the index", file=sys.stderr)
            said = True
        yield archive


def _stamps(sources: Iterable[str]) -> list[tuple[int, int]]:
    """Size and time of each source; a folder's own time changes with what is in it, and its size says nothing."""
    found = [os.stat(source) for source in sources]
    return [(0 if os.path.isdir(source) else s.st_size, s.st_mtime_ns) for source, s in zip(sources, found)]


def _write(path: Path, listing: Listing, stamps: list[tuple[int, int]]) -> None:
    keep_shares(listing.keys)
    kinds = sorted({part for part in listing.parts if part is not None})
    code: dict[str | None, int] = {kind: i for i, kind in enumerate(kinds)}
    code[None] = -1
    arrays = {
        **listing.names.arrays("names"),
        **listing.keys.arrays("keys"),
        "parts": np.fromiter((code[part] for part in listing.parts), np.int64, len(listing.parts)),
        **{f"numbers.{name}": values for name, values in listing.numbers.items()},
    }
    if listing.labels is not None:
        arrays["labels"] = np.array(listing.labels, dtype=np.int64)
    about = {
        "classes": listing.classes,
        "kinds": kinds,
        "sources": [os.path.abspath(source) for source in listing.sources],
        "stamps": stamps,
        "words": listing.words,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, part, {"about": json.dumps(about)})
        os.replace(part, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        part.unlink(missing_ok=True)


def _read(path: Path) -> Listing | None:
    """The listing kept at `path`; None if there is none, if it is old, or if it is broken (it is then made again)."""
    try:
        if not path.is_file():
            return None
        with safe_open(path, "np") as file:
            about = json.loads(file.metadata()["about"])
        if [tuple(stamp) for stamp in about["stamps"]] != _stamps(about["sources"]):
            return None
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in load_file(path).items()}
        names, keys = PackedNames.from_arrays(arrays, "names"), PackedNames.from_arrays(arrays, "keys")
        kinds: list[str | None] = [*about["kinds"], None]  # -1 is the last
        numbers = {name.removeprefix("numbers."): v for name, v in arrays.items() if name.startswith("numbers.")}
        columns = [keys, arrays["parts"], *numbers.values()] + ([arrays["labels"]] if "labels" in arrays else [])
        if any(len(column) != len(names) for column in columns):
            return None
        labels = arrays["labels"].tolist() if "labels" in arrays else None
        parts = [kinds[code] for code in arrays["parts"].tolist()]
        return Listing(names, keys, labels, about["classes"], parts, about["sources"], about["words"], numbers)
    except (OSError, SafetensorError, KeyError, IndexError, TypeError, ValueError):
        return None
