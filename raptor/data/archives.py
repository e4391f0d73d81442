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
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raptor.data.folder import (
    SUFFIXES,
    arrange,
    count_unread,
    is_hidden,
    is_image_path,
    label_entries,
    tell_left_out,
)
from raptor.data.images import FileImages, check_file_size, numbered_classes
from raptor.data.index import Listing, announced, indexed
from raptor.data.names import PackedNames
from raptor.data.split import split_keys, split_word

_ZIP_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LABEL_KEYS = ("label", "cls", "class", "class_id", "class_name")
_MAX_FILES = 1_000_000  # names that a brace pattern may stand for
_MAX_BRACES = 32
_MAX_LABEL_BYTES = 1 << 20
_BLOCK = 1 << 20  # bytes of an archive that are looked at in one go
_TAR_END = 2 * tarfile.BLOCKSIZE  # of zeros, which every program that writes tars puts at the end


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
    head = pattern[:start]
    body = pattern[start + 1 : end]
    numbers = re.fullmatch(r"([0-9]{1,18})\.\.([0-9]{1,18})", body)
    if numbers:
        first, last = numbers.groups()
        if int(last) < int(first):
            raise ValueError(f"the range {{{body}}} runs backwards in {pattern!r}")
        _check_count(int(last) - int(first) + 1, pattern)
        middles = [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)]
    else:
        middles = []
        for piece in split_commas(body):
            middles += expand_braces(piece)
    rests = expand_braces(pattern[end + 1 :])
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
    pieces = [""]
    level = 0
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
    for piece in split_commas(pattern):
        for name in map(os.path.expanduser, expand_braces(piece)):
            if os.path.isfile(name):
                matches = [name]
            else:
                matches = sorted(filter(os.path.isfile, glob.glob(name)))
            if not matches:
                raise ValueError(f"no file {name}; check the path or the pattern {pattern!r}")
            found += matches
    return list(dict.fromkeys(found))


class ZipEntry(NamedTuple):
    """Where a file lies in a zip: `size` compressed bytes at `offset`, `num_bytes` when they are unpacked."""

    archive: str
    path: str
    offset: int
    size: int
    method: int
    crc: int
    num_bytes: int

    @classmethod
    def of(cls, archive: str, path: str, info: zipfile.ZipInfo) -> ZipEntry:
        """The entry of a file that can be read in place; others raise ValueError."""
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{archive} is encrypted or oddly compressed; make it with zip -0 or plain zip")
        return cls(archive, path, info.header_offset, info.compress_size, info.compress_type, info.CRC, info.file_size)

    def read(self) -> bytes:
        """The content, checked against its CRC."""
        header = _read_at(self.archive, self.offset, _ZIP_LOCAL_HEADER.size)
        magic, name_size, extra_size = _ZIP_LOCAL_HEADER.unpack(header)
        if magic != b"PK\x03\x04":
            raise OSError(f"{self.archive} changed since it was opened")
        check_file_size(max(self.size, self.num_bytes))
        data = _read_at(self.archive, self.offset + _ZIP_LOCAL_HEADER.size + name_size + extra_size, self.size)
        if self.method == zipfile.ZIP_DEFLATED:  # never more than the index says, whatever the stream holds
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, self.num_bytes + 1)
        if zlib.crc32(data) != self.crc:
            raise OSError("checksum mismatch")
        return data


def zip_files(archive: str) -> dict[str, zipfile.ZipInfo]:
    """The files of a zip by their paths.

    Names are read as when it is unpacked: `\\` between folders as `/`, `./a/x` as `a/x`; of two files of one name the
    later one is taken.
    """
    try:
        with zipfile.ZipFile(archive) as file:
            infos = file.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise ValueError(f"cannot read {archive} as a zip: {error}; make it again") from error
    return {_plain_path(info.filename): info for info in infos if not info.filename.endswith(("/", "\\"))}


def _plain_path(name: str) -> str:
    """The path of a file in an archive, below the folder that it is unpacked in."""
    return "/".join(piece for piece in name.replace("\\", "/").split("/") if piece not in ("", ".", ".."))


class ZipImages(FileImages):
    """One or several zip archives of an image folder, seen as one folder."""

    def __init__(self, spec: str) -> None:
        archives = list_files(spec)
        _handle.cache_clear()  # an archive of that name may have been replaced
        found = indexed("zip", archives, lambda: _list_zips(archives, spec))
        super().__init__(spec, found.names, found.labels, found.classes, found.parts, found.keys)
        self.archives = archives
        self.paths = found.names
        self.where = found.numbers
        self.left_out = found.left_out
        tell_left_out(self.name, self.left_out)

    def num_bytes(self, position: int) -> int:
        return int(self.where["num_bytes"][position])

    def content(self, position: int) -> bytes:
        archive, *numbers = (int(self.where[name][position]) for name in _ZIP_COLUMNS)
        return ZipEntry(self.archives[archive], self.paths[position], *numbers).read()


