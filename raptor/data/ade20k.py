"""ADE20K as the scene parsing challenge ships it (`ADEChallengeData2016`), from its folder or its zip."""

from __future__ import annotations

import csv
from pathlib import PurePosixPath

import numpy as np
from PIL import Image

from raptor.data.archives import files_of
from raptor.data.dense import PairedFiles

_NUM_CLASSES = 150
_FRAME = (518, 518)


def open_ade20k(spec: str, task: str = "segment") -> PairedFiles:
    """150 classes; the annotation's 0 (background, other) becomes `IGNORE_INDEX`.

    Images differ in size, so scores are taken on square frames of 518 pixels, masks resized by nearest neighbour.
    """
    if task != "segment":
        raise ValueError("ADE20K has masks and no depths; use it with the task segment")
    expected = "ADEChallengeData2016/images/training/*.jpg"
    folders = ("images", "annotations")
    classes = _class_names(spec)
    return PairedFiles("ade20k", task, spec, folders, _read_mask, expected, frame=_FRAME, classes=classes)


def _read_mask(picture: Image.Image) -> np.ndarray:
    mask = np.array(picture)
    if mask.ndim != 2 or mask.max() > _NUM_CLASSES:
        raise ValueError(f"its mask is not an annotation of {_NUM_CLASSES} classes")
    # The challenge counts classes from 1 and does not score 0.
    return mask.astype(np.uint8) - np.uint8(1)  # 0 wraps to 255, which is ignored


def _class_names(spec: str) -> list[str]:
    """The names in the table beside the images; numbers where there is none."""
    files = files_of(spec)
    tables = [path for path in files if PurePosixPath(path).name in ("objectInfo150.csv", "objectInfo150.txt")]
    if not tables:
        return [f"class {i}" for i in range(1, _NUM_CLASSES + 1)]
    path = tables[0]
    try:
        lines = files[path].read().decode().splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file in UTF-8: unpack the set again") from None
    delimiter = "\t" if path.endswith(".txt") else ","
    rows = list(csv.reader(lines, delimiter=delimiter))[1:]
    names = [row[-1].split(";")[0].split(",")[0].strip() for row in rows if row]
    if len(names) != _NUM_CLASSES:
        raise ValueError(f"{path} names {len(names)} classes; expected {_NUM_CLASSES}")
    return names
