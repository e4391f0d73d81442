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
    ListedImages,
    arrange,
    count_unread,
    is_hidden,
    is_image_path,
    label_entries,
)
from raptor.data.images import check_file_size, numbered_classes
from raptor.data.index import Listing, announced, indexed
from raptor.data.names import PackedNames
from raptor.data.split import split_keys, split_word

_RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")
_MAX_FILES = 1_000_000  # that a pattern may stand for
_SHOWN = 2000  # letters of a pattern in a message
_ZIP_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ZIP_COLUMNS = ("archive", "offset", "size", "method", "crc", "num_bytes")
_TAR_COLUMNS = ("archive", "offset", "size")
_LABEL_KEYS = ("label", "cls", "class", "class_id", "class_name")
_MAX_LABEL_BYTES = 1 << 20
_BLOCK = 1 << 20  # bytes of an archive that are looked at in one go
_TAR_END = 2 * tarfile.BLOCKSIZE  # of zeros, which every program that writes tars puts at the end

Label = int | str | None
"""A class number, a class name, or None for a sample without a class."""


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


def expand_ranges(pattern: str) -> list[str]:
    """`a-{08..10}.tar` to three names, as shards of WebDataset are written."""
    names = [""]
    end = 0
    for found in _RANGE.finditer(pattern):
        first, last = found.groups()
        numbers = range(int(first), int(last) + 1)
        if not numbers:
            raise ValueError(f"the range {found[0]} runs backwards in {pattern[:_SHOWN]!r}")
        if len(numbers) * len(names) > _MAX_FILES:
            raise ValueError(f"{pattern[:_SHOWN]!r} stands for more than {_MAX_FILES:,} files: give a shorter range")
        before = pattern[end : found.start()]
        width = len(first)
        names = [f"{name}{before}{number:0{width}d}" for name in names for number in numbers]
        end = found.end()
    return [name + pattern[end:] for name in names]


def list_files(pattern: str) -> list[str]:
    """Files of a comma-joined list of names, ranges and globs; a missing one is an error."""
    found: list[str] = []
    for piece in pattern.split(","):
        for name in expand_ranges(os.path.expanduser(piece.strip())):
            matches = [name] if os.path.isfile(name) else sorted(filter(os.path.isfile, glob.glob(name)))
            if not matches:
                raise ValueError(f"no file {name[:_SHOWN]}; check the path or the pattern {pattern[:_SHOWN]!r}")
            found += matches
    return list(dict.fromkeys(found))  # an archive that two patterns name is read once


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
        if self.method == zipfile.ZIP_DEFLATED:
            # Never more than the index says, because a small stream can unpack to more than fits in memory.
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, self.num_bytes + 1)
        if zlib.crc32(data) != self.crc:
            raise OSError("checksum mismatch")
        return data


def zip_files(archive: str) -> dict[str, zipfile.ZipInfo]:
    """The files of a zip by the paths that they have when it is unpacked; of two files of one name the later one."""
    try:
        with zipfile.ZipFile(archive) as file:
            infos = file.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise ValueError(f"cannot read {archive} as a zip: {error}; make it again") from error
    return {_plain_path(info.filename): info for info in infos if not info.filename.endswith(("/", "\\"))}


def _plain_path(name: str) -> str:
    """The path of a file in an archive, below the folder that it is unpacked in. Archivers on Windows write `\\`."""
    return "/".join(piece for piece in name.replace("\\", "/").split("/") if piece not in ("", ".", ".."))


class ZipImages(ListedImages):
    """One or several zip archives of an image folder, seen as one folder."""

    def __init__(self, spec: str) -> None:
        self.archives = list_files(spec)
        _handle.cache_clear()  # an archive of that name may have been replaced
        super().__init__(spec, indexed("zip", self.archives, lambda: _list_zips(self.archives, spec)))

    def num_bytes(self, position: int) -> int:
        return int(self.where["num_bytes"][position])

    def content(self, position: int) -> bytes:
        archive, *numbers = (int(self.where[name][position]) for name in _ZIP_COLUMNS)
        return ZipEntry(self.archives[archive], self.paths[position], *numbers).read()


def _list_zips(archives: list[str], spec: str) -> Listing:
    """The images of all archives. They are one folder, so the layout is read off all of their paths at once."""
    by_path: dict[str, list[tuple[int, ZipEntry]]] = {}
    others = []
    num_images = 0
    for number, archive in enumerate(announced(archives)):
        for path, info in zip_files(archive).items():
            if is_image_path(path):
                by_path.setdefault(path, []).append((number, ZipEntry.of(archive, path, info)))
                num_images += 1
            elif not is_hidden(path):
                others.append(path)
    rows = []
    names = []
    paths = []
    parts = []
    class_names = []
    is_unique = len(by_path) == num_images
    for place in arrange(list(by_path)):
        for number, entry in by_path[place.path]:
            rows.append((number, *entry[2:]))
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
    """An image in a tar: the name of its sample, its file, where it lies, and its label."""

    archive: int
    key: str
    file: str
    offset: int
    size: int
    label: Label


