"""Labels by class name: numbered as a model's head numbers its classes, whatever folders the data has."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from raptor.data.images import ImageData
from raptor.run import read_text

_WORDNET_ID = re.compile(r"n\d{8}")


def for_head(
    data: ImageData, num_classes: int, file: str | None = None, names: Sequence[str] | None = None
) -> ImageData:
    """`data` with its labels numbered as a head of `num_classes` outputs numbers its classes.

    file: the names of the head's classes, one per line. names: the same as the model itself keeps them, where it does.
    Without both, classes that are WordNet ids are ImageNet's where the head has as many outputs as ImageNet has
    classes. Labels of other classes stay as they are.
    """
    if data.labels is None or data.classes is None or not num_classes:
        return data
    if file is not None:
        named = head_names(file, num_classes)
        twice = next((name for name in _present(data) if named.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"class {twice} of {data.name} stands twice in {file}: give each class a name of its own")
        found = renumbered(data, named)
        if found is None:
            strange = next(name for name in _present(data) if name not in named)
            raise ValueError(f"class {strange} of {data.name} is not in {file}: add it, or correct its name")
        return found
    if names is not None:
        return renumbered(data, names) or data
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


def renumbered(data: ImageData, classes: Sequence[str]) -> ImageData | None:
    """The same images with labels that index `classes`; None when one of their classes is not among them."""
    assert data.labels is not None and data.classes is not None
    index = {name: i for i, name in enumerate(classes)}
    if any(name not in index for name in _present(data)):
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
