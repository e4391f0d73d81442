"""Image folders, and what the paths of images say: the split and the class of each."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from raptor.data.images import FileImages, file_bytes, read_file
from raptor.data.index import Listing, indexed
from raptor.data.names import PackedNames
from raptor.data.split import TRAIN_NAMES, VAL_NAMES, is_split_name, split_keys

SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm", ".jp2", ".avif"),
    *(".jfif", ".jpe", ".pbm", ".pnm"),
)
_UNREAD_SUFFIXES = (".heic", ".heif", ".jxl", ".psd", ".svg", ".eps", ".dng", ".cr2", ".nef", ".arw", ".tga", ".ico")
"""Pictures that no decoder here reads: they are counted, because their owner believes that they are in the data."""
_ARCHIVES = {".zip": "{}/*.zip", ".tar": "wds/{}/*.tar", ".parquet": "hf/{}"}
_TABLES = ("metadata.csv", "labels.csv", "metadata.jsonl", "train.csv")
_MAX_LINKS = 8  # links to folders on the way to a file


class Entry(NamedTuple):
    """One image file of a folder or archive: its path there, its own split, its class."""

    path: str
    part: str | None
    class_name: str | None


def is_hidden(path: str) -> bool:
    """Whether a relative path is of a hidden file, or of a resource fork as macOS packs them."""
    return path.startswith(".") or "/." in path or "__MACOSX" in path.split("/")


def is_image_path(path: str) -> bool:
    """Whether a relative path looks like an image that can be read."""
    return path.lower().endswith(SUFFIXES) and not is_hidden(path)


def count_unread(paths: Iterable[str], unread: tuple[str, ...] = (*_UNREAD_SUFFIXES, *_ARCHIVES)) -> dict[str, int]:
    """How many of these files hold images that are not read, by suffix: unknown formats, and archives in archives."""
    suffixes = (os.path.splitext(path)[1].lower() for path in paths)
    counts = Counter(suffix for suffix in suffixes if suffix in unread)
    return dict(sorted(counts.items()))


@cache
def tell_once(line: str) -> None:
    """Print a line about data, which is opened once for each of its splits."""
    print(line, file=sys.stderr)


def arrange(paths: Sequence[str]) -> list[Entry]:
    """Read splits and classes off relative paths: `train/<class>/x`, `<class>/x` or a flat `x`.

    A single folder around the split or class folders is looked through. A class may be called `train`: folders are
    splits only if all of them are, or if a training and a validation folder are both there (others are then left out).
    """
    paths = sorted(paths)
    tails = [path.split("/") for path in paths]
    while _is_wrapped(tails):  # as archives of one folder have it
        tails = [tail[1:] for tail in tails]
    has_splits = _has_splits(tails)
    entries = []
    others = []
    for path, tail in zip(paths, tails):
        if not has_splits:
            entries.append(Entry(path, None, tail[0] if len(tail) > 1 else None))
        elif len(tail) > 1 and is_split_name(tail[0]):
            entries.append(Entry(path, tail[0].lower(), tail[1] if len(tail) > 2 else None))
        else:
            others.append(tail[0] if len(tail) > 1 else "no folder")
    if others:
        splits = sorted({tail[0] for tail in tails if len(tail) > 1 and is_split_name(tail[0])})
        names = sorted(set(others))
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        tell_once(
            f"folders named {' and '.join(splits)} are taken as splits: {len(others)} images in others are left out "
            f"({shown}); rename those folders if they are classes"
        )
    return entries


def _is_wrapped(tails: list[list[str]]) -> bool:
    """Whether all images lie in one folder around the folders of splits or classes."""
    tops = {tail[0] for tail in tails if len(tail) > 1}
    inner = [tail[1:] for tail in tails]
    if len(tops) != 1 or is_split_name(min(tops)) or not all(inner):
        return False
    return _has_splits(inner) or all(len(tail) > 1 for tail in inner)


def _has_splits(tails: list[list[str]]) -> bool:
    """Whether the outer folders are splits."""
    tops = {tail[0].lower() for tail in tails if len(tail) > 1}
    is_flat = any(len(tail) == 1 for tail in tails)
    has_both = bool(tops & set(TRAIN_NAMES)) and bool(tops & set(VAL_NAMES))
    return has_both or (bool(tops) and not is_flat and all(map(is_split_name, tops)))


def label_entries(class_names: Sequence[str | None]) -> tuple[list[int] | None, list[str] | None]:
    """Class names to indices in sorted order, -1 if there is none; (None, None) if no image has a class.

    A name may be written in two ways in Unicode, as macOS and others do: they are one class.
    """
    class_of = {name: unicodedata.normalize("NFC", name) for name in set(class_names) if name is not None}
    if not class_of:
        return None, None
    classes = sorted(set(class_of.values()))
    index = {name: number for number, name in enumerate(classes)}
    number_of: dict[str | None, int] = {name: index[one] for name, one in class_of.items()}
    number_of[None] = -1
    return [number_of[name] for name in class_names], classes


class ListedImages(FileImages):
    """Images that were listed once, see `indexed`.

    Attributes:
        paths: of all listed images, by the position in the reader's own order.
        where: further columns of the listing.
    """

    def __init__(self, name: str, found: Listing) -> None:
        super().__init__(name, found.names, found.labels, found.classes, found.parts, found.keys)
        self.paths = found.names
        self.where = found.numbers
        self.left_out = found.left_out
        if found.left_out:
            kinds = ", ".join(f"{number:,} {kind}" for kind, number in found.left_out.items())
            tell_once(f"left out of {self.name}: {kinds}; convert, repair or unpack them to use them")


class FolderImages(ListedImages):
    """A folder of image files in the ImageFolder layout, with or without split folders, or flat."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        super().__init__(str(root), indexed("folder", [str(root)], lambda: _list_folder(self.root)))

    def num_bytes(self, position: int) -> int:
        return file_bytes(self.root / self.paths[position])

    def content(self, position: int) -> bytes:
        return read_file(self.root / self.paths[position])


