"""ADE20K as the scene parsing challenge ships it (`ADEChallengeData2016`), from its folder or its zip."""

from __future__ import annotations

import csv
import io
from pathlib import PurePosixPath

import numpy as np
from PIL import Image

from raptor.data.dense import Files, PairedFiles
from raptor.data.images import open_image

_NUM_CLASSES = 150
_FRAME = (518, 518)


class Ade20k(PairedFiles):
    """150 classes; the annotation's 0 (background, other) becomes `ignore_index`.

    Images differ in size, so scores are taken on square frames of 518 pixels, masks resized by nearest neighbour.
    """

    def __init__(self, spec: str, task: str = "segment") -> None:
        if task != "segment":
            raise ValueError("ADE20K has masks and no depths; use it with the task segment")
        self.files = Files(spec)
        self.pairs = _pairs(self.files.paths, spec)
        names = [image for image, _ in self.pairs]
        parts = [PurePosixPath(image).parts[-2] for image in names]
        super().__init__(f"ade20k:{spec}", task, names, parts, frame=_FRAME, classes=_class_names(self.files))

    def read(self, position: int) -> tuple[Image.Image, np.ndarray]:
        image_path, mask_path = self.pairs[position]
        mask = np.array(open_image(self.files.read(mask_path)))
        if mask.ndim != 2 or mask.max() > _NUM_CLASSES:
            raise ValueError(f"{mask_path} is not an annotation of {_NUM_CLASSES} classes")
        return open_image(self.files.read(image_path)), mask.astype(np.uint8) - np.uint8(1)  # 0 wraps to 255: ignored


def _pairs(paths: list[str], spec: str) -> list[tuple[str, str]]:
    masks = {_key(path): path for path in paths if _folder(path) == "annotations" and path.endswith(".png")}
    images = [path for path in paths if _folder(path) == "images" and path.lower().endswith((".jpg", ".jpeg"))]
    if not images:
        raise ValueError(f"no ADE20K images in {spec}; expected ADEChallengeData2016/images/training/*.jpg")
    bare = [path for path in images if _key(path) not in masks]
    if bare:
        raise ValueError(f"{bare[0]} of {spec} has no annotation; expected annotations/<split>/<name>.png")
    return [(path, masks[_key(path)]) for path in images]


def _folder(path: str) -> str:
    parts = PurePosixPath(path).parts
    return parts[-3] if len(parts) >= 3 else ""


def _key(path: str) -> tuple[str, str]:
    pure = PurePosixPath(path)
    return pure.parts[-2], pure.stem


def _class_names(files: Files) -> list[str]:
    listed = [path for path in files.paths if PurePosixPath(path).name in ("objectInfo150.csv", "objectInfo150.txt")]
    if not listed:
        return [f"class {i}" for i in range(1, _NUM_CLASSES + 1)]
    text = files.read(listed[0]).decode()
    rows = list(csv.reader(io.StringIO(text), delimiter="\t" if listed[0].endswith(".txt") else ","))[1:]
    names = [row[-1].split(";")[0].split(",")[0].strip() for row in rows if row]
    if len(names) != _NUM_CLASSES:
        raise ValueError(f"{listed[0]} names {len(names)} classes; expected {_NUM_CLASSES}")
    return names
