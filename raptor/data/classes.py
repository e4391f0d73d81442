"""Labels: what files and programs give as a class, and the numbers that a model's head gives to its classes."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from raptor.data.images import ImageData
from raptor.files import read_text
from raptor.provenance import hash_config

Labels = tuple[list[int] | None, list[str] | None]
"""A class index per image, -1 for an image without a class, and the names of the classes; None without any label."""
_WORDNET_ID = re.compile(r"n\d{8}")
_NUMBER = re.compile(r"-?[0-9]{1,18}")
_MAX_CLASSES = 1_000_000


def number_labels(values: Sequence[Any], source: str) -> Labels:
    """Labels and classes of what a set gives as the class of each image: whole numbers, or names; None for nothing.

    Numbers stay as they are, whichever images have one. Names are numbered in sorted order.
    """
    if set(map(type, values)) <= {type(None)}:
        return None, None
    labels = list(map(_read_label, values))
    names = [label for label in labels if isinstance(label, str)]
    numbers = [label for label in labels if isinstance(label, int)]
    largest = max(numbers, default=-1)
    if names and largest >= 0:
        both = f"numbers such as {largest} and names such as {names[0][:40]}"
        raise ValueError(f"the labels in {source} are {both}: give all samples the same kind of label")
    if names:  # and -1 where there is none
        return number_names([None if label == -1 else str(label) for label in labels])
    if largest >= _MAX_CLASSES:
        raise ValueError(f"{source} has a label {largest}: labels must be less than {_MAX_CLASSES:,}")
    return numbers, list(map(str, range(largest + 1)))


def _read_label(value: Any) -> int | str:
    """A class number or name; -1 for a value that is neither, such as a list, and for any negative number."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        value = value.strip()
        if not _NUMBER.fullmatch(value):
            return value or -1
        value = int(value)
    # Some programs write whole numbers as 3.0. Their images would otherwise lose their classes without a word.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        return max(value, -1)
    return -1


def number_names(names: Sequence[str | None]) -> Labels:
    """Class names to indices in sorted order; (None, None) if no image has a class.

    A name may be written in two ways in Unicode, as macOS and others do: they are one class.
    """
    # By way of the few names, because a million images may have them.
    class_of = {name: unicodedata.normalize("NFC", name) for name in set(names) if name is not None}
    if not class_of:
        return None, None
    classes = sorted(set(class_of.values()))
    index = dict(zip(classes, range(len(classes))))
    number_of: dict[str | None, int] = {None: -1}
    for name, normal in class_of.items():
        number_of[name] = index[normal]
    return list(map(number_of.__getitem__, names)), classes


def for_head(
    data: ImageData, num_classes: int, given: Sequence[str] | None = None, names: Sequence[str] | None = None
) -> ImageData:
    """`data` with its labels numbered as a head of `num_classes` outputs numbers its classes.

    given: the names of the head's classes as its user gave them, see `head_names`; images of other classes are refused.
    names: the same as the model itself keeps them, where it does. Without both, classes that are WordNet ids are
    ImageNet's where the head has as many outputs as ImageNet has classes. Labels of other classes stay as they are.
    """
    if data.labels is None or data.classes is None or not num_classes:
        return data
    present = [data.classes[label] for label in sorted(data.present())]
    if given is not None:
        count = Counter(given)
        for name in present:
            if not count[name]:
                raise ValueError(f"class {name} of {data.name} is not in --classes: add it, or correct its name")
            if count[name] > 1:
                raise ValueError(f"class {name} of {data.name} stands twice in --classes: give each class its own name")
        names = given
    elif names is None:
        # Folders that are named otherwise are numbered as they sort, which says nothing about the head.
        if not all(map(_WORDNET_ID.fullmatch, present)):
            return data
        names = imagenet_ids(num_classes)
    return renumbered(data, names) or data


def head_names(file: str, num_classes: int) -> list[str]:
    """The lines of a file of class names, as many as the head has classes."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"no file {file}: give a text file with one class per line, in the order of the head")
    lines = unicodedata.normalize("NFC", read_text(path)).splitlines()  # as the names of folders are
    names = list(filter(None, map(str.strip, lines)))
    if len(names) != num_classes:
        raise ValueError(f"{file} names {len(names)} classes, the head has {num_classes}: give one line per class")
    return names


def describe_names(names: Sequence[str]) -> dict[str, Any]:
    """What a run remembers of the classes it was given, to notice when they change. Its surrogate keeps the names."""
    return {"num_classes": len(names), "fingerprint": hash_config({"classes": names})}


@cache
def imagenet_ids(num_classes: int) -> list[str]:
    """The WordNet ids of ImageNet in the order of heads with so many outputs; empty for other numbers."""
    # timm takes a second to import, and few commands come here.
    from timm.data import ImageNetInfo
    from timm.data.imagenet_info import _NUM_CLASSES_TO_SUBSET

    subset = _NUM_CLASSES_TO_SUBSET.get(num_classes)
    if subset is None:
        return []
    return list(ImageNetInfo(subset).label_names())


def renumbered(data: ImageData, classes: Sequence[str]) -> ImageData | None:
    """The same images with labels that index `classes`; None unless each of their classes is there, and once."""
    assert data.labels is not None and data.classes is not None
    if data.classes == list(classes):
        return data
    count = Counter(classes)  # ImageNet's words have `crane` twice: a bird and a machine
    new_number = {}
    for label in data.present():
        name = data.classes[label]
        if count[name] != 1:
            return None
        new_number[label] = list(classes).index(name)
    return data.with_labels(list(map(new_number.__getitem__, data.labels)), list(classes))


def labelled_like(judged: ImageData, train: ImageData) -> ImageData:
    """`judged` with the numbers that its classes have in `train`; without labels if one is not among them."""
    if train.classes is None or judged.classes in (None, train.classes):
        return judged
    same = renumbered(judged, train.classes)
    if same is not None:
        return same
    shown = ", ".join(train.classes[:3] + ["…"] * (len(train.classes) > 3))
    print(
        f"the labels of {judged.name} are not used: they are not of the classes of {train.name} ({shown})",
        file=sys.stderr,
    )
    return judged.with_labels(None, None)


def tell_of_new_classes(train: ImageData, judged: ImageData) -> None:
    """Say which classes only the held-out images have: a probe is never right about a class that it has not seen."""
    if train.classes is None or judged.classes is None:
        return
    known = {train.classes[label] for label in train.present()}
    if len(known) < 2:  # a probe of one class is refused
        return
    held_out = [judged.classes[label] for label in sorted(judged.present())]
    new = [name for name in held_out if name not in known]
    if new:
        shown = ", ".join(new[:3])
        if len(new) > 3:
            shown += f" and {len(new) - 3} more"
        print(f"no training image is of class {shown}: a probe is wrong about those held-out images", file=sys.stderr)