def _list_folder(root: Path) -> Listing:
    folders = []
    paths = []
    others = []
    for prefix, names in walk_folders(root):
        folders.append(str(root / prefix))
        for name in names:
            path = prefix + name
            if is_image_path(path):
                paths.append(path)
            elif not is_hidden(path):
                others.append(path)
    archives = _how_to_read(root, others)
    if not paths:
        hint = f"; {archives}" if archives else ""
        raise ValueError(f"no images in folder {root}; expected files such as {', '.join(SUFFIXES[:4])}{hint}")
    if archives:
        tell_once(f"archives in {root} are not read beside its images: {archives}")
    table = next((path for path in others if path.rpartition("/")[2].lower() in _TABLES), None)
    if table is not None:
        tell_once(f"{root / table} is not read: the classes of images are their folders")
    entries = arrange(paths)
    labels, classes = label_entries([entry.class_name for entry in entries])
    names = [entry.path for entry in entries]
    return Listing(
        PackedNames.pack(names),
        PackedNames.pack(split_keys(names)),
        labels,
        classes,
        [entry.part for entry in entries],
        folders,
        left_out=count_unread(others, _UNREAD_SUFFIXES),  # there was a line about archives
    )


def _how_to_read(root: Path, paths: Sequence[str]) -> str:
    """How the first kind of archive among these files is given as data; empty if there is none."""
    for suffix, pattern in _ARCHIVES.items():
        inside = next((path for path in paths if path.lower().endswith(suffix)), None)
        if inside is not None:
            return f"'{pattern.format(root / inside.rpartition('/')[0])}' reads the {suffix} files in it"
    return ""


def walk_folders(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Each folder from `root` down that is not hidden, as a prefix of relative paths, and the names of its files.

    Links to folders are followed; one that leads to a folder it lies in is left out, since it would never end.
    """
    # A list of folders rather than recursion, which deep trees would exhaust.
    left = [("", os.path.realpath(root), 0)]
    while left:
        prefix, here, num_links = left.pop()
        try:
            with os.scandir(root / prefix) as scanned:
                entries = list(scanned)
        except OSError as error:
            folder = root / prefix
            raise ValueError(f"cannot list {folder} ({error.strerror}): give access to it, or move it away") from None
        files = []
        for entry in entries:
            path = prefix + entry.name
            if not _is_folder(entry):
                files.append(entry.name)
            elif entry.name.startswith("."):
                continue
            elif not entry.is_symlink():
                left.append((f"{path}/", os.path.join(here, entry.name), num_links))
            elif num_links >= _MAX_LINKS:
                raise ValueError(f"the folders of {root} are linked in a circle: remove the link {path}")
            elif not f"{here}/".startswith(os.path.realpath(entry.path) + "/"):
                left.append((f"{path}/", os.path.realpath(entry.path), num_links + 1))
        yield prefix, files


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
