"""Images inside zip and tar files, read in place through an index of offsets; nothing is unpacked."""

from __future__ import annotations

import glob
import json
import os
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from raptor.data.classes import number_labels, number_names
from raptor.data.folder import SUFFIXES, arrange, count_unread, is_hidden, is_image_path, no_images, walk_folders
from raptor.data.image_file import ZIP_START, ArchivedFile, DiskFile, File, read_at
from raptor.data.index import FileImages, indexed
from raptor.data.split import split_keys, split_word
from raptor.progress import track

_RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")
_MAX_FILES = 1_000_000  # that a pattern may stand for
_SHOWN = 2000  # letters of a pattern in a message
_TAR_END = 2 * tarfile.BLOCKSIZE  # of zeros, which every program that writes tars puts at the end
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # first bytes of gzip, bzip2, xz and zstd
_DAMAGED = "damaged stretches"
_NO_END = "missing ends of archives"
_REPLACED = "files whose name comes again"
_LABEL_KEYS = ("label", "cls", "class", "class_id", "class_name")
_MAX_LABEL_BYTES = 1 << 20
_BLOCK = 1 << 20  # bytes of an archive that are looked at in one go


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


def files_of(spec: str) -> dict[str, File]:
    """The files of a folder, or of zip archives (several joined by commas, or a glob) seen as one, by sorted paths."""
    root = Path(spec).expanduser()
    files: dict[str, File] = {}
    if root.is_dir():
        for prefix, names in walk_folders(root):
            for name in names:
                files[prefix + name] = DiskFile(root / prefix / name)
    else:
        for archive in list_files(spec):
            files |= zip_files(archive)
    return dict(sorted(files.items()))


def zip_files(archive: str, left_out: Counter[str] | None = None) -> dict[str, ArchivedFile]:
    """The files of a zip by the paths that they have when it is unpacked; of two files of one name the later one.

    left_out: counts the earlier ones.
    """
    try:
        with zipfile.ZipFile(archive) as file:
            infos = file.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise ValueError(f"cannot read {archive} as a zip: {error}; make it again") from error
    # A zip is listed from its end, so that an archive in front of it would be left out without a word.
    first = min((info.header_offset for info in infos), default=0)
    if first and read_at(archive, 0, len(ZIP_START)) == ZIP_START:
        raise ValueError(f"{archive} is several zips end to end, and only the last can be listed: give each by itself")
    files = {}
    for info in infos:
        if info.filename.endswith(("/", "\\")):  # a folder
            continue
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{archive} is encrypted or oddly compressed; make it with zip -0 or plain zip")
        path = _plain_path(info.filename)
        if path in files and left_out is not None:
            left_out[_REPLACED] += 1
        files[path] = ArchivedFile(
            archive, info.header_offset, info.compress_size, info.file_size, info.compress_type, info.CRC
        )
    return files


def _plain_path(name: str) -> str:
    """The path of a file in an archive, below the folder that it is unpacked in. Archivers on Windows write `\\`."""
    return "/".join(piece for piece in name.replace("\\", "/").split("/") if piece not in ("", ".", ".."))


def open_zips(pattern: str) -> FileImages:
    """The images of zip archives, which are one image folder."""
    archives = list_files(pattern)
    return indexed("zip", pattern, archives, lambda: _list_zips(archives, pattern))


def _list_zips(archives: list[str], pattern: str) -> FileImages:
    # All of them are one folder, so the layout is read off all of their paths at once.
    by_path: dict[str, list[tuple[int, ArchivedFile]]] = {}
    left_out: Counter[str] = Counter()
    for number, archive in enumerate(track(archives, "listing archives", quiet=True)):
        for path, file in zip_files(archive, left_out).items():
            if is_image_path(path):
                by_path.setdefault(path, []).append((number, file))
            else:
                count_unread(path, left_out)
    if not by_path:
        raise no_images(pattern, "entries such as train/<class>/x.jpg", left_out)
    is_repeated = max(map(len, by_path.values())) > 1
    places = []
    names = []
    paths = []
    parts = []
    class_names = []
    for path, part, class_name in arrange(list(by_path), left_out):
        for number, file in by_path[path]:
            name = path
            if is_repeated:  # two archives hold a file of one name
                name = f"{Path(file.archive).stem}/{path}"
            places.append((number, *file[1:]))
            names.append(name)
            paths.append(path)
            parts.append(part)
            class_names.append(class_name)
    labels, classes = number_names(class_names)
    keys = split_keys(paths)
    return FileImages(pattern, archives, names, keys, labels, classes, parts, archives, left_out, places)


def open_tars(pattern: str) -> FileImages:
    """The images of the tar shards of a WebDataset.

    A sample is `key.jpg` with `key.cls` or `key.json` beside it. Of `key.jpg`, `key.png` and `key.depth.png` the first
    is the image, whatever their order: the others are targets.
    """
    archives = list_files(pattern)
    return indexed("tar", f"wds/{pattern}", archives, lambda: _list_tars(archives, pattern))


class _Sample(NamedTuple):
    """A sample of a WebDataset: its archive's number, its name, its image and what the file of its label holds."""

    archive: int
    key: str
    path: str
    image: ArchivedFile
    label: Any


