"""Open data by name: which reader a name means. `open_data` for images, `open_dense` for a target at every pixel."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from raptor.data.archives import TarImages, ZipImages, split_commas
from raptor.data.dense import DENSE_TASKS, DenseData
from raptor.data.folder import FolderImages
from raptor.data.images import ImageData, JoinedImages
from raptor.data.split import Split, choose_sample, choose_split

NAMED = ("scenes", "cifar10", "cifar100")
"""Data that is no path."""
DENSE_KINDS = ("scenes", "ade20k", "nyuv2")
_ACCEPTED = "a folder, a .zip, scenes, cifar10[:PATH], cifar100[:PATH], imagenet:PATH, hf/NAME[:SPLIT] or wds/PATTERN"


def as_spec(given: Any) -> Any:
    """Data as a terminal gives it: text instead of paths, and the word itself in place of a list of one."""
    if isinstance(given, list) and len(given) == 1:
        given = given[0]
    return str(given) if isinstance(given, Path) else given


def check_spec(spec: object) -> None:
    """Raise unless `spec` is a name or a list of names; a data set of torch's would be read as a list without end."""
    if isinstance(spec, str) or (isinstance(spec, list | tuple) and all(isinstance(one, str) for one in spec)):
        return
    raise ValueError(
        f"data must be a name, a folder or a list of them, got {type(spec).__name__}: write its images to a folder, or "
        "give each batch of a DataLoader to vit.record"
    )


def spec_text(spec: str | Sequence[str]) -> str:
    """The name of data, or of several sets that are joined."""
    return spec if isinstance(spec, str) else " ".join(spec)


