"""Which images a command reads: the set it fits on and the one it judges on, by default those of its run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raptor.data.by_name import NAMED, as_spec, check_spec, open_data, spec_text
from raptor.data.classes import for_head, head_names, renumbered
from raptor.data.images import NUM_SIZES, ImageData, Items
from raptor.data.split import is_train, own_validation
from raptor.run import RunError, read_config

DEFAULT_DATA = "scenes"
Described = dict[str, dict[str, Any]]
"""Number and fingerprint of images, by part: train and val."""
_NUM_COMPARED = 128  # judged images that are compared with those trained on
_MAX_READ = 2048  # training files that are read for it
_MAX_DECODED = 512  # training images that are no files, and so are decoded for it


def tell_of_scenes(model: Any) -> None:
    """Say that the images are the built-in scenes, where nobody chose them, unless the model was trained on those."""
    if not str(getattr(model, "name", model)).startswith(DEFAULT_DATA):
        print("the images are the built-in scenes, which are drawn: --data gives others", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class ChosenData:
    """`data` to train or fit on, `val` to judge on (else the held-out part of `data`), and which part of it is judged.

    Attributes:
        data, val: as `open_data` takes them.
        split: of what is judged: `val`, or another part. Of `val` data without a validation part, `val` is all of it.
        classes: of the model's head in its order, as `--classes` names them.
        names: the same as the model keeps them, where it does: a saved model, and a run made with `--classes`.
        num_classes: outputs of the head (the model's own, or one in a file), whose order labels then have; 0 leaves
            them as they are.
        run: the run that `data` and `val` are of, where they were not given: other images than its are refused.
    """

    data: str | Sequence[str]
    val: str | Sequence[str] | None = None
    split: str = "val"
    classes: Sequence[str] | None = None
    skip_bad: bool = False
    names: Sequence[str] | None = None
    num_classes: int = 0
    run: _RunImages | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for spec in (self.data, self.val):
            if spec is not None:
                check_spec(spec)

    @classmethod
    def of(
        cls, model: Any, options: Mapping[str, Any], names: Sequence[str] | None = None, num_classes: int = 0
    ) -> ChosenData:
        """What the options of a command choose; where they are silent, what the run of `model` was made with.

        names, num_classes: of the model's head, as in the attributes.
        """
        given = {key: as_spec(options.get(key)) for key in ("data", "val") if options.get(key) is not None}
        chosen: dict[str, Any] = {"data": DEFAULT_DATA}
        if "data" not in given:
            kept = _remembered(model, with_val="val" not in given)
            chosen |= kept
            if "data" not in kept and "val" not in given:
                tell_of_scenes(model)
        file = options.get("classes") if num_classes else None
        run = chosen.get("run")
        if run is not None and run.has_classes and num_classes and names is None and file is None:
            raise RunError(f"{run.folder} was made with --classes and does not keep these names: give --classes")
        return cls(
            **{**chosen, **given},
            split=options.get("split") or "val",
            classes=None if file is None else head_names(file, num_classes),
            skip_bad=bool(options.get("skip_bad")),
            names=names,
            num_classes=num_classes,
        )

    @property
    def name(self) -> str:
        """The data that is judged, for results and titles."""
        return spec_text(self.data if self.val is None else self.val)

    @property
    def _known(self) -> Sequence[str] | None:
        """The names of the head's classes, as far as they are known."""
        return self.names if self.classes is None else self.classes

    def training(self, limit: int | None = None, size: int | None = None, any_class: bool = False) -> ImageData:
        """The images to train or fit on.

        any_class: whether they may be of other classes than the head's, because nothing is fitted to their labels;
            those of such images are left out.
        """
        self.check_same(self.data, "train")
        found = open_data(self.data, "train", limit=limit, size=size, skip_bad=self.skip_bad)
        if not any_class or self._known is None or not self.num_classes or found.labels is None:
            return self._for_head(found)
        return renumbered(found, self._known) or found.without_labels()

    def trained_on(self, model: Any, size: int | None = None) -> ImageData | None:
        """The training images of the run that `model` names or lies in; None where it is of no run, or they are gone.

        Where they are gone, or its data holds other images by now, this is said.
        """
        if self.run is not None:  # they are the run's, and compared with what it remembers
            return self.training(None, size, any_class=True)
        try:
            kept = _remembered(model)
            of_run = ChosenData(**kept, names=self._known, num_classes=self.num_classes) if "data" in kept else None
            return None if of_run is None else of_run.training(None, size, any_class=True)
        except ValueError as error:
            why = str(error).rpartition(": ")[0] or error
            print(f"what {model} was trained on is not compared with: {why}", file=sys.stderr)
            return None

    @property
    def judged_split(self) -> str:
        """The part to judge on: of other data than is trained on its own validation part, or else all of it."""
        is_other = self.val is not None and not _places(self.val) & _places(self.data)
        return "own" if is_other and self.split == "val" else self.split

    def judged(
        self,
        limit: int | None = None,
        size: int | None = None,
        like: ImageData | None = None,
        also: ImageData | None = None,
    ) -> ImageData:
        """The images to judge on.

        like: training images, whose numbers the classes get; without labels where a class is not among theirs. Most of
            the judged images may not be among them.
        also: further training images that most may not be among.
        """
        spec, split = self.data if self.val is None else self.val, self.judged_split
        self.check_same(spec, self.split)
        found = open_data(spec, split, limit=limit, size=size, skip_bad=self.skip_bad)
        if split not in ("train", "all"):
            for train in _without_parts([data for data in (like, also) if data is not None]):
                check_apart(train, found)
        found = self._for_head(found)
        return found if like is None else labelled_like(found, like)

    def check_same(self, spec: str | Sequence[str], split: str) -> None:
        """Raise where this is the data of a run and holds other images than the run was made with."""
        if self.run is not None:
            self.run.check(spec, split)

    def labelled(self, train: ImageData, judged: ImageData, size: int | None = None) -> ImageData:
        """The images that heads are fitted on: `train` or, where it has no labels, the training part of `val`.

        Only of a `val` that has a validation part too: of any other all images are judged.
        """
        if train.labels is not None or judged.labels is None or self.val is None:
            return train
        whole = open_data(self.val, "all", size=size, skip_bad=self.skip_bad)
        rows = [i for i, part in enumerate(whole.parts) if part is not None and is_train(part)]
        if not rows or own_validation(whole.parts) is None:
            return train
        found = self._for_head(whole.select(rows))
        if found.classes == judged.classes:
            return found
        return renumbered(found, judged.classes or []) or train

    def _for_head(self, data: ImageData) -> ImageData:
        return for_head(data, self.num_classes, self.classes, self.names)


@dataclass
class _RunImages:
    """The data of the run in `folder`, and what it remembers of its images (see `describe_images`).

    The data is kept as it was typed, so that from another folder the same words may name other images.
    """

    folder: Path
    data: str | Sequence[str]
    val: str | Sequence[str] | None
    split: str
    images: dict[str, Any]
    has_classes: bool

    def check(self, spec: str | Sequence[str], split: str) -> None:
        """Raise where the part of `spec` that is read is the run's and holds other images by now."""
        if self.val is None:
            parts = {"train": ["train"], "all": ["train", "val"]}.get(split, ["val"])
        else:
            parts = ["train" if spec == self.data else "val"]
        for part in parts if spec in (self.data, self.val) else ():
            if not self._is_same(part):
                option = "--data" if spec == self.data else "--val"
                raise RunError(
                    f"{spec_text(spec)} holds other images than those {self.folder} was made with: give {option}, or "
                    "run this in the folder where the run was made"
                )

    def _is_same(self, part: str) -> bool:
        """Whether the run's images are there; labels and sizes do not matter. Runs of earlier versions do not know."""
        try:
            num_images, saved = int(self.images[part]["num_images"]), str(self.images[part]["fingerprint"])
        except (KeyError, TypeError, ValueError, OverflowError):
            return True
        own = ChosenData(self.data, self.val, self.split)
        found = own.training(num_images) if part == "train" else own.judged(num_images)
        if len(found) != num_images or not found.has_fingerprint(saved):
            return False
        del self.images[part]  # once is enough
        return True


def labelled_like(judged: ImageData, train: ImageData) -> ImageData:
    """`judged` with the numbers that its classes have in `train`; without labels where one is not among them."""
    if train.classes is None or judged.classes in (None, train.classes):
        return judged
    same = renumbered(judged, train.classes)
    if same is None:
        print(
            f"the labels of {judged.name} are not used: they are not of the classes of {train.name} "
            f"({', '.join(train.classes[:3])}{', …' if train.classes[3:] else ''})",
            file=sys.stderr,
        )
    return same or judged.without_labels()


def tell_of_new_classes(train: ImageData, judged: ImageData) -> None:
    """Say which classes only the held-out images have: a probe is never right about a class that it has not seen."""
    if train.labels is None or judged.labels is None:
        return
    known = {(train.classes or ())[label] for label in train.present()}
    names = [(judged.classes or ())[label] for label in sorted(judged.present())]
    new = [name for name in names if name not in known]
    if new and len(known) > 1:  # a probe of one class is refused
        listed = ", ".join(new[:3]) + (f" and {len(new) - 3} more" if new[3:] else "")
        print(f"no training image is of class {listed}: a probe is wrong about those held-out images", file=sys.stderr)


def describe_images(train: Items, val: Items) -> Described:
    """What a run remembers of its images, to notice when they change."""
    return {"train": _describe(train), "val": _describe(val)}


def _describe(data: Items) -> dict[str, Any]:
    found, earlier = {"num_images": len(data), "fingerprint": data.fingerprint()}, data.earlier_fingerprint()
    return found if earlier is None else {**found, "earlier_fingerprint": earlier}


def _is_same(saved: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether these images were remembered, by this version or an earlier one."""
    known = (found["fingerprint"], found.get("earlier_fingerprint"))
    return saved["num_images"] == found["num_images"] and saved["fingerprint"] in known


def as_remembered(saved: object, found: Described) -> Described:
    """`found`, each part of it as `saved`, which the config of a run holds, describes it where the images are these."""
    kept = dict(found)
    for part, new in found.items():
        old = saved.get(part) if isinstance(saved, dict) else None
        if isinstance(old, dict) and {"num_images", "fingerprint"} <= old.keys() and _is_same(old, new):
            kept[part] = old
    return kept


def changed_images(saved: Described, found: Described) -> list[str]:
    """The parts of what was remembered that differ from what is found, each as `train: 96 (0a1b2c3d) -> 97 (…)`."""
    return [
        f"{part}: {_count_text(old)} -> {_count_text(found[part])}"
        for part, old in saved.items()
        if part in found and not _is_same(old, found[part])
    ]


def _count_text(of: dict[str, Any]) -> str:
    return f"{of['num_images']} ({of['fingerprint'][:8]})"


def _without_parts(sets: list[ImageData]) -> list[ImageData]:
    """Sets of training images without those of which a larger one holds all images."""
    kept: list[ImageData] = []
    for data in sorted(sets, key=len, reverse=True):
        if not any(_places(data.specs) <= _places(larger.specs) for larger in kept):
            kept.append(data)
    return kept


def check_apart(train: ImageData, judged: ImageData) -> None:
    """Raise where half of the judged images, or more, are among those trained on; where fewer are, say so.

    Those of a sample of the judged images are looked for: files byte for byte, of more than 10,000 training files in a
    sample and among those of the same names; images that are no files by their pixels, in a sample too, or by their
    names where both are of the same set. Files and what is no file are not compared, which is said.
    """
    rows = [(i, judged.file_size(i)) for i in judged.sample(_NUM_COMPARED)]
    files = _shared_files(train, judged, [row for row in rows if row[1]])
    has_files = any(size for _, size in rows)  # then one of no size may be empty or gone
    readable = [i for i, size in rows if size or judged.digest(i, pixels=has_files) is not None]
    others = _shared_pixels(train, judged, [i for i in readable if not judged.file_size(i)])
    pairs, num_looked_at = [*files[0], *others[0]], files[1] + others[1]
    if num_looked_at < len(readable):
        some = f"{len(readable) - num_looked_at} of {len(readable)} images" if num_looked_at else "the images"
        with_which = f"the training images of {train.name}"
        print(f"{some} of {judged.name} were not compared with {with_which}: only one side is files", file=sys.stderr)
    if not pairs:
        return
    pair = " and ".join(dict.fromkeys(pairs[0]))
    found = (
        f"{len(pairs)} of {num_looked_at} images of {judged.name} that were compared are also in the training images "
        f"of {train.name} (such as {pair})"
    )
    if 2 * len(pairs) >= len(readable):
        is_one_set = _places(judged.specs) <= _places(train.specs)
        own = "remove the copies, or judge on others with --val"
        other = "judge on others with --val, or leave it out for held-out ones"
        raise ValueError(f"{found}: {own if is_one_set else other}")
    print(found, file=sys.stderr)


_Pairs = list[tuple[str, str]]
"""Names of a judged image and of the training image that is the same."""


def _shared_files(train: ImageData, judged: ImageData, rows: list[tuple[int, int]]) -> tuple[_Pairs, int]:
    """Which of `rows` (image, bytes) of the judged files are training files, and how many were compared."""
    sizes, keys = {size for _, size in rows}, {judged.keys[i] for i, _ in rows}
    if not rows:
        return [], 0
    by_size = {i: train.file_size(i) for i in _looked_at(train, NUM_SIZES, keys)}
    if not any(by_size.values()):
        return [], 0
    alike = [i for i, size in by_size.items() if size in sizes]
    known = {train.digest(i): i for i in alike[:_MAX_READ]}
    return _pairs(train, judged, known, [(i, judged.digest(i)) for i, _ in rows]), len(rows)


def _pairs(
    train: ImageData, judged: ImageData, known: dict[bytes | None, int], found: list[tuple[int, bytes | None]]
) -> _Pairs:
    """Judged images and their digests, as far as a training image has the same one."""
    return [
        (judged.names[i], train.names[known[digest]]) for i, digest in found if digest is not None and digest in known
    ]


def _shared_pixels(train: ImageData, judged: ImageData, rows: list[int]) -> tuple[_Pairs, int]:
    """The same of judged images that are no files."""
    if not rows:
        return [], 0
    if set(judged.specs) <= set(train.specs):
        names = set(train.names)
        shown = [judged.names[i] for i in rows]
        same = [name for name in shown if name in names or f"{judged.name}: {name}" in names]
        return [(name, name) for name in same], len(rows)
    looked_at = _looked_at(train, _MAX_DECODED, {judged.keys[i] for i in rows})
    known = {train.digest(i, pixels=True): i for i in looked_at[: 2 * _MAX_DECODED] if not train.file_size(i)}
    known.pop(None, None)
    found = [(i, judged.digest(i, pixels=True)) for i in rows] if known else []
    return _pairs(train, judged, known, found), len(found)


def _looked_at(train: ImageData, limit: int, keys: set[str]) -> list[int]:
    """Training images that others are compared with: those with one of `keys`, then a sample of `limit`."""
    same = [i for i, key in enumerate(train.keys) if key in keys]
    return list(dict.fromkeys([*same, *train.sample(limit)]))


def _places(spec: str | Sequence[str]) -> set[str]:
    """Data as it was given, with paths as they really are: `photos/`, `./photos` and a link to it are one place."""
    places = set()
    for one in [spec] if isinstance(spec, str) else spec:
        kind, colon, path = one.rpartition(":")
        places.add(f"{kind}{colon}{os.path.realpath(os.path.expanduser(path))}" if "/" in path or not colon else one)
    return places


def _remembered(model: Any, with_val: bool = True) -> dict[str, Any]:
    """`data`, `val` and `run` of the run folder that `model` names or lies in; empty where it is of no run.

    with_val: whether the run's `val` is wanted; otherwise only its `data` has to be there.
    """
    if not isinstance(model, str | Path):
        return {}
    for folder in (Path(model).expanduser(), Path(model).expanduser().parent):
        if (folder / "config.yaml").is_file():
            config = read_config(folder)
            wanted = ("data", "val") if with_val else ("data",)
            kept = {key: config[key] for key in wanted if config.get(key) is not None}
            for path in (kept.get("data"), kept.get("val")):
                _check_there(path, folder)
            known = config.get("images")
            images = dict(known) if isinstance(known, dict) else {}
            if not with_val:
                images.pop("val", None)
            if "data" in kept:
                split, named = str(config.get("split") or "val"), config.get("classes") is not None
                kept["run"] = _RunImages(folder, kept["data"], kept.get("val"), split, images, named)
            return kept
    return {}


def _check_there(spec: Any, folder: Path) -> None:
    for path in [spec] if isinstance(spec, str) else spec or []:
        is_path = path not in NAMED and ":" not in path and not path.startswith(("hf/", "wds/")) and "," not in path
        if is_path and not any(letter in path for letter in "*{[") and not Path(path).expanduser().exists():
            raise RunError(f"{path}, the data of {folder}, is not there: give its new place with --data")
