"""Which images a command reads: the set it fits on and the one it judges on, by default those of its run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raptor.data.apart import check_apart
from raptor.data.by_name import NAMED, as_spec, open_data, places_of, spec_text
from raptor.data.classes import for_head, head_names, labelled_like, renumbered
from raptor.data.images import ImageData
from raptor.data.index import listed, tell_once
from raptor.data.split import is_train, own_validation
from raptor.files import RunError
from raptor.run import read_config, run_folder

DEFAULT_DATA = "scenes"
Spec = str | Sequence[str] | ImageData
"""Data by one name or several, or opened."""


def default_data(model: Any) -> str:
    """The built-in scenes, for a model that was made with them. For any other one, somebody has to say which images."""
    name = model
    if not isinstance(model, str | Path):
        name = getattr(model, "name", type(model).__name__)
    # `scenes`, `scenes-k3`, `raptor k=3 of scenes`, `timm/NAME trained on scenes`.
    if str(name).rpartition(" ")[2].startswith(DEFAULT_DATA):
        return DEFAULT_DATA
    raise ValueError(f"say which images {name} works on: --data photos/, or --data scenes for the built-in drawings")


@dataclass(frozen=True)
class ChosenData:
    """`data` to train or fit on, `val` to judge on (else the held-out part of `data`), and which part of it is judged.

    Attributes:
        data, val: as `open_data` takes them.
        split: the part that is judged: `val`, or another one. Of `val` data without a validation part, `val` is all.
        classes: of the model's head in its order, as `--classes` names them.
        names: the same as the model keeps them: a saved model, and a run made with `--classes`.
        num_classes: outputs of the head (the model's own, or one in a file), whose order labels then have; 0 leaves
            them as they are.
        run: the data of the run that these are of, if they were not given: other images than its are refused.
        folder, config: of a run.
    """

    data: Spec
    val: Spec | None = None
    split: str = "val"
    classes: Sequence[str] | None = None
    skip_bad: bool = False
    names: Sequence[str] | None = None
    num_classes: int = 0
    run: ChosenData | None = field(default=None, compare=False)
    folder: Path | None = field(default=None, compare=False)
    config: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        # Frozen, because results name the data by it; a program may give paths, tensors or a Dataset.
        object.__setattr__(self, "data", as_spec(self.data))
        object.__setattr__(self, "val", as_spec(self.val))

    @classmethod
    def of(
        cls, model: Any, options: Mapping[str, Any], names: Sequence[str] | None = None, num_classes: int = 0
    ) -> ChosenData:
        """The data that the options of a command choose; options that are not given are as the run of `model` has them.

        names, num_classes: of the model's head, as in the attributes.
        """
        data = options.get("data")
        val = options.get("val")
        classes = None
        if num_classes and options.get("classes") is not None:
            classes = head_names(options["classes"], num_classes)
        run = None
        if data is None:
            run = cls.of_run(model, with_val=val is None)
        if run is not None:
            data = run.data
            if val is None:
                val = run.val
            if run.config.get("classes") is not None and num_classes and names is None and classes is None:
                raise RunError(f"{run.folder} was made with --classes and does not keep these names: give --classes")
        elif data is None:
            data = DEFAULT_DATA
            if val is None:
                data = default_data(model)
        split = options.get("split") or "val"
        return cls(data, val, split, classes, bool(options.get("skip_bad")), names, num_classes, run)

    @classmethod
    def of_run(cls, model: Any, with_val: bool = True) -> ChosenData | None:
        """The data of the run folder that `model` names or lies in; None if there is none.

        It is kept as it was typed, so that from another folder the same words may name other images.

        with_val: whether the run's images to judge on are wanted; otherwise only its `data` has to be there.
        """
        folder = run_folder(model)
        config = {} if folder is None else read_config(folder)
        if config.get("data") is None:
            return None
        images = config.get("images")
        config["images"] = dict(images) if isinstance(images, dict) else {}
        if not with_val:
            config["val"] = None
            config["images"].pop("val", None)
        split = str(config.get("split") or "val")
        run = cls(config["data"], config.get("val"), split, folder=folder, config=config)
        for path in _names_of(run.data) + _names_of(run.val):
            # Patterns and names of sets are looked up when they are opened.
            is_pattern = path.startswith(("hf/", "wds/")) or not set(":,*{[").isdisjoint(path)
            if path not in NAMED and not is_pattern and not Path(path).expanduser().exists():
                raise RunError(f"{path}, the data of {folder}, is not there: give its new place with --data")
        return run

    @property
    def judged_spec(self) -> Spec:
        """The data that is judged."""
        return self.data if self.val is None else self.val

    @property
    def name(self) -> str:
        """Its name, for results and titles."""
        return spec_text(self.judged_spec)

    @property
    def judged_split(self) -> str:
        """The part to judge on: of other data than is trained on its own validation part, or else all of it."""
        is_other = self.val is not None and not places_of(self.val) & places_of(self.data)
        return "own" if is_other and self.split == "val" else self.split

    def check_same(self, *parts: str) -> None:
        """Raise if a part, `train` or `val`, is of a run and holds other images than the run was made with."""
        for part in parts:
            if self.run is not None:
                self.run._compare(part)

    def _compare(self, part: str) -> None:
        """Raise if the images of a part of a run's data are others than the fingerprints in its config say."""
        kept = self.config["images"].get(part)
        if kept is None:
            return
        spec = self.data
        split = "train"
        if part == "val":
            spec = self.judged_spec
            split = self.judged_split
        # Opened as the run opened them. Labels and the size of images do not matter.
        found = open_data(spec, split, limit=kept["num_images"])
        if len(found) != kept["num_images"] or found.fingerprint() != kept["fingerprint"]:
            option = "--data" if spec is self.data else "--val"
            raise RunError(
                f"{spec_text(spec)} holds other images than those {self.folder} was made with: give {option}, or "
                "run this in the folder where the run was made"
            )
        del self.config["images"][part]  # compared once, because a fingerprint of many files takes a while

    def _for_head(self, data: ImageData) -> ImageData:
        return for_head(data, self.num_classes, self.classes, self.names)

    def training(self, limit: int | None = None, size: int | None = None, any_class: bool = False) -> ImageData:
        """The images to train or fit on.

        any_class: whether they may be of other classes than the head's, because nothing is fitted to their labels;
            such images have no labels then.
        """
        self.check_same("train")
        found = open_data(self.data, "train", limit=limit, size=size, skip_bad=self.skip_bad)
        known = self.names if self.classes is None else self.classes
        if not any_class or known is None or not self.num_classes or found.labels is None:
            return self._for_head(found)
        return renumbered(found, known) or found.with_labels(None, None)

    def trained_on(self, model: Any, size: int | None = None) -> ImageData | None:
        """The training images of the run that `model` names or lies in; None if there is no run, or they are gone.

        If they are gone, or the run's data holds other images by now, this is said.
        """
        if self.run is not None:  # they are the run's, and compared with its fingerprints
            return self.training(None, size, any_class=True)
        try:
            run = ChosenData.of_run(model)
            if run is None:
                return None
            names = self.names if self.classes is None else self.classes
            of_run = replace(run, names=names, num_classes=self.num_classes, run=run)
            return of_run.training(None, size, any_class=True)
        except ValueError as error:
            # The last part of the message is a remedy for the images that are given, which these are not.
            why = str(error).rpartition(": ")[0] or error
            print(f"what {model} was trained on is not compared with: {why}", file=sys.stderr)
            return None

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
        self.check_same(*{"train": ["train"], "all": ["train", "val"]}.get(self.split, ["val"]))
        split = self.judged_split
        found = open_data(self.judged_spec, split, size=size, skip_bad=self.skip_bad)
        if limit is not None:
            found = found.select(found.sample(limit), "beyond --num_images")
        if found.not_chosen:
            counts = f"{len(found):,} of the {len(found) + sum(found.not_chosen.values()):,} images of {found.name}"
            # Not "left out": a surrogate or a head is fitted on images outside of the held-out part.
            tell_once(f"{counts} are measured; the others are {listed(found.not_chosen)}")
        if split not in ("train", "all"):
            fitted = [data for data in (like, also) if data is not None]
            compared: set[str] = set()
            for train in sorted(fitted, key=len, reverse=True):
                places = places_of(train.specs)
                if not places <= compared:  # a part of a larger set is compared with that one
                    check_apart(train, found)
                compared |= places
        found = self._for_head(found)
        return found if like is None else labelled_like(found, like)

    def labelled(self, train: ImageData, judged: ImageData, size: int | None = None) -> ImageData:
        """The images that heads are fitted on: `train` or, if it has no labels, the training part of `val`.

        Only of a `val` that has a validation part too: all images of any other one are judged.
        """
        if train.labels is not None or judged.labels is None or self.val is None:
            return train
        whole = open_data(self.val, "all", size=size, skip_bad=self.skip_bad)
        # Of data without parts, all images are judged, so that none are left to fit a head on.
        rows = [i for i, part in enumerate(whole.parts) if part is not None and is_train(part)]
        if not rows or own_validation(whole.parts) is None:
            return train
        found = self._for_head(whole.select(rows))
        if found.classes == judged.classes:
            return found
        return renumbered(found, judged.classes or []) or train


def _names_of(spec: Spec | None) -> list[str]:
    """The names that data is given by."""
    if spec is None:
        return []
    if isinstance(spec, str | ImageData):
        return [spec_text(spec)]
    return list(spec)
