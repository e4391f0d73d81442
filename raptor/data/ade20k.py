"""ADE20K as the scene parsing challenge ships it (`ADEChallengeData2016`), from its folder or its zip."""

from __future__ import annotations

import csv
import io
from pathlib import PurePosixPath

import numpy as np

from raptor.data.archives import Files
from raptor.data.dense import PairedFiles
from raptor.data.images import open_image

_NUM_CLASSES = 150
_FRAME = (518, 518)


class Ade20k(PairedFiles):
    """150 classes; the annotation's 0 (background, other) becomes `IGNORE_INDEX`.

    Images differ in size, so scores are taken on square frames of 518 pixels, masks resized by nearest neighbour.
    """

    def __init__(self, spec: str, task: str = "segment") -> None:
        if task != "segment":
            raise ValueError("ADE20K has masks and no depths; use it with the task segment")
        super().__init__(
            "ade20k", task, spec, "images", "annotations", "ADEChallengeData2016/images/training/*.jpg", frame=_FRAME
        )
        self.classes = _class_names(self.files)

    def decode_target(self, content: bytes) -> np.ndarray:
        mask = np.array(open_image(content))
        if mask.ndim != 2 or mask.max() > _NUM_CLASSES:
            raise ValueError(f"its mask is not an annotation of {_NUM_CLASSES} classes")
        # The challenge counts classes from 1 and does not score 0.
        return mask.astype(np.uint8) - np.uint8(1)  # 0 wraps to 255, which is ignored


def _class_names(files: Files) -> list[str]:
    """The names in the table beside the images; numbers where there is none."""
    listed = [path for path in files.paths if PurePosixPath(path).name in ("objectInfo150.csv", "objectInfo150.txt")]
    if not listed:
        return [f"class {i}" for i in range(1, _NUM_CLASSES + 1)]
    lines = io.StringIO(files.read_text(listed[0]))
    delimiter = "\t" if listed[0].endswith(".txt") else ","
    rows = list(csv.reader(lines, delimiter=delimiter))[1:]
    names = [row[-1].split(";")[0].split(",")[0].strip() for row in rows if row]
    if len(names) != _NUM_CLASSES:
        raise ValueError(f"{listed[0]} names {len(names)} classes; expected {_NUM_CLASSES}")
    return names
