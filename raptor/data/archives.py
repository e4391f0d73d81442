"""Images inside zip and tar files, read in place through an index of offsets; nothing is unpacked."""

from __future__ import annotations

import glob
import json
import os
import re
import struct
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raptor.data.folder import SUFFIXES, arrange, is_image_path, label_entries
from raptor.data.images import FileImages, check_file_size, numbered_classes
from raptor.data.index import Listing, announced, indexed
from raptor.data.names import PackedNames
from raptor.data.split import split_keys, split_word

_ZIP_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LABEL_KEYS = ("label", "cls", "class", "class_id", "class_name")
_MAX_FILES = 1_000_000  # names that a brace pattern may stand for
_MAX_BRACES = 32
_MAX_LABEL_BYTES = 1 << 20


@lru_cache(maxsize=128)
def _handle(path: str, process: int, thread: int) -> FileIO:
    return open(path, "rb", buffering=0)


def _read_at(path: str, offset: int, size: int) -> bytes:
    """Bytes of a file. Each process and thread has its own handle, so forked workers do not move each other's."""
    handle = _handle(path, os.getpid(), threading.get_ident())
    handle.seek(offset)
    data = handle.read(size)
    if len(data) != size:
        raise OSError(f"{path} ends inside the entry")
    return data


def expand_braces(pattern: str) -> list[str]:
    """`a-{08..10}.tar` to three names, `{x,y}.zip` to two; braces may nest."""
    if pattern.count("{") > _MAX_BRACES:
        raise ValueError(f"{pattern[:60]!r} has more than {_MAX_BRACES} braces: name the files in several patterns")
    start = pattern.find("{")
    if start < 0:
        return [pattern]
    end = _closing_brace(pattern, start)
    head, body, tail = pattern[:start], pattern[start + 1 : end], pattern[end + 1 :]
    numbers = re.fullmatch(r"([0-9]{1,18})\.\.([0-9]{1,18})", body)
    if numbers:
        first, last = numbers.groups()
        if int(last) < int(first):
            raise ValueError(f"the range {{{body}}} runs backwards in {pattern!r}")
        _check_count(int(last) - int(first) + 1, pattern)
        middles = [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)]
    else:
        middles = [name for piece in split_commas(body) for name in expand_braces(piece)]
    rests = expand_braces(tail)
    _check_count(len(middles) * len(rests), pattern)
    return [head + middle + rest for middle in middles for rest in rests]


def _check_count(num_files: int, pattern: str) -> None:
    if num_files > _MAX_FILES:
        raise ValueError(f"{pattern!r} stands for more than {_MAX_FILES:,} files: give a shorter range")


def _closing_brace(pattern: str, start: int) -> int:
    level = 0
    for i in range(start, len(pattern)):
        level += {"{": 1, "}": -1}.get(pattern[i], 0)
        if level == 0:
            return i
    raise ValueError(f"unclosed brace in {pattern!r}")


def split_commas(text: str) -> list[str]:
    """Split at commas that are not inside braces."""
    pieces, level = [""], 0
    for letter in text:
        level += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and level == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return [piece.strip() for piece in pieces]


def list_files(pattern: str) -> list[str]:
    """Files of a comma-joined list of names, brace patterns and globs; a missing one is an error."""
    found: list[str] = []
    for name in (name for piece in split_commas(pattern) for name in expand_braces(piece)):
        name = os.path.expanduser(name)
        matches = [name] if os.path.isfile(name) else sorted(filter(os.path.isfile, glob.glob(name)))
        if not matches:
            raise ValueError(f"no file {name}; check the path or the pattern {pattern!r}")
        found += matches
    return list(dict.fromkeys(found))


class ZipEntry(NamedTuple):
    archive: str
    path: str
    offset: int
    size: int
    method: int
    crc: int
    num_bytes: int


class ZipImages(FileImages):
    """One or several zip archives of an image folder, seen as one folder."""

    def __init__(self, spec: str) -> None:
        archives = list_files(spec)
        _handle.cache_clear()  # an archive of that name may have been replaced
        found = indexed("zip", archives, lambda: _list_zips(archives, spec))
        super().__init__(spec, found.names, found.labels, found.classes, found.parts, found.keys)
        self.archives, self.paths, self.where = archives, found.names, found.numbers

    def num_bytes(self, position: int) -> int:
        return int(self.where["num_bytes"][position])

    def content(self, position: int) -> bytes:
        archive, *numbers = (int(self.where[name][position]) for name in _ZIP_COLUMNS)
        return read_zip_entry(ZipEntry(self.archives[archive], self.paths[position], *numbers))