def open_data(
    spec: str | Sequence[str],
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
            commas, or a glob). Several specs are joined, with labels where all have the same classes; one that is given
            twice is drawn twice as often and opened once. nyuv2:PATH and ade20k:PATH give their images.
        split: `train`, `val` (the data's own validation split, else 5 % by a hash of the file name) or `all`.
        limit: at most this many images: a fixed sample spread over the data.
        size: the side at which scenes are drawn; other data keep their own.
        skip_bad: leave out unreadable images and name them in `.bad`; otherwise they stop the run.
        root: where relative paths start and where CIFAR is looked for and stored.
        download: fetch CIFAR if it is not there.
    """
    spec = as_spec(spec)
    check_spec(spec)
    if not isinstance(spec, str) and len(spec) != 1:
        options: dict[str, Any] = dict(size=size, root=root, download=download)
        opened = {one: open_data(one, split, **options) for one in dict.fromkeys(spec)}
        joined = JoinedImages([opened[one] for one in spec])
        chosen = joined if limit is None else joined.select(joined.sample(limit))
        chosen.skip_bad = skip_bad
        return chosen
    spec = spec if isinstance(spec, str) else spec[0]
    if spec == "scenes":
        from raptor.data.scenes.drawn import DrawnScenes

        data: ImageData = DrawnScenes(split, size)
    else:
        data = _open_reader(spec, root, download)
        data = data.select(choose_split(data.keys, data.parts, split, data.name))
    if limit is not None:
        data = data.select(data.sample(limit))
    data.skip_bad = skip_bad
    return data


class _FrameImages(ImageData):
    """The images of dense data, without labels."""

    has_frames = True

    def __init__(self, frames: DenseData) -> None:
        super().__init__(frames.name, list(frames.names), parts=frames.parts, keys=list(frames.keys))
        self.frames = frames

    def num_bytes(self, position: int) -> int:
        return self.frames.num_bytes(position)

    def content(self, position: int) -> bytes:
        return self.frames.content(position)

    def stamp(self, position: int, earlier: bool = False) -> int:
        """The size of the image's own file; targets do not matter."""
        return 0 if earlier else self.num_bytes(position) or self.frames.stamp(position)

    def read(self, position: int) -> Image.Image:
        return self.frames.read(position)[0]


def _open_reader(spec: str, root: str | None, download: bool) -> ImageData:
    kind, _, path = spec.partition(":")
    if kind in ("cifar10", "cifar100"):
        from raptor.data.cifar import CifarImages

        return CifarImages(kind, path or None, root=root, download=download)
    if kind == "imagenet" and path:
        from raptor.data.imagenet import ImageNetImages

        return ImageNetImages(_below(root, path))
    if kind in ("nyuv2", "ade20k") and path:
        return _FrameImages(_open_dense_reader(spec, "depth" if kind == "nyuv2" else "segment"))
    if spec.startswith("hf/") and len(spec) > 3:
        from raptor.data.hub import HubImages

        return HubImages(spec[3:])
    if spec.startswith("wds/") or spec.lower().endswith(".tar"):
        return TarImages(_below(root, spec.removeprefix("wds/")))
    if spec.lower().endswith((".zip", ".zip}")):
        return ZipImages(",".join(_below(root, piece.strip()) for piece in split_commas(spec)))
    folder = Path(_below(root, spec)).expanduser()
    if spec and folder.is_dir():
        return FolderImages(folder)
    raise ValueError(f"unknown data {spec!r}{_did_you_mean(spec, folder)}; give {_ACCEPTED}")


def _below(root: str | None, path: str) -> str:
    """A relative path, from `root` if one is given."""
    return path if root is None else str(Path(root) / Path(path).expanduser())


def _did_you_mean(spec: str, folder: Path) -> str:
    if spec in ("nyuv2", "ade20k", "imagenet"):
        return f", write {spec}:PATH"
    named = {name: name for name in NAMED}
    if folder.parent.is_dir():
        named |= {str(path): str(path) for path in sorted(folder.parent.iterdir())[:1000]}
    for prefix in ("hf", "wds"):
        head, mark, tail = spec.replace(":", "/", 1).partition("/")
        if mark and tail and head.lower() in (prefix, {"hf": "huggingface", "wds": "webdataset"}[prefix]):
            return f", did you mean {prefix}/{tail}?"
    heads = difflib.get_close_matches(spec.partition(":")[0].lower().replace("-", ""), list(named)[:3], 1, 0.7)
    near = heads or difflib.get_close_matches(str(folder), list(named), 1, 0.8)
    return f", did you mean {named[near[0]]}?" if near else ""


def open_dense(
    spec: str, split: Split = "train", task: str = "segment", *, limit: int | None = None, size: int | None = None
) -> DenseData:
    """Open images with masks (`task="segment"`) or depths (`task="depth"`) by name.

    Args:
        spec: `scenes`; `ade20k:PATH` (the folder or zip of ADEChallengeData2016); `nyuv2:PATH` (the labelled .mat with
            splits.mat beside it, the folder or zip with nyu2_train.csv, or train/rgb, train/depth, train/label40 in a
            folder or in zips).
        split: `train`, `val` (the data's own validation or test split, else 5 % by a hash of the name) or `all`.
        limit: at most this many images: a fixed sample spread over the data.
        size: the side at which scenes are drawn; other data keep their own.
    """
    if task not in DENSE_TASKS:
        raise ValueError(f"unknown dense task {task!r}; use {' or '.join(DENSE_TASKS)}")
    if spec == "scenes":
        from raptor.data.scenes.drawn import SceneFrames

        data: DenseData = SceneFrames(split, task, size)
        return data if limit is None else data.select(range(min(limit, len(data))))
    data = _open_dense_reader(spec, task)
    if split != "all":
        data = data.select(choose_split(data.keys, data.parts, split, data.name))
    return data if limit is None else data.select(choose_sample(data.keys, limit))


def _open_dense_reader(spec: str, task: str) -> DenseData:
    kind, _, path = spec.partition(":")
    if kind == "ade20k" and path:
        from raptor.data.ade20k import Ade20k

        return Ade20k(path, task)
    if kind == "nyuv2" and path:
        from raptor.data.nyuv2 import open_nyuv2

        return open_nyuv2(path, task)
    near = difflib.get_close_matches(kind.lower(), DENSE_KINDS, 1, 0.6)
    hint = f", did you mean {near[0]}{':PATH' if near[0] != 'scenes' else ''}?" if near else ""
    raise ValueError(f"unknown dense data {spec!r}{hint}; give scenes, ade20k:PATH or nyuv2:PATH")