_ZIP_COLUMNS = ("archive", "offset", "size", "method", "crc", "num_bytes")


def _list_zips(archives: list[str], spec: str) -> Listing:
    """The images of all archives. They are one folder, so the layout is read off all of their paths at once."""
    by_path: dict[str, list[ZipEntry]] = {}
    others = []
    num_images = 0
    for archive in announced(archives):
        for path, info in zip_files(archive).items():
            if is_image_path(path):
                by_path.setdefault(path, []).append(ZipEntry.of(archive, path, info))
                num_images += 1
            elif not is_hidden(path):
                others.append(path)
    rows = []
    names = []
    paths = []
    parts = []
    class_names = []
    is_unique = len(by_path) == num_images
    number = {archive: i for i, archive in enumerate(archives)}
    for place in arrange(list(by_path)):
        for entry in by_path[place.path]:
            rows.append((number[entry.archive], *entry[2:]))
            names.append(entry.path if is_unique else f"{Path(entry.archive).stem}/{entry.path}")
            paths.append(entry.path)
            parts.append(place.part)
            class_names.append(place.class_name)
    if not rows:
        raise ValueError(f"no images in {spec}; expected entries such as train/<class>/x.jpg")
    labels, classes = label_entries(class_names)
    return Listing(
        PackedNames.pack(names),
        PackedNames.pack(split_keys(paths)),
        labels,
        classes,
        parts,
        archives,
        dict(zip(_ZIP_COLUMNS, np.array(rows, dtype=np.int64).T)),
        count_unread(others),
    )


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
        self.archives = archives
        self.where = found.numbers
        self.left_out = found.left_out
        tell_left_out(self.name, self.left_out)

    def num_bytes(self, position: int) -> int:
        return int(self.where["size"][position])

    def content(self, position: int) -> bytes:
        archive, offset, size = (int(self.where[name][position]) for name in _TAR_COLUMNS)
        check_file_size(size)
        return _read_at(self.archives[archive], offset, size)


_TAR_COLUMNS = ("archive", "offset", "size")


def _list_tars(archives: list[str], pattern: str) -> Listing:
    left_out: Counter[str] = Counter()
    samples = []
    for archive in announced(archives):
        samples += _tar_samples(archive, left_out)
    if not samples:
        raise ValueError(f"no images in {pattern}; expected entries key.jpg, key.png or key.webp")
    names = [sample.key for sample in samples]
    if len(set(names)) != len(names):
        names = [f"{Path(sample.archive).stem}/{sample.key}" for sample in samples]
    if len(set(names)) != len(names):  # one archive holds a key twice, as concatenated ones may
        names = [f"{Path(sample.archive).stem}/{sample.key}@{sample.offset}" for sample in samples]
    labels, classes = _tar_labels(samples)
    number = {archive: i for i, archive in enumerate(archives)}
    rows = [(number[sample.archive], sample.offset, sample.size) for sample in samples]
    return Listing(
        PackedNames.pack(names),
        PackedNames.pack(split_keys(sample.file.removeprefix("./") for sample in samples)),
        labels,
        classes,
        _tar_parts(samples),
        archives,
        dict(zip(_TAR_COLUMNS, np.array(rows, dtype=np.int64).T)),
        dict(left_out),
    )


def _tar_parts(samples: list[_TarSample]) -> list[str | None]:
    """The split that each archive is named after, if all of them are."""
    words = {archive: split_word(archive) for archive in {sample.archive for sample in samples}}
    if None in words.values():
        return [None] * len(samples)
    return [words[sample.archive] for sample in samples]


def _tar_samples(archive: str, left_out: Counter[str]) -> list[_TarSample]:
    """The samples of one archive; what is not read is added to `left_out`."""
    images: dict[str, dict[str, tuple[int, int, str]]] = {}
    labels: dict[str, int | str] = {}
    for member in _tar_members(archive, left_out):
        path = _plain_path(member.name)
        key, suffix = _key_and_suffix(member.name)
        if member.issym() or member.islnk():
            if is_image_path(path):  # it may lead out of the archive
                left_out["links"] += 1
        elif not member.isfile() or is_hidden(path):
            continue
        elif is_image_path(path):
            images.setdefault(key, {})[suffix] = (member.offset_data, member.size, member.name)
        elif suffix in (".cls", ".json") and member.size <= _MAX_LABEL_BYTES:
            label = _parse_label(suffix, _read_at(archive, member.offset_data, member.size))
            if label is not None and (suffix == ".cls" or key not in labels):
                labels[key] = label
        else:
            left_out.update(count_unread([path]))
    return [_choose_image(archive, key, found, labels.get(key)) for key, found in images.items()]