class TarImages(ListedImages):
    """Shards in the WebDataset layout: `key.jpg` with `key.cls` or `key.json` beside it, in plain tar files.

    Of `key.jpg`, `key.png` and `key.depth.png` the first is the image, whatever their order: the others are targets.
    """

    def __init__(self, pattern: str) -> None:
        self.archives = list_files(pattern)
        _handle.cache_clear()  # an archive of that name may have been replaced
        super().__init__(f"wds/{pattern}", indexed("tar", self.archives, lambda: _list_tars(self.archives, pattern)))

    def num_bytes(self, position: int) -> int:
        return int(self.where["size"][position])

    def content(self, position: int) -> bytes:
        archive, offset, size = (int(self.where[name][position]) for name in _TAR_COLUMNS)
        check_file_size(size)
        return _read_at(self.archives[archive], offset, size)


def _list_tars(archives: list[str], pattern: str) -> Listing:
    left_out: Counter[str] = Counter()
    samples: list[_TarSample] = []
    parts: list[str | None] = []
    for number, archive in enumerate(announced(archives)):
        found = _tar_samples(archive, number, left_out)
        samples += found
        parts += [split_word(archive)] * len(found)
    if not samples:
        raise ValueError(f"no images in {pattern}; expected entries key.jpg, key.png or key.webp")
    names = [sample.key for sample in samples]
    if len(set(names)) != len(names):  # shards may each count from 0
        names = [f"{Path(archives[sample.archive]).stem}/{sample.key}" for sample in samples]
    if len(set(names)) != len(names):  # one archive holds a key twice, as concatenated ones may
        names = [f"{name}@{sample.offset}" for name, sample in zip(names, samples)]
    labels, classes = _tar_labels(samples, archives[0])
    rows = [(sample.archive, sample.offset, sample.size) for sample in samples]
    return Listing(
        PackedNames.pack(names),
        PackedNames.pack(split_keys(sample.file.removeprefix("./") for sample in samples)),
        labels,
        classes,
        # The names of archives are splits only if all of them are.
        [None] * len(samples) if None in parts else parts,
        archives,
        dict(zip(_TAR_COLUMNS, np.array(rows, dtype=np.int64).T)),
        dict(left_out),
    )


def _tar_samples(archive: str, number: int, left_out: Counter[str]) -> list[_TarSample]:
    """The samples of one archive; files that are not read are added to `left_out`."""
    images: dict[str, dict[str, tarfile.TarInfo]] = {}
    labels: dict[str, Label] = {}
    for member in _tar_members(archive, left_out):
        path = _plain_path(member.name)
        folder, _, base = member.name.removeprefix("./").rpartition("/")
        stem, dot, suffix = base.partition(".")
        key = f"{folder}/{stem}" if folder else stem
        suffix = (dot + suffix).lower()
        if member.issym() or member.islnk():
            if is_image_path(path):  # it may lead out of the archive
                left_out["links"] += 1
        elif not member.isfile() or is_hidden(path):
            continue
        elif is_image_path(path):
            images.setdefault(key, {})[suffix] = member
        elif suffix in (".cls", ".json") and member.size <= _MAX_LABEL_BYTES:
            label = _parse_label(suffix, _read_at(archive, member.offset_data, member.size))
            if label is not None and (suffix == ".cls" or key not in labels):
                labels[key] = label
        else:
            left_out.update(count_unread([path]))
    samples = []
    for key, by_suffix in images.items():
        first, *others = sorted(by_suffix, key=_suffix_rank)
        if others and first.count(".") > 1:
            raise ValueError(
                f"{archive} holds {key}{first} and {key}{others[0]}, which are one sample of WebDataset: "
                "rename such files without further dots"
            )
        image = by_suffix[first]
        samples.append(_TarSample(number, key, image.name, image.offset_data, image.size, labels.get(key)))
    return samples


def _suffix_rank(suffix: str) -> tuple[int, int]:
    """The least is the image of a sample: `.jpg`, then `.png`, then `.depth.png`."""
    return suffix.count("."), next(i for i, known in enumerate(SUFFIXES) if suffix.endswith(known))


def _tar_members(archive: str, left_out: Counter[str]) -> Iterator[tarfile.TarInfo]:
    """The entries of a plain tar, also those behind a damaged header or of archives that were put end to end.

    Stretches between two entries that hold anything but zeros are of damaged entries: they are counted.
    """
    end = 0
    size = os.path.getsize(archive)
    try:
        with tarfile.open(archive, "r:") as tar:  # not compressed, so that each image has an offset
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


def _parse_label(suffix: str, content: bytes) -> Label:
    """The label in a file: a class number or name; None for a negative number, which says that there is no label."""
    value: Any = content.decode("utf-8", "replace").strip()
    if suffix == ".json":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
        if isinstance(value, dict):
            value = next((value[key] for key in _LABEL_KEYS if key in value), None)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        value = int(value)
    if isinstance(value, int):
        return value if value >= 0 else None
    return value if isinstance(value, str) and value else None


def _tar_labels(samples: list[_TarSample], archive: str) -> tuple[list[int] | None, list[str] | None]:
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
        raise ValueError(f"the labels in {archive} are {both}: give all samples the same kind of label")
    return numbers, numbered_classes(numbers, archive)
