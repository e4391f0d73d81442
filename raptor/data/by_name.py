"""Open data by name: which reader a name means. `open_data` for images, `open_dense` for a target at every pixel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from raptor.checks import data_name
from raptor.data.archives import list_files, open_tars, open_zips
from raptor.data.dense import DENSE_TASKS, DenseData
from raptor.data.folder import open_folder
from raptor.data.given import given_images
from raptor.data.hub import open_hub
from raptor.data.images import ImageData
from raptor.data.index import tell_once
from raptor.data.memory import JoinedImages
from raptor.data.split import Split, choose_split, is_train, part_read

NAMED = ("scenes", "cifar10", "cifar100")
"""Data that is not a path."""
_TASKS = {"ade20k": "segment", "nyuv2": "depth"}  # that each set has targets for, whatever its layout
DENSE_KINDS = ("scenes", *_TASKS)
_ACCEPTED = "a folder, a .zip, scenes, cifar10[:PATH], cifar100[:PATH], imagenet:PATH, hf/NAME[:SPLIT] or wds/PATTERN"


def as_spec(given: Any) -> Any:
    """Data as commands and `open_data` take it: a name, several names, or what a program holds as `ImageData`."""
    if isinstance(given, str) and given.strip() == "[]":  # an empty list, as YAML and JSON write it
        given = []
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, Path):
        return str(given)
    if isinstance(given, list | tuple) and any(isinstance(one, ImageData) for one in given):
        return given  # opened sets, such as the pair that a training takes
    images = given_images(given)
    if images is not None:
        return images
    # A list of one is the name itself: results name the data by it.
    names = list(map(str, given))
    if not names:
        raise ValueError(f"no data is given: name {_ACCEPTED}")
    if len(names) == 1:
        return names[0]
    return names


def spec_text(spec: str | Sequence[str] | ImageData) -> str:
    """The name of data, or of several sets that are joined."""
    if isinstance(spec, ImageData):
        return spec.name
    if isinstance(spec, str):
        return spec
    return " ".join(spec)


def recorded_spec(spec: Any) -> Any:
    """Data as a run's config records it: what a program holds by its name."""
    if isinstance(spec, ImageData):
        return as_spec(spec.specs)
    if isinstance(spec, list | tuple):
        return [recorded_spec(one) for one in spec]
    return spec


def places_of(spec: str | Sequence[str] | ImageData) -> set[str]:
    """The files and folders that data is read from: `photos/`, `./photos` and a link to it are one place.

    Images that a program holds have none, and are known by their fingerprint.
    """
    if isinstance(spec, ImageData):
        return {f"{spec.name} {spec.fingerprint()}"}
    if not isinstance(spec, str):
        return set().union(*map(places_of, spec))
    # What stands before the path: `nyuv2:`, or `hf/` and the part; a folder's own name may have a colon.
    kind = ""
    path = spec.removeprefix("wds/")
    if spec in NAMED:
        kind = spec
        path = ""
    elif spec.startswith("hf/"):
        path, colon, part = spec.removeprefix("hf/").partition(":")
        kind = f"hf/{colon}{part}"
    elif path == spec and ":" in spec and not os.path.exists(spec):
        kind, _, path = spec.partition(":")
    files = [path]
    if path.lower().endswith((".zip", ".tar")):
        with suppress(ValueError):  # a missing file is reported when it is opened
            files = list_files(path)
    places = set()
    for file in files:
        real = os.path.realpath(os.path.expanduser(file))
        places.add(kind + real if os.path.exists(real) else spec)
    return places


def open_data(
    spec: Any,
    split: Split = "train",
    *,
    limit: int | None = None,
    size: int | None = None,
    skip_bad: bool = False,
) -> ImageData:
    """Open images by name.

    Args:
        spec: a folder (`train/<class>/x.jpg`, `<class>/x.jpg` or flat), `scenes`, `cifar10[:PATH]`, `cifar100[:PATH]`,
            `imagenet:PATH` (also with a flat validation folder and the devkit's list), `hf/NAME[:SPLIT]`,
            `wds/PATTERN` (tar shards, `wds/shard-{0000..0009}.tar`), or zip archives of a folder (several joined by
            commas, or a glob). Several specs are joined, with labels if all have the same classes; one that is given
            twice is drawn twice as often to train on, and judged once. nyuv2:PATH and ade20k:PATH give their images.
            Also a list of image files or pictures, a tensor, an array, a torch Dataset or a DataLoader (in its
            Dataset's own order).
        split: `train`, `val` (the data's own validation split, else 5 % by a hash of the file name) or `all`.
        limit: at most this many images: a fixed sample spread over the data.
        size: the side at which scenes are drawn; other data keep their own.
        skip_bad: leave out unreadable images and name them in `.bad`; otherwise they stop the run.
    """
    spec = as_spec([] if spec is None else spec)
    names = list(spec) if isinstance(spec, list | tuple) else [spec]
    if split != "train" and len(names) > 1:
        # Counted twice, its images would make every interval too narrow.
        by_place: dict[frozenset[str], Any] = {}
        for name in names:
            by_place.setdefault(frozenset(places_of(name)), name)
        names = list(by_place.values())
    # A set that is joined with itself is one object, and so is decoded once.
    readers = {name: name if isinstance(name, ImageData) else _open_reader(name, size) for name in names}
    can_train = {any(map(is_train, reader.parts)) for reader in readers.values()}
    pattern = _as_pattern(names)
    if len(can_train) == 2 and pattern is not None:
        # Archives to train on beside others with a validation part only are one set, as if a pattern had named them.
        names = [pattern]
        readers = {pattern: _open_reader(pattern, size)}
    opened = {name: _part_of(reader, split) for name, reader in readers.items()}
    data = opened[names[0]]
    if len(names) > 1:
        data = JoinedImages(list(map(opened.__getitem__, names)))
    if limit is not None:  # of all sets together, after they are joined
        data = data.select(data.sample(limit))
    data.skip_bad = skip_bad
    return data


