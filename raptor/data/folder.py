"""Image folders, and what the paths of images say: the split and the class of each."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from raptor.data.classes import number_names
from raptor.data.index import FileImages, indexed, listed, tell_once
from raptor.data.split import TRAIN_NAMES, VAL_NAMES, is_split_name, split_keys

SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm", ".jp2", ".avif"),
    *(".jfif", ".jpe", ".pbm", ".pnm"),
)
_ARCHIVES = {".zip": "{}/*.zip", ".tar": "wds/{}/*.tar", ".parquet": "hf/{}"}
_UNREAD = (
    *(".heic", ".heif", ".jxl", ".psd", ".svg", ".eps", ".dng", ".cr2", ".nef", ".arw", ".tga", ".ico"),
    *(*_ARCHIVES, ".tgz", ".gz", ".bz2", ".xz", ".7z", ".rar"),
)
"""Files that hold images and are not read: they are counted, because their owner believes that they are in the data."""
_TABLES = ("metadata.csv", "labels.csv", "metadata.jsonl", "train.csv")
_MAX_LINKS = 8  # links to folders on the way to a file


def is_hidden(path: str) -> bool:
    """Whether a relative path is of a hidden file, or of a resource fork as macOS packs them."""
    return path.startswith(".") or "/." in path or "__MACOSX" in path.split("/")


def is_image_path(path: str) -> bool:
    """Whether a relative path looks like an image that can be read."""
    return path.lower().endswith(SUFFIXES) and not is_hidden(path)


def count_unread(path: str, left_out: Counter[str]) -> None:
    """Count a file that holds images and is not read: of an unknown format, or an archive in an archive."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix in _UNREAD and not is_hidden(path):
        left_out[suffix] += 1


def no_images(place: str, expected: str, left_out: Mapping[str, int], hint: str = "") -> ValueError:
    """The error for a folder or an archive without an image that can be read; it says what else is there."""
    found = ""
    if left_out:
        found = f" and found {listed(left_out)}"
    return ValueError(f"no images in {place}; expected {expected}{found}{hint}")


def arrange(paths: Sequence[str], left_out: Counter[str]) -> list[tuple[str, str | None, str | None]]:
    """Read splits and classes off relative paths, `train/<class>/x`, `<class>/x` or a flat `x`: (path, split, class).

    A single folder around the split or class folders is looked through. A class may be called `train`: folders are
    splits only if all of them are, or if a training and a validation folder are both there. Others are then added to
    `left_out`.
    """
    # Sorted by whole paths, so that a folder, its zip and its parts joined have one order.
    paths = sorted(paths)
    tails = [path.split("/") for path in paths]
    tops = _tops(tails)
    while len(tops) == 1 and tops != {""} and not _are_splits(tops):  # one folder around the others, as in many zips
        inner = [tail[1:] for tail in tails]
        inner_tops = _tops(inner)
        if "" in inner_tops and not _are_splits(inner_tops):  # it holds the images itself: a class
            break
        tails = inner
        tops = inner_tops
    has_splits = _are_splits(tops)
    entries = []
    for path, tail in zip(paths, tails):
        folders = tail[:-1]
        part = None
        if has_splits:
            # Images beside the folders of splits: to train on them would be a guess.
            if not folders or not is_split_name(folders[0]):
                left_out["images beside the folders of splits"] += 1
                continue
            part = folders.pop(0).lower()
        class_name = None
        if folders:
            class_name = folders[0]
        entries.append((path, part, class_name))
    return entries


def _tops(tails: list[list[str]]) -> set[str]:
    """The outermost folders, the empty name for files outside any."""
    return {tail[0] if len(tail) > 1 else "" for tail in tails}


def _are_splits(tops: set[str]) -> bool:
    """Whether the outermost folders are splits."""
    lower = {top.lower() for top in tops}
    has_both = bool(lower & set(TRAIN_NAMES) and lower & set(VAL_NAMES))
    return has_both or (bool(lower) and all(map(is_split_name, lower)))


def open_folder(root: str | Path) -> FileImages:
    """A folder of image files in the ImageFolder layout, with or without split folders, or flat."""
    return indexed("folder", str(root), [str(root)], lambda: _list_folder(Path(root)))


def _list_folder(root: Path) -> FileImages:
    folders = []
    paths = []
    others = []
    left_out: Counter[str] = Counter()
    for prefix, files in walk_folders(root):
        folders.append(str(root / prefix))
        for name in files:
            # Joined as text: a Path for each file would make the listing of a million slow.
            path = prefix + name
            if is_image_path(path):
                paths.append(path)
            else:
                others.append(path)
                count_unread(path, left_out)
    if not paths:
        hint = ""
        for path in others:
            suffix = os.path.splitext(path)[1].lower()
            if suffix in _ARCHIVES and not is_hidden(path):
                pattern = _ARCHIVES[suffix].format(root / os.path.dirname(path))
                hint = f"; '{pattern}' reads the {suffix} files in it"
                break
        raise no_images(f"folder {root}", f"files such as {', '.join(SUFFIXES[:4])}", left_out, hint)
    for path in others:
        if os.path.basename(path).lower() in _TABLES:
            tell_once(f"{root / path} is not read: the classes of images are their folders")
            break
    names, parts, class_names = zip(*arrange(paths, left_out))
    labels, classes = number_names(class_names)
    return FileImages(str(root), [str(root)], names, split_keys(names), labels, classes, parts, folders, left_out)


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
                entries = list(scanned)  # with their kinds, so that nothing has to be asked of each file
        except OSError as error:
            folder = root / prefix
            raise ValueError(f"cannot list {folder} ({error.strerror}): give access to it, or move it away") from None
        files = []
        for entry in entries:
            path = prefix + entry.name
            try:
                is_folder = entry.is_dir()
            except OSError:  # a link to itself
                is_folder = False
            if not is_folder:
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
