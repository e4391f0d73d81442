"""Images by name: `open_data("folder")`, `scenes`, `cifar10`, `hf/NAME:split`, `wds/PATTERN`, zip archives."""

from __future__ import annotations

import difflib
from pathlib import Path

from raptor.data.folder import BadImage, FolderImages, ImageData
from raptor.data.memory import InMemory
from raptor.data.preprocess import Preprocess
from raptor.data.split import Split, choose_split
from raptor.data.stream import Batch, ImageStream, TrainStream, iterate, load_uint8

__all__ = [
    "BadImage",
    "Batch",
    "ImageData",
    "ImageStream",
    "InMemory",
    "Preprocess",
    "TrainStream",
    "iterate",
    "load_uint8",
    "open_data",
]

ACCEPTED = "a folder, a .zip, scenes, cifar10[:PATH], cifar100[:PATH], imagenet:PATH, hf/NAME[:SPLIT] or wds/PATTERN"


def open_data(
    spec: str,
    split: Split = "train",
    *,
    limit: int | None = None,
    size: int | None = None,
    skip_bad: bool = False,
    root: str | None = None,
    download: bool = False,
) -> ImageData:
    """Open images by name.

    Args:
        spec: a folder (`train/<class>/x.jpg`, `<class>/x.jpg` or flat), `scenes`, `cifar10[:PATH]`, `cifar100[:PATH]`,
            `imagenet:PATH` (also with a flat validation folder and the devkit's list), `hf/NAME[:SPLIT]`,
            `wds/PATTERN` (tar shards, `wds/shard-{0000..0009}.tar`), or zip archives of a folder (several joined by
            commas, or a glob).
        split: `train`, `val` (the data's own validation split, else 5 % by a hash of the file name) or `all`.
        limit: at most so many images: a fixed sample spread over the data.
        size: the side at which scenes are drawn; other data keep their own.
        skip_bad: leave out unreadable images and name them in `.bad`, where otherwise they stop the run.
        root: where relative paths start and where CIFAR is looked for and stored.
        download: fetch CIFAR if it is not there.
    """
    if spec == "scenes":
        from raptor.data.scenes.data import DrawnScenes

        data: ImageData = DrawnScenes(split, size)
    else:
        data = _open_reader(spec, root, download)
        data = data.select(choose_split(data.names, data.parts, split, data.name))
    if limit is not None:
        data = data.select(data.sample(limit))
    data.skip_bad = skip_bad
    return data


def _open_reader(spec: str, root: str | None, download: bool) -> ImageData:
    kind, _, path = spec.partition(":")
    if kind in ("cifar10", "cifar100"):
        from raptor.data.cifar import CifarImages

        return CifarImages(kind, path or None, root=root, download=download)
    if kind == "imagenet" and path:
        from raptor.data.imagenet import ImageNetImages

        return ImageNetImages(_below(root, path))
    if spec.startswith("hf/") and len(spec) > 3:
        from raptor.data.hub import HubImages

        return HubImages(spec[3:])
    if spec.startswith("wds/") or spec.lower().endswith(".tar"):
        from raptor.data.archives import TarImages

        return TarImages(_below(root, spec.removeprefix("wds/")))
    if spec.lower().endswith((".zip", ".zip}")):
        from raptor.data.archives import ZipImages

        return ZipImages(",".join(_below(root, piece.strip()) for piece in _zip_pieces(spec)))
    folder = Path(_below(root, spec)).expanduser()
    if spec and folder.is_dir():
        return FolderImages(folder)
    raise ValueError(f"unknown data {spec!r}{_did_you_mean(spec, folder)}; give {ACCEPTED}")


def _zip_pieces(spec: str) -> list[str]:
    from raptor.data.archives import split_commas

    return split_commas(spec)


def _below(root: str | None, path: str) -> str:
    """A relative path, from `root` if one is given."""
    return path if root is None else str(Path(root) / Path(path).expanduser())


def _did_you_mean(spec: str, folder: Path) -> str:
    named = {name: name for name in ("scenes", "cifar10", "cifar100")}
    if folder.parent.is_dir():
        named |= {str(path): str(path) for path in sorted(folder.parent.iterdir())[:1000]}
    for prefix in ("hf", "wds"):
        head, mark, tail = spec.replace(":", "/", 1).partition("/")
        if mark and tail and head.lower() in (prefix, {"hf": "huggingface", "wds": "webdataset"}[prefix]):
            return f", did you mean {prefix}/{tail}?"
    heads = difflib.get_close_matches(spec.partition(":")[0].lower().replace("-", ""), list(named)[:3], 1, 0.7)
    near = heads or difflib.get_close_matches(str(folder), list(named), 1, 0.8)
    return f", did you mean {named[near[0]]}?" if near else ""