def _as_pattern(names: Sequence[Any]) -> str | None:
    """Archives of one kind as one pattern; None for other data."""
    if not all(isinstance(name, str) for name in names):
        return None
    if all(name.lower().endswith(".zip") for name in names):
        return ",".join(names)
    if all(name.startswith("wds/") or name.lower().endswith(".tar") for name in names):
        return "wds/" + ",".join(name.removeprefix("wds/") for name in names)
    return None


def _part_of(whole: ImageData, split: Split) -> ImageData:
    """One split of a set."""
    outside = f"outside the part `{part_read(split, whole.parts)}`"
    chosen = whole.select(choose_split(whole.keys, whole.parts, split, whole.name), outside)
    if whole.labels is not None and chosen.labels is None:
        num_missing = sum(label < 0 for label in whole.labels)
        tell_once(f"the labels of {whole.name} ({split}) are not used: {num_missing:,} of its images have none")
    return chosen


def _open_reader(spec: str, size: int | None) -> ImageData:
    """All images of the data of one name. Readers that need further packages are imported only for their data."""
    kind, _, path = spec.partition(":")
    if spec == "scenes":
        from raptor.data.scenes.drawn import DrawnScenes

        return DrawnScenes(size)
    if kind in ("cifar10", "cifar100"):
        from raptor.data.cifar import open_cifar

        return open_cifar(kind, path or None)
    if kind == "imagenet" and path:
        from raptor.data.imagenet import open_imagenet

        return open_imagenet(path)
    if kind in _TASKS and path:
        frames = _open_frames(spec, _TASKS[kind], size)
        frames.has_targets = False
        return frames.with_labels(None, None)  # its classes are those of pixels
    if spec.startswith("hf/") and len(spec) > 3:
        return open_hub(spec[3:])
    if spec.startswith("wds/") or spec.lower().endswith(".tar"):
        return open_tars(spec.removeprefix("wds/"))
    if spec.lower().endswith(".zip"):
        return open_zips(spec)
    folder = Path(spec).expanduser()
    if spec and folder.is_dir():
        return open_folder(folder)
    if folder.is_file():
        raise ValueError(f"the file {spec} is not a set of images: give its folder, unpack a compressed archive first")
    data_name(spec)  # says what a misspelt word may stand for
    raise ValueError(f"unknown data {spec!r}: give {_ACCEPTED}")


def open_dense(
    spec: str, split: Split = "train", task: str = "segment", *, limit: int | None = None, size: int | None = None
) -> DenseData:
    """Open images with masks (`task="segment"`) or depths (`task="depth"`) by name.

    Args:
        spec: `scenes`; `ade20k:PATH` (the folder or zip of ADEChallengeData2016); `nyuv2:PATH` (the labelled .mat with
            splits.mat beside it, or train/rgb, train/depth, train/label40 in a folder or in zips).
        split: `train`, `val` (the data's own validation or test split, else 5 % by a hash of the name) or `all`.
        limit: at most this many images: a fixed sample spread over the data.
        size: the side at which scenes are drawn; other data keep their own.
    """
    if task not in DENSE_TASKS:
        raise ValueError(f"unknown dense task {task!r}; use {' or '.join(DENSE_TASKS)}")
    data = _open_frames(spec, task, size)
    data = data.select(choose_split(data.keys, data.parts, split, data.name))
    if limit is not None:
        data = data.select(data.sample(limit))
    return data


def _open_frames(spec: str, task: str, size: int | None) -> DenseData:
    """All images of the data of one name, with their targets."""
    kind, _, path = spec.partition(":")
    if spec == "scenes":
        from raptor.data.scenes.drawn import SceneFrames

        return SceneFrames(task, size)
    if kind == "ade20k" and path:
        from raptor.data.ade20k import open_ade20k

        return open_ade20k(path, task)
    if kind == "nyuv2" and path:
        from raptor.data.nyuv2 import open_nyuv2

        return open_nyuv2(path, task)
    raise ValueError(f"unknown dense data {spec!r}: give scenes, ade20k:PATH or nyuv2:PATH")