_ZIP_COLUMNS = ("archive", "offset", "size", "method", "crc", "num_bytes")


def _list_zips(archives: list[str], spec: str) -> Listing:
    """The images of all archives. They are one folder, so the layout is read off all of their paths at once."""
    by_path: dict[str, list[ZipEntry]] = {}
    for entry in (entry for archive in announced(archives) for entry in zip_entries(archive)):
        by_path.setdefault(entry.path, []).append(entry)
    places = [(place, entry) for place in arrange(list(by_path)) for entry in by_path[place.path]]
    if not places:
        raise ValueError(f"no images in {spec}; expected entries such as train/<class>/x.jpg")
    labels, classes = label_entries([place.class_name for place, _ in places])
    unique = len(by_path) == sum(map(len, by_path.values()))
    names = [entry.path if unique else f"{Path(entry.archive).stem}/{entry.path}" for _, entry in places]
    keys = PackedNames.pack(split_keys(entry.path for _, entry in places))
    number = {archive: i for i, archive in enumerate(archives)}
    rows = [(number[entry.archive], *entry[2:]) for _, entry in places]
    columns = dict(zip(_ZIP_COLUMNS, np.array(rows, dtype=np.int64).T))
    parts = [place.part for place, _ in places]
    return Listing(PackedNames.pack(names), keys, labels, classes, parts, archives, numbers=columns)


def zip_entries(archive: str, wanted: Callable[[str], bool] = is_image_path) -> Iterator[ZipEntry]:
    """The files of a zip whose names are wanted, by where they lie in it.

    Names are read as when it is unpacked: `\\` between folders as `/`, `./a/x` as `a/x`; of two files of one name the
    later one is taken.
    """
    try:
        with zipfile.ZipFile(archive) as file:
            infos = file.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise ValueError(f"cannot read {archive} as a zip: {error}; make it again") from error
    by_path = {_plain_path(info.filename): info for info in infos if not info.filename.endswith(("/", "\\"))}
    for path, info in by_path.items():
        if wanted(path):
            if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{archive} is encrypted or oddly compressed; make it with zip -0 or plain zip")
            yield ZipEntry(
                archive,
                path,
                info.header_offset,
                info.compress_size,
                info.compress_type,
                info.CRC,
                info.file_size,
            )


def _plain_path(name: str) -> str:
    """The path of a file in an archive, below the folder that it is unpacked in."""
    return "/".join(piece for piece in name.replace("\\", "/").split("/") if piece not in ("", ".", ".."))


def read_zip_entry(entry: ZipEntry) -> bytes:
    """The content of one entry, checked against its CRC."""
    magic, name_size, extra_size = _ZIP_LOCAL_HEADER.unpack(
        _read_at(entry.archive, entry.offset, _ZIP_LOCAL_HEADER.size)
    )
    if magic != b"PK\x03\x04":
        raise OSError(f"{entry.archive} changed since it was opened")
    check_file_size(max(entry.size, entry.num_bytes))
    data = _read_at(entry.archive, entry.offset + _ZIP_LOCAL_HEADER.size + name_size + extra_size, entry.size)
    if entry.method == zipfile.ZIP_DEFLATED:  # never more than the index says, whatever the stream holds
        data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, entry.num_bytes + 1)
    if zlib.crc32(data) != entry.crc:
        raise OSError("checksum mismatch")
    return data


class _TarSample(NamedTuple):
    archive: str
    key: str
    offset: int
    size: int
    label: int | str | None
    file: str


class TarImages(FileImages):
    """Shards in the WebDataset layout: `key.jpg` with `key.cls` or `key.json` beside it, in plain tar files.

    Of `key.jpg`, `key.png` and `key.depth.png` the first is the image, whatever their order: the others are targets.
    """

    def __init__(self, pattern: str) -> None:
        archives = list_files(pattern)
        _handle.cache_clear()
        found = indexed("tar", archives, lambda: _list_tars(archives, pattern))
        super().__init__(f"wds/{pattern}", found.names, found.labels, found.classes, found.parts, found.keys)
        self.archives, self.where = archives, found.numbers

    def num_bytes(self, position: int) -> int:
        return int(self.where["size"][position])

    def content(self, position: int) -> bytes:
        archive, offset, size = (int(self.where[name][position]) for name in _TAR_COLUMNS)
        check_file_size(size)
        return _read_at(self.archives[archive], offset, size)


