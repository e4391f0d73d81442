"""Labels by class name: numbered as a model's head numbers its classes, whatever folders the data has."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from raptor.data.images import ImageData
from raptor.files import read_text
from raptor.provenance import hash_config

_WORDNET_ID = re.compile(r"n\d{8}")


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
    if given is not None:
        twice = next((name for name in _present(data) if list(given).count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"class {twice} of {data.name} stands twice in --classes: give each class its own name")
        found = renumbered(data, given)
        if found is None:
            strange = next(name for name in _present(data) if name not in given)
            raise ValueError(f"class {strange} of {data.name} is not in --classes: add it, or correct its name")
        return found
    if names is not None:
        return renumbered(data, names) or data
    # Folders that are named otherwise are numbered as they sort, which says nothing about the head.
    if not all(map(_WORDNET_ID.fullmatch, _present(data))):
        return data
    return renumbered(data, imagenet_ids(num_classes)) or data


def head_names(file: str, num_classes: int) -> list[str]:
    """The lines of a file of class names, as many as the head has classes."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"no file {file}: give a text file with one class per line, in the order of the head")
    lines = unicodedata.normalize("NFC", read_text(path)).splitlines()  # as those of folders are
    names = [line.strip() for line in lines if line.strip()]
    if len(names) != num_classes:
        raise ValueError(f"{file} names {len(names)} classes, the head has {num_classes}: give one line per class")
    return names


def describe_names(names: Sequence[str]) -> dict[str, Any]:
    """What a run remembers of the classes it was given, to notice when they change. Its surrogate keeps the names."""
    return {"num_classes": len(names), "fingerprint": hash_config({"classes": names})}


def renumbered(data: ImageData, classes: Sequence[str]) -> ImageData | None:
    """The same images with labels that index `classes`; None unless each of their classes is there, and once."""
    assert data.labels is not None and data.classes is not None
    if data.classes == list(classes):
        return data
    index = {name: i for i, name in enumerate(classes)}
    count = Counter(classes)  # ImageNet's words have `crane` twice: a bird and a machine
    if any(count[name] != 1 for name in _present(data)):
        return None
    return data.with_labels([index[data.classes[label]] for label in data.labels], list(classes))


@cache
def imagenet_ids(num_classes: int) -> list[str]:
    """The WordNet ids of ImageNet in the order of heads with so many outputs; empty for other numbers."""
    from timm.data import ImageNetInfo
    from timm.data.imagenet_info import _NUM_CLASSES_TO_SUBSET

    subset = _NUM_CLASSES_TO_SUBSET.get(num_classes)
    return [] if subset is None else list(ImageNetInfo(subset).label_names())


def _present(data: ImageData) -> list[str]:
    """Names of the classes that have images."""
    assert data.classes is not None
    return [data.classes[label] for label in sorted(data.present())]
