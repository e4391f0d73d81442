"""Large sets of image files: listed once, kept in the cache folder, read in a moment by later processes.

Listing a million images takes a minute, and their names as Python strings take gigabytes. The arrays of a kept
listing are mapped into memory, so processes on one machine share them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from safetensors.torch import load_file

from raptor.data.image_file import ArchivedFile, DiskFile, File
from raptor.data.images import ImageData
from raptor.data.names import PackedNames

MIN_IMAGES = 10_000  # smaller sets are listed each time
_VERSION = 7  # raised when readers list the same files in another way
_FRESH_S = 2.0  # a source that changed this shortly before may change again within the clock's tick


@dataclass
class Listing:
    """The images of a set, by columns over its N images.

    Attributes:
        names, keys: as in `ImageData`.
        labels: a class index per image, -1 for none, or None without classes.
        parts: the data's own split of each image, or None.
        sources: the files and folders it was listed from; another size or time of one makes it old.
        places: int64 (N, 6), where each image lies in its archive: the archive's number, and what `ArchivedFile` holds.
        left_out: how many files of each kind were found and are not read.
    """

    names: PackedNames
    keys: PackedNames
    labels: list[int] | None
    classes: list[str] | None
    parts: Sequence[str | None]
    sources: list[str] = field(default_factory=list)
    places: Any = ()
    left_out: dict[str, int] = field(default_factory=dict)


class FileImages(ImageData):
    """Images that are files, in a folder or in archives.

    Args:
        kind: folder, zip or tar: how `addressed`, the folder or the archives, is listed by `make`.
    """

    def __init__(self, name: str, kind: str, addressed: list[str], make: Callable[[], Listing]) -> None:
        found = indexed(kind, addressed, make)
        super().__init__(name, found.names, found.labels, found.classes, found.parts, found.keys)
        self.addressed = addressed
        self.paths = found.names
        self.places = found.places
        self.left_out = dict(found.left_out)
        if found.left_out:
            remedy = "convert, repair, unpack or move them to use them"
            tell_once(f"left out of {self.name}: {listed(found.left_out)}; {remedy}")

    def file(self, position: int) -> File:
        if not len(self.places):
            return DiskFile(os.path.join(self.addressed[0], self.paths[position]))
        archive, *numbers = map(int, self.places[position])
        return ArchivedFile(self.addressed[archive], *numbers)


def listed(left_out: Mapping[str, int]) -> str:
    """What is left out, in words: each reason with its count."""
    return ", ".join(f"{kind} ({number:,})" for kind, number in sorted(left_out.items()))


@cache
def tell_once(line: str) -> None:
    """Print a line about data, which is opened once for each of its splits."""
    print(line, file=sys.stderr)


def cache_folder() -> Path:
    """Where downloads and indexes are kept: $RAPTOR_CACHE, else `raptor` in the user's cache folder."""
    if own := os.environ.get("RAPTOR_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raptor"


def indexed(kind: str, addressed: Sequence[str], make: Callable[[], Listing]) -> Listing:
    """The listing of what is addressed: from the cache folder unless it is old, else made, and kept if it is large."""
    # By absolute path, so that a set has one index wherever a command is started.
    whole = json.dumps([_VERSION, kind, list(map(os.path.abspath, addressed))])
    path = cache_folder() / "index" / f"{hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()}.safetensors"
    found = _read(path)
    if found is not None:
        return found
    listing = make()
    if len(listing.names) < MIN_IMAGES:
        return listing
    stamps = _stamps(listing.sources)
    newest_ns = max(stamps, key=itemgetter(1))[1]
    # A file system's clock may tick in seconds: a later change within the same tick would go unnoticed.
    if newest_ns > time.time_ns() - _FRESH_S * 1e9:
        return listing
    try:
        _write(path, listing, stamps)
    except (OSError, SafetensorError) as error:
        print(
            f"the index of {len(listing.names)} images could not be kept ({error}): they are listed again next time; "
            "set RAPTOR_CACHE to a folder that can be written",
            file=sys.stderr,
        )
        return listing
    # Read back, so that the first process of many maps the file into memory as the others do.
    return _read(path) or listing


def _stamps(sources: Sequence[str]) -> list[list[int]]:
    """Size and time of each source; a folder's own time changes with what is in it, and its size says nothing."""
    found = []
    for source in sources:
        status = os.stat(source)
        size = status.st_size
        if os.path.isdir(source):  # file systems count their own tables there
            size = 0
        found.append([size, status.st_mtime_ns])
    return found


def _write(path: Path, listing: Listing, stamps: list[list[int]]) -> None:
    parts = list(dict.fromkeys(listing.parts))
    code = dict(zip(parts, range(len(parts))))
    arrays = {
        "names.text": listing.names.text,
        "names.ends": listing.names.ends,
        "keys.text": listing.keys.text,
        "keys.ends": listing.keys.ends,
        "parts": np.fromiter(map(code.__getitem__, listing.parts), np.int64, len(listing.parts)),
        "places": np.array(listing.places, dtype=np.int64),
    }
    if listing.labels is not None:
        arrays["labels"] = np.array(listing.labels, dtype=np.int64)
    about = {
        "classes": listing.classes,
        "parts": parts,
        "sources": list(map(os.path.abspath, listing.sources)),
        "stamps": stamps,
        "left_out": listing.left_out,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two processes may write the same index at once: each its own file, and the later one stays.
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        save_file(arrays, unfinished, {"about": json.dumps(about)})
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _read(path: Path) -> Listing | None:
    """The listing kept at `path`; None if there is none, or it is old or broken (it is then made again)."""
    try:
        with safe_open(path, "np") as file:
            about = json.loads(file.metadata()["about"])
        if about["stamps"] != _stamps(about["sources"]):
            return None
        # Through torch, which maps the file into memory; safetensors' own reader for NumPy copies it.
        arrays = {name: tensor.numpy() for name, tensor in load_file(path).items()}
        labels = None
        if "labels" in arrays:
            labels = arrays["labels"].tolist()
        return Listing(
            PackedNames(arrays["names.text"], arrays["names.ends"]),
            PackedNames(arrays["keys.text"], arrays["keys.ends"]),
            labels,
            about["classes"],
            list(map(about["parts"].__getitem__, arrays["parts"].tolist())),
            about["sources"],
            arrays["places"],
            about["left_out"],
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
