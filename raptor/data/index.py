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
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from safetensors.torch import load_file

from raptor.data.image_file import ArchivedFile, DiskFile, File, open_archive
from raptor.data.images import ImageData
from raptor.data.names import PackedNames
from raptor.files import WriteError, reason_of, replacing

MIN_IMAGES = 10_000  # smaller sets are listed each time
_VERSION = 8  # raised when readers list the same files in another way
_FRESH_S = 2.0  # a source that changed this shortly before may change again within the clock's tick


class FileImages(ImageData):
    """Images that are files, in a folder or in archives.

    Attributes:
        addressed: the folder, or the archives.
        sources: the files and folders they were listed from; another size or time of one makes a listing old.
        places: int64 (N, 6), where each image lies in its archive: the archive's number, and what `ArchivedFile` holds;
            empty for a folder.
        paths: all names, by the position in the reader's own order.
    """

    def __init__(
        self,
        name: str,
        addressed: list[str],
        names: Sequence[str],
        keys: Sequence[str],
        labels: list[int] | None,
        classes: list[str] | None,
        parts: Sequence[str | None],
        sources: list[str],
        left_out: Mapping[str, int],
        places: Any = (),
    ) -> None:
        super().__init__(name, names, labels, classes, parts, keys)
        self.addressed = addressed
        self.sources = sources
        self.places = places
        self.paths = self.names
        self.left_out = dict(left_out)

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


def indexed(kind: str, name: str, addressed: list[str], make: Callable[[], FileImages]) -> FileImages:
    """The images in a folder or in archives: from the cache folder unless they changed, else listed by `make`.

    kind: folder, zip or tar: how `make` lists what is addressed. A long listing is kept.
    """
    open_archive.cache_clear()  # an archive of that name may have been replaced
    # By absolute path, so that a set has one index wherever a command is started.
    whole = json.dumps([_VERSION, kind, list(map(os.path.abspath, addressed))])
    path = cache_folder() / "index" / f"{hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()}.safetensors"
    data = _read(path, name, addressed)
    if data is None:
        data = make()
        if len(data) >= MIN_IMAGES and _keep(path, data):
            # Read back, so that the first process of many maps the file into memory as the others do.
            data = _read(path, name, addressed) or data
    if data.left_out:
        remedy = "convert, repair, unpack or move them to use them"
        tell_once(f"left out of {data.name}: {listed(data.left_out)}; {remedy}")
    return data


def _keep(path: Path, data: FileImages) -> bool:
    """Write the listing, unless the images have just changed; whether it was written."""
    stamps = _stamps(data.sources)
    newest_ns = max(stamps, key=itemgetter(1))[1]
    # A file system's clock may tick in seconds: a later change within the same tick would go unnoticed.
    if newest_ns > time.time_ns() - _FRESH_S * 1e9:
        return False
    parts = list(dict.fromkeys(data.parts))
    code = dict(zip(parts, range(len(parts))))
    arrays = {
        "names.text": data.names.text,
        "names.ends": data.names.ends,
        "keys.text": data.keys.text,
        "keys.ends": data.keys.ends,
        "parts": np.fromiter(map(code.__getitem__, data.parts), np.int64, len(data)),
        "places": np.array(data.places, dtype=np.int64),
    }
    if data.labels is not None:
        arrays["labels"] = np.array(data.labels, dtype=np.int64)
    about = {
        "classes": data.classes,
        "parts": parts,
        "sources": list(map(os.path.abspath, data.sources)),
        "stamps": stamps,
        "left_out": data.left_out,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            save_file(arrays, unfinished, {"about": json.dumps(about)})
    except (OSError, WriteError) as error:
        print(
            f"the index of {len(data)} images could not be kept ({reason_of(error)}): they are listed again next time; "
            "set RAPTOR_CACHE to a folder that can be written",
            file=sys.stderr,
        )
        return False
    return True


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


def _read(path: Path, name: str, addressed: list[str]) -> FileImages | None:
    """The listing kept at `path`; None if there is none, or it is old or broken (it is then made again)."""
    try:
        with safe_open(path, "np") as file:
            about = json.loads(file.metadata()["about"])
        if about["stamps"] != _stamps(about["sources"]):
            return None
        # Through torch, which maps the file into memory; safetensors' own reader for NumPy copies it.
        arrays = {key: tensor.numpy() for key, tensor in load_file(path).items()}
        labels = None
        if "labels" in arrays:
            labels = arrays["labels"].tolist()
        return FileImages(
            name,
            addressed,
            PackedNames(arrays["names.text"], arrays["names.ends"]),
            PackedNames(arrays["keys.text"], arrays["keys.ends"]),
            labels,
            about["classes"],
            list(map(about["parts"].__getitem__, arrays["parts"].tolist())),
            about["sources"],
            about["left_out"],
            arrays["places"],
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
