"""Which images a command reads: the set it fits on and the one it judges on, by default those of its run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raptor.data.apart import check_apart
from raptor.data.archives import list_files
from raptor.data.by_name import NAMED, as_spec, open_data, spec_text
from raptor.data.classes import for_head, head_names, renumbered
from raptor.data.images import ImageData
from raptor.data.split import is_train, own_validation
from raptor.run import RunError, read_config

DEFAULT_DATA = "scenes"
Spec = str | Sequence[str] | ImageData
"""Data by one name or several, or opened."""


def tell_of_scenes(model: Any) -> None:
    """Say that the images are the built-in scenes if nobody chose them, unless the model was trained on those."""
    if not str(getattr(model, "name", model)).startswith(DEFAULT_DATA):
        print("the images are the built-in scenes, which are drawn: --data gives others", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class ChosenData:
    """`data` to train or fit on, `val` to judge on (else the held-out part of `data`), and which part of it is judged.

    Attributes:
        data, val: as `open_data` takes them.
        split: of what is judged: `val`, or another part. Of `val` data without a validation part, `val` is all of it.
        classes: of the model's head in its order, as `--classes` names them.
        names: the same as the model keeps them: a saved model, and a run made with `--classes`.
        num_classes: outputs of the head (the model's own, or one in a file), whose order labels then have; 0 leaves
            them as they are.
        run: the run that `data` and `val` are of, if they were not given: other images than its are refused.
    """

    data: Spec
    val: Spec | None = None
    split: str = "val"
    classes: Sequence[str] | None = None
    skip_bad: bool = False
    names: Sequence[str] | None = None
    num_classes: int = 0
    run: _RunImages | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", as_spec(self.data))
        if self.val is not None:
            object.__setattr__(self, "val", as_spec(self.val))

    @classmethod
    def of(
        cls, model: Any, options: Mapping[str, Any], names: Sequence[str] | None = None, num_classes: int = 0
    ) -> ChosenData:
        """What the options of a command choose; what they leave open is as the run of `model` was made.

        names, num_classes: of the model's head, as in the attributes.
        """
        given = {key: options[key] for key in ("data", "val") if options.get(key) is not None}
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
        return spec_text(self.judged_spec)

    @property
    def judged_spec(self) -> Spec:
        """The data that is judged."""
        return self.data if self.val is None else self.val

    @property
    def _known(self) -> Sequence[str] | None:
        """The names of the head's classes, as far as they are known."""
        return self.names if self.classes is None else self.classes

    def training(self, limit: int | None = None, size: int | None = None, any_class: bool = False) -> ImageData:
        """The images to train or fit on.

        any_class: whether they may be of other classes than the head's, because nothing is fitted to their labels;
            such images have no labels then.
        """
        self.check_same(self.data, "train")
        found = open_data(self.data, "train", limit=limit, size=size, skip_bad=self.skip_bad)
        if not any_class or self._known is None or not self.num_classes or found.labels is None:
            return self._for_head(found)
        return renumbered(found, self._known) or found.without_labels()

    def trained_on(self, model: Any, size: int | None = None) -> ImageData | None:
        """The training images of the run that `model` names or lies in; None if there is no run, or they are gone.

        If they are gone, or the run's data holds other images by now, this is said.
        """
        if self.run is not None:  # they are the run's, and compared with what it remembers
            return self.training(None, size, any_class=True)
        try:
            kept = _remembered(model)
            if "data" not in kept:
                return None
            of_run = ChosenData(**kept, names=self._known, num_classes=self.num_classes)
            return of_run.training(None, size, any_class=True)
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

        like: training images, whose numbers the classes get; without labels if a class is not among theirs. The judged
            images must not be among them, see `check_apart`.
        also: further training images that the judged ones must not be among.
        """
        self.check_same(self.judged_spec, self.split)
        found = open_data(self.judged_spec, self.judged_split, limit=limit, size=size, skip_bad=self.skip_bad)
        if self.judged_split not in ("train", "all"):
            for train in _largest([data for data in (like, also) if data is not None]):
                check_apart(train, found)
        found = self._for_head(found)
        return found if like is None else labelled_like(found, like)

    def check_same(self, spec: Spec, split: str) -> None:
        """Raise if this is the data of a run and holds other images than the run was made with."""
        if self.run is not None:
            self.run.check(spec, split)

    def labelled(self, train: ImageData, judged: ImageData, size: int | None = None) -> ImageData:
        """The images that heads are fitted on: `train` or, if it has no labels, the training part of `val`.

        Only of a `val` that has a validation part too: all images of any other one are judged.
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
    data: Spec
    val: Spec | None
    split: str
    images: dict[str, Any]
    has_classes: bool

    def check(self, spec: Spec, split: str) -> None:
        """Raise if the part of `spec` that is read is the run's and holds other images by now."""
        if spec not in (self.data, self.val):
            return
        if self.val is not None:
            parts = ["train" if spec == self.data else "val"]
        else:
            parts = {"train": ["train"], "all": ["train", "val"]}.get(split, ["val"])
        for part in parts:
            if part in self.images and not self._is_same(part):
                option = "--data" if spec == self.data else "--val"
                raise RunError(
                    f"{spec_text(spec)} holds other images than those {self.folder} was made with: give {option}, or "
                    "run this in the folder where the run was made"
                )

    def _is_same(self, part: str) -> bool:
        """Whether the run's images are there; labels and sizes do not matter."""
        try:
            num_images = int(self.images[part]["num_images"])
            saved = str(self.images[part]["fingerprint"])
        except (KeyError, TypeError, ValueError, OverflowError):
            return False
        own = ChosenData(self.data, self.val, self.split)
        found = own.training(num_images) if part == "train" else own.judged(num_images)
        if len(found) != num_images or found.fingerprint() != saved:
            return False
        del self.images[part]  # once is enough
        return True


def labelled_like(judged: ImageData, train: ImageData) -> ImageData:
    """`judged` with the numbers that its classes have in `train`; without labels if one is not among them."""
    if train.classes is None or judged.classes in (None, train.classes):
        return judged
    same = renumbered(judged, train.classes)
    if same is not None:
        return same
    more = ", …" if len(train.classes) > 3 else ""
    print(
        f"the labels of {judged.name} are not used: they are not of the classes of {train.name} "
        f"({', '.join(train.classes[:3])}{more})",
        file=sys.stderr,
    )
    return judged.without_labels()


def tell_of_new_classes(train: ImageData, judged: ImageData) -> None:
    """Say which classes only the held-out images have: a probe is never right about a class that it has not seen."""
    if train.labels is None or judged.labels is None:
        return
    known = {(train.classes or ())[label] for label in train.present()}
    if len(known) < 2:  # a probe of one class is refused
        return
    judged_names = [(judged.classes or ())[label] for label in sorted(judged.present())]
    new = [name for name in judged_names if name not in known]
    if new:
        more = f" and {len(new) - 3} more" if len(new) > 3 else ""
        listed = ", ".join(new[:3]) + more
        print(f"no training image is of class {listed}: a probe is wrong about those held-out images", file=sys.stderr)


def _largest(sets: list[ImageData]) -> list[ImageData]:
    """These sets of training images without any that is a part of a larger one."""
    kept: list[ImageData] = []
    for data in sorted(sets, key=len, reverse=True):
        if not any(_places(data.specs) <= _places(larger.specs) for larger in kept):
            kept.append(data)
    return kept


def _places(spec: Spec) -> set[str]:
    """The files and folders that data is read from: `photos/`, `./photos` and a link to it are one place."""
    if isinstance(spec, ImageData):
        return {spec.name}
    places = set()
    for one in [spec] if isinstance(spec, str) else spec:
        kind, path = _kind_and_path(one)
        try:
            files = list_files(path) if path.lower().endswith((".zip", ".zip}", ".tar", ".tar}")) else [path]
        except ValueError:  # it is reported when it is opened
            files = [path]
        for file in files:
            real = os.path.realpath(os.path.expanduser(file))
            places.add(kind + real if os.path.exists(real) else one)
    return places


def _kind_and_path(spec: str) -> tuple[str, str]:
    """`nyuv2:` and PATH, `hf/` and PATH, or no kind and the whole; a part of a hub set belongs to its kind."""
    for prefix in ("hf/", "wds/"):
        if spec.startswith(prefix):
            path, colon, part = spec.removeprefix(prefix).partition(":")
            return prefix + colon + part if prefix == "hf/" else "", path
    if spec in NAMED:
        return spec, ""
    kind, colon, path = spec.partition(":")
    return (kind + colon, path) if colon and not os.path.exists(spec) else ("", spec)


def _remembered(model: Any, with_val: bool = True) -> dict[str, Any]:
    """`data`, `val` and `run` of the run folder that `model` names or lies in; empty if it is of no run.

    with_val: whether the run's `val` is wanted; otherwise only its `data` has to be there.
    """
    if not isinstance(model, str | Path):
        return {}
    own = Path(model).expanduser()
    folder = next((place for place in (own, own.parent) if (place / "config.yaml").is_file()), None)
    if folder is None:
        return {}
    config = read_config(folder)
    wanted = ("data", "val") if with_val else ("data",)
    kept = {key: config[key] for key in wanted if config.get(key) is not None}
    for spec in kept.values():
        _check_there(spec, folder)
    if "data" in kept:
        known = config.get("images")
        images = dict(known) if isinstance(known, dict) else {}
        if not with_val:
            images.pop("val", None)
        kept["run"] = _RunImages(
            folder,
            kept["data"],
            kept.get("val"),
            str(config.get("split") or "val"),
            images,
            has_classes=config.get("classes") is not None,
        )
    return kept


def _check_there(spec: Any, folder: Path) -> None:
    """Raise if a folder or file that a run read is gone. Patterns and names of sets are looked up later."""
    for path in [spec] if isinstance(spec, str) else spec or []:
        is_pattern = ":" in path or path.startswith(("hf/", "wds/")) or any(letter in path for letter in ",*{[")
        if path not in NAMED and not is_pattern and not Path(path).expanduser().exists():
            raise RunError(f"{path}, the data of {folder}, is not there: give its new place with --data")