def _list_tars(archives: list[str], pattern: str) -> FileImages:
    left_out: Counter[str] = Counter()
    samples: list[_Sample] = []
    for number, archive in enumerate(track(archives, "listing archives", quiet=True)):
        samples += _tar_samples(archive, number, left_out)
    if not samples:
        raise no_images(pattern, "entries key.jpg, key.png or key.webp", left_out)
    # By columns: a shard of ImageNet has ten thousand samples, a set a million.
    numbers, names, paths, images, values = zip(*samples)
    if len(set(names)) != len(names):  # shards may each count from 0
        stems = [Path(archive).stem for archive in archives]
        names = tuple(f"{stems[number]}/{name}" for number, name in zip(numbers, names))
    if len(set(names)) != len(names):  # two shards have one name, in two folders
        names = tuple(f"{name}@{image.offset}" for name, image in zip(names, images))
    words = list(map(split_word, archives))
    parts: list[str | None] = [None] * len(samples)
    if None not in [words[number] for number in set(numbers)]:  # the names of archives are splits only if all are
        parts = list(map(words.__getitem__, numbers))
    labels, classes = number_labels(values, archives[0])
    places = [(number, *image[1:]) for number, image in zip(numbers, images)]
    keys = split_keys(paths)
    return FileImages(f"wds/{pattern}", archives, names, keys, labels, classes, parts, archives, left_out, places)


def _tar_samples(archive: str, number: int, left_out: Counter[str]) -> list[_Sample]:
    """The samples of one archive; files that are not read are added to `left_out`."""
    images: dict[str, dict[str, tarfile.TarInfo]] = {}
    labels: dict[str, Any] = {}
    for member in _tar_members(archive, left_out):
        path = _plain_path(member.name)
        # WebDataset names samples up to the first dot: `a/1.depth.png` is `.depth.png` of `a/1`.
        folder, slash, base = path.rpartition("/")
        stem, dot, rest = base.partition(".")
        key = f"{folder}{slash}{stem}"
        suffix = f"{dot}{rest}".lower()
        is_label = suffix in (".cls", ".json")
        if member.isdir() or is_hidden(path):
            continue
        if not is_image_path(path) and not is_label:
            count_unread(path, left_out)
        elif member.issym() or member.islnk():  # it may lead out of the archive
            left_out["links"] += 1
        elif not member.isfile() or member.issparse():
            left_out["special files"] += 1
        elif not is_label:
            if suffix in images.get(key, {}):  # as in shards that each count from 0, put end to end
                left_out[_REPLACED] += 1
            images.setdefault(key, {})[suffix] = member
        elif suffix == ".cls" or key not in labels:  # whichever of the two comes first
            labels[key] = _read_label_file(archive, member)
    samples = []
    for key, by_suffix in images.items():
        # `.jpg` before `.png` before `.depth.png`: the first is the image.
        order = sorted(by_suffix, key=lambda name: (name.count("."), SUFFIXES.index(os.path.splitext(f"x{name}")[1])))
        first = order[0]
        if len(order) > 1 and first.count(".") > 1:
            raise ValueError(
                f"{archive} holds {key}{first} and {key}{order[1]}, which are one sample of WebDataset: "
                "rename such files without further dots"
            )
        member = by_suffix[first]
        image = ArchivedFile(archive, member.offset_data, member.size, member.size)
        samples.append(_Sample(number, key, _plain_path(member.name), image, labels.get(key)))
    return samples


def _tar_members(archive: str, left_out: Counter[str]) -> Iterator[tarfile.TarInfo]:
    """The entries of a plain tar, also those behind a damaged header or of archives that were put end to end.

    What cannot be read is counted: a stretch between two entries that holds anything but zeros, an entry that is cut.
    """
    end = 0
    size = os.path.getsize(archive)
    if read_at(archive, 0, min(size, 8)).startswith(_COMPRESSED):
        raise ValueError(f"cannot read {archive} in place: unpack a compressed one to a plain tar first")
    try:
        # With `ignore_zeros`, or a header that cannot be read would end the archive without a word.
        with tarfile.open(archive, "r:", ignore_zeros=True) as tar:
            for member in tar:
                if member.offset > end and _holds_data(archive, end, member.offset):
                    left_out[_DAMAGED] += 1
                end = member.offset_data
                if member.isreg() or member.type not in tarfile.SUPPORTED_TYPES:
                    end += member.size + -member.size % tarfile.BLOCKSIZE
                if member.offset_data + member.size > size and not member.issparse():
                    left_out[_DAMAGED] += 1
                    return
                yield member
                if end > size:  # cut behind the last byte of this entry; tarfile would call that an error
                    left_out[_NO_END] += 1
                    return
        if _holds_data(archive, end, size):
            left_out[_DAMAGED] += 1
        elif size - end < _TAR_END:
            left_out[_NO_END] += 1
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ValueError(f"cannot read {archive} as a plain tar: {error}; make it again") from error


def _holds_data(archive: str, start: int, end: int) -> bool:
    """Whether any byte from `start` to `end` of a tar is not zero, apart from a header for all entries."""
    with open(archive, "rb") as file:
        file.seek(start)
        header = file.read(tarfile.BLOCKSIZE)
        if header[156:157] == tarfile.XGLTYPE:  # as git writes it; tarfile reads it without listing it
            num_bytes = tarfile.nti(header[124:136])  # type: ignore[attr-defined]
            start += tarfile.BLOCKSIZE + num_bytes + -num_bytes % tarfile.BLOCKSIZE
        file.seek(start)
        while start < end:
            block = file.read(min(_BLOCK, end - start))
            if block.count(0) != len(block):
                return True
            start += max(1, len(block))
    return False


def _read_label_file(archive: str, member: tarfile.TarInfo) -> Any:
    """What a label file gives as the class: its text, or a value of its JSON; None if there is none."""
    if member.size > _MAX_LABEL_BYTES:
        return -1
    text = read_at(archive, member.offset_data, member.size).decode("utf-8", "replace")
    if not member.name.lower().endswith(".json"):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return -1
    if not isinstance(value, dict):
        return value
    for key in _LABEL_KEYS:
        if key in value:
            return value[key]
    return None