_TAR_COLUMNS = ("archive", "offset", "size")


def _list_tars(archives: list[str], pattern: str) -> Listing:
    samples = [sample for archive in announced(archives) for sample in _tar_samples(archive)]
    if not samples:
        raise ValueError(f"no images in {pattern}; expected entries key.jpg, key.png or key.webp")
    names = [sample.key for sample in samples]
    if len(set(names)) != len(names):
        names = [f"{Path(sample.archive).stem}/{sample.key}" for sample in samples]
    keys = PackedNames.pack(split_keys(sample.file.removeprefix("./") for sample in samples))
    labels, classes = _tar_labels(samples)
    number = {archive: i for i, archive in enumerate(archives)}
    rows = [(number[sample.archive], sample.offset, sample.size) for sample in samples]
    columns = dict(zip(_TAR_COLUMNS, np.array(rows, dtype=np.int64).T))
    return Listing(PackedNames.pack(names), keys, labels, classes, _tar_parts(samples), archives, numbers=columns)


def _tar_parts(samples: list[_TarSample]) -> list[str | None]:
    words = {archive: split_word(archive) for archive in {sample.archive for sample in samples}}
    if None in words.values():
        return [None] * len(samples)
    return [words[sample.archive] for sample in samples]


def _tar_samples(archive: str) -> Iterator[_TarSample]:
    images: dict[str, dict[str, tuple[int, int, str]]] = {}
    labels: dict[str, int | str] = {}
    try:
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                key, suffix = _key_and_suffix(member.name)
                if member.isfile() and is_image_path(_plain_path(member.name)):
                    images.setdefault(key, {})[suffix] = (member.offset_data, member.size, member.name)
                elif member.isfile() and suffix in (".cls", ".json") and member.size <= _MAX_LABEL_BYTES:
                    label = _parse_label(suffix, _read_at(archive, member.offset_data, member.size))
                    if label is not None and (suffix == ".cls" or key not in labels):
                        labels[key] = label
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ValueError(f"cannot read {archive} as a plain tar: {error}; unpack a compressed one first") from error
    for key, by_suffix in images.items():
        suffixes = sorted(by_suffix, key=_suffix_rank)
        if len(suffixes) > 1 and suffixes[0].count(".") > 1:
            raise ValueError(
                f"{archive} holds {key}{suffixes[0]} and {key}{suffixes[1]}, which are one sample of WebDataset: "
                "rename such files without further dots"
            )
        offset, size, file = by_suffix[suffixes[0]]
        yield _TarSample(archive, key, offset, size, labels.get(key), file)


def _suffix_rank(suffix: str) -> tuple[int, int]:
    """The least is the image of a sample: `.jpg`, then `.png`, then `.depth.png`."""
    return suffix.count("."), next(i for i, known in enumerate(SUFFIXES) if suffix.endswith(known))


def _key_and_suffix(name: str) -> tuple[str, str]:
    folder, _, base = name.removeprefix("./").rpartition("/")
    stem, dot, suffix = base.partition(".")
    return (f"{folder}/{stem}" if folder else stem), (dot + suffix).lower()


def _parse_label(suffix: str, content: bytes) -> int | str | None:
    text = content.decode("utf-8", "replace").strip()
    if suffix == ".cls":
        return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else text
    try:
        values: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = [values[key] for key in _LABEL_KEYS if key in values] if isinstance(values, dict) else [values]
    return found[0] if found and isinstance(found[0], int | str) else None


def _tar_labels(samples: list[_TarSample]) -> tuple[list[int] | None, list[str] | None]:
    labels = [sample.label for sample in samples]
    numbers = [label for label in labels if isinstance(label, int)]
    if len(numbers) == len(labels):
        return numbers, numbered_classes(numbers, samples[0].archive)
    return label_entries([None if label is None else str(label) for label in labels])