def _tar_members(archive: str, left_out: Counter[str]) -> Iterator[tarfile.TarInfo]:
    """The entries of a plain tar, also those behind a damaged header or of archives that were put end to end.

    Stretches between two entries that hold anything but zeros are of damaged entries: they are counted.
    """
    end = 0
    size = os.path.getsize(archive)
    try:
        with tarfile.open(archive, "r:") as tar:
            tar.ignore_zeros = True  # otherwise a header that cannot be read would end the archive without a word
            for member in tar:
                if member.offset > end and _holds_data(archive, end, member.offset):
                    left_out["damaged stretches"] += 1
                end = member.offset_data
                if member.isreg() or member.type not in tarfile.SUPPORTED_TYPES:
                    end += member.size + -member.size % tarfile.BLOCKSIZE
                yield member
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ValueError(f"cannot read {archive} as a plain tar: {error}; unpack a compressed one first") from error
    if _holds_data(archive, end, size):
        left_out["damaged stretches"] += 1
    elif size - end < _TAR_END:
        left_out["missing ends of archives"] += 1


def _holds_data(archive: str, start: int, end: int) -> bool:
    """Whether any byte from `start` to `end` of a tar is not zero, apart from a header for all entries."""
    with open(archive, "rb") as file:
        file.seek(start)
        header = file.read(tarfile.BLOCKSIZE)
        if header[156:157] == tarfile.XGLTYPE:  # as git writes it; tarfile reads it without listing it
            num_bytes = int(header[124:136].strip(b"\0 ") or b"0", 8)
            start += tarfile.BLOCKSIZE + num_bytes + -num_bytes % tarfile.BLOCKSIZE
        file.seek(start)
        while start < end:
            block = file.read(min(_BLOCK, end - start))
            if block.count(0) != len(block):
                return True
            start += max(1, len(block))
    return False


def _choose_image(
    archive: str, key: str, by_suffix: dict[str, tuple[int, int, str]], label: int | str | None
) -> _TarSample:
    """The sample of one key: its image is that of the first suffix, the others are targets."""
    first, *others = sorted(by_suffix, key=_suffix_rank)
    if others and first.count(".") > 1:
        raise ValueError(
            f"{archive} holds {key}{first} and {key}{others[0]}, which are one sample of WebDataset: "
            "rename such files without further dots"
        )
    offset, size, file = by_suffix[first]
    return _TarSample(archive, key, offset, size, label, file)


def _suffix_rank(suffix: str) -> tuple[int, int]:
    """The least is the image of a sample: `.jpg`, then `.png`, then `.depth.png`."""
    return suffix.count("."), next(i for i, known in enumerate(SUFFIXES) if suffix.endswith(known))


def _key_and_suffix(name: str) -> tuple[str, str]:
    folder, _, base = name.removeprefix("./").rpartition("/")
    stem, dot, suffix = base.partition(".")
    return (f"{folder}/{stem}" if folder else stem), (dot + suffix).lower()


def _parse_label(suffix: str, content: bytes) -> int | str | None:
    """What a label file says: a class number, a class name, or None if the sample has no class."""
    text = content.decode("utf-8", "replace").strip()
    if suffix == ".cls":
        return _as_label(text)
    try:
        values: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(values, dict):
        values = next((values[key] for key in _LABEL_KEYS if key in values), None)
    return _as_label(values)


def _as_label(value: object) -> int | str | None:
    """A class number or name; None for a negative number, which means that there is no label, and for anything else."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        value = int(value)
    if isinstance(value, int):
        return value if value >= 0 else None
    return value if isinstance(value, str) and value else None


def _tar_labels(samples: list[_TarSample]) -> tuple[list[int] | None, list[str] | None]:
    """Labels and classes. A sample without a label does not change the classes of the others."""
    numbers: list[int] = []
    names: list[str | None] = []
    for sample in samples:
        numbers.append(sample.label if isinstance(sample.label, int) else -1)
        names.append(sample.label if isinstance(sample.label, str) else None)
    if max(numbers) < 0:
        return label_entries(names)
    first_name = next((name for name in names if name is not None), None)
    if first_name is not None:
        both = f"numbers such as {max(numbers)} and names such as {first_name[:40]}"
        raise ValueError(f"the labels in {samples[0].archive} are {both}: give all samples the same kind of label")
    return numbers, numbered_classes(numbers, samples[0].archive)
