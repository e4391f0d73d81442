"""ImageNet-1k: class folders, with validation images in class folders or flat with the labels in a list."""

from __future__ import annotations

import csv
from pathlib import Path, PurePosixPath
from typing import Any

from scipy.io import loadmat

from raptor.data.folder import open_folder
from raptor.data.index import FileImages
from raptor.data.split import is_train

_INNER_FOLDERS = ("", "Data/CLS-LOC", "ILSVRC/Data/CLS-LOC")
_GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_SOLUTION = "LOC_val_solution.csv"


def open_imagenet(root: str) -> FileImages:
    """`train/<wnid>/x.JPEG` and `val/`, whose images lie in class folders or flat.

    Flat ones get their labels from the devkit (`ILSVRC2012_validation_ground_truth.txt` with its `meta.mat`) or from
    `LOC_val_solution.csv`. Class indices follow the sorted wnids, as published heads do, not the devkit's numbers.
    """
    top = Path(root).expanduser()
    base = next((top / inner for inner in _INNER_FOLDERS if (top / inner / "val").is_dir()), top)
    if not base.is_dir():
        raise ValueError(f"no folder {base}; expected ImageNet with train/<wnid>/ and val/")
    data = open_folder(base)
    data.name = f"imagenet:{root}"
    data.specs = [data.name]
    labels = data.labels or [-1] * len(data)
    flat = []
    for position, part in enumerate(data.parts):
        if labels[position] < 0 and not is_train(part):
            flat.append(position)
    if not flat:
        return data
    wnids = _validation_wnids(top)
    classes = data.classes or sorted(set(wnids.values()))
    index = dict(zip(classes, range(len(classes))))
    for position in flat:
        stem = PurePosixPath(data.names[position]).stem
        if stem not in wnids:
            raise ValueError(f"the validation list has no label for {stem}")
        if wnids[stem] not in index:
            raise ValueError(f"validation class {wnids[stem]} has no folder in train/")
        labels[position] = index[wnids[stem]]
    return data.with_labels(labels, classes)


def _validation_wnids(top: Path) -> dict[str, str]:
    """File stem to wnid of the flat validation images, from the list that is below `top` or beside it."""
    for folder in [top, *sorted(top.glob("*devkit*")), *sorted(top.parent.glob("*devkit*"))]:
        for inner in (folder, folder / "data"):
            if (inner / _GROUND_TRUTH).is_file():
                return _from_devkit(inner)
        if (folder / _SOLUTION).is_file():
            with (folder / _SOLUTION).open(newline="", encoding="utf-8") as lines:
                rows = list(csv.reader(lines))[1:]
            # The class is followed by the corners of its box.
            return {row[0]: row[1].split()[0] for row in rows if len(row) >= 2}
    raise ValueError(f"val/ of {top} is flat; put the devkit ({_GROUND_TRUTH}, meta.mat) or {_SOLUTION} in {top}")


def _from_devkit(folder: Path) -> dict[str, str]:
    """The same from the devkit, whose class numbers are not the order of the wnids."""
    meta = folder / "meta.mat"
    if not meta.is_file():
        raise ValueError(f"no {meta}; the devkit's numbers need it to become classes")
    # The file has 1,860 synsets, of which the first thousand are the classes of the challenge.
    synsets: Any = loadmat(meta, squeeze_me=True)["synsets"]
    wnid_of = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    numbers = (folder / _GROUND_TRUTH).read_text(encoding="utf-8").split()
    return {f"ILSVRC2012_val_{i:08d}": wnid_of[int(number)] for i, number in enumerate(numbers, start=1)}
