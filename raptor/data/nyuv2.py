"""NYUv2 in its two layouts: the labelled .mat, and folders of pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.io import loadmat

from raptor.data.dense import IGNORE_INDEX, DenseData, PairedFiles
from raptor.data.image_file import DiskFile

_MAX_DEPTH = 10.0
_CLASS_NAMES = """
    wall, floor, cabinet, bed, chair, sofa, table, door, window, bookshelf, picture, counter, blinds, desk, shelves,
    curtain, dresser, pillow, mirror, floor mat, clothes, ceiling, books, refrigerator, television, paper, towel,
    shower curtain, box, whiteboard, person, night stand, toilet, sink, lamp, bathtub, bag, other structure,
    other furniture, other prop
"""
CLASSES = [name.strip() for name in _CLASS_NAMES.split(",")]
_DEPTH: dict[str, Any] = {"max_depth": _MAX_DEPTH, "eigen_crop": True}
_NUM_FOLDER_CLASSES = 39
"""Of the 40 classes, label 39 of the folder layout mixes one with "unlabelled" and is left out."""


def open_nyuv2(spec: str, task: str = "depth") -> DenseData:
    """Open the layout that is there: a .mat file, or a folder with one, or folders (or zips) of `<split>/rgb`,
    `<split>/depth`, `<split>/label40`."""
    path = Path(spec).expanduser()
    mat = path if path.suffix == ".mat" else path / "nyu_depth_v2_labeled.mat"
    if mat.is_file():
        return _NyuMat(mat, task)
    if path.suffix == ".mat":
        raise ValueError(f"no file {path}; give the path of nyu_depth_v2_labeled.mat")
    expected = "a .mat or train/rgb/0000.png"
    if task == "depth":
        return PairedFiles("nyuv2", task, spec, ("rgb", "depth"), _read_depth, expected, **_DEPTH)
    classes = CLASSES[:_NUM_FOLDER_CLASSES]
    return PairedFiles("nyuv2", task, spec, ("rgb", "label40"), _read_labels, expected, classes=classes)


def _read_depth(picture: Image.Image) -> np.ndarray:
    """Depth in metres. 8-bit pictures store it as value x 10 / 255, 16-bit ones in millimetres; 0 means no reading."""
    if picture.mode != "L" and not picture.mode.startswith("I"):  # a palette's numbers, or metres as real numbers
        raise ValueError(
            f"a depth picture is grey with 8 or 16 bits, this one is {picture.mode}: save it as one of them"
        )
    values = np.array(picture).astype(np.float32)
    if picture.mode == "L":
        return values * np.float32(_MAX_DEPTH / 255)
    return values / np.float32(1000)


def _read_labels(picture: Image.Image) -> np.ndarray:
    labels = np.array(picture)
    if labels.ndim != 2:
        raise ValueError(f"a label picture has one channel, this one is {picture.mode}: save the class numbers as grey")
    return np.where(labels < _NUM_FOLDER_CLASSES, labels, IGNORE_INDEX).astype(np.uint8)


class _NyuMat(DenseData):
    """`nyu_depth_v2_labeled.mat` (1,449 frames of 480 x 640), read in place through h5py.

    The official split is `splits.mat` beside it. Masks have 894 classes there: the usual 40 need `classMapping40.mat`.
    """

    def __init__(self, path: Path, task: str) -> None:
        self.path = path
        self.mapping = None
        if task == "segment":
            values = _load_mat(path.parent / "classMapping40.mat", "the 40 classes")["mapClass"]
            mapped = np.concatenate([[0], np.ravel(values).astype(np.int64)])  # label 0 of the file is unlabelled
            self.mapping = np.where(mapped > 0, mapped - 1, IGNORE_INDEX).astype(np.uint8)
        try:
            import h5py
        except ImportError:
            raise ValueError("the labelled .mat needs the extra: pip install 'raptor-vit[nyu]'") from None
        try:
            self.arrays = h5py.File(path, "r")
        except OSError as error:
            raise ValueError(f"cannot read {path} as an HDF5 .mat: {error}") from None
        num_images, _, width, height = self.arrays["images"].shape
        splits = _load_mat(path.parent / "splits.mat", "the official split")
        parts: list[str | None] = [None] * num_images
        for key, part in (("trainNdxs", "train"), ("testNdxs", "test")):
            for number in np.ravel(splits[key]).tolist():
                if number <= num_images:
                    parts[int(number) - 1] = part
        if None in parts:
            raise ValueError(f"splits.mat does not list frame {parts.index(None) + 1}; is it the official one?")
        names = [f"{i:04d}" for i in range(num_images)]
        facts = _DEPTH if task == "depth" else {"classes": CLASSES}
        super().__init__(f"nyuv2:{path}", task, names, parts, frame=(height, width), **facts)

    def stamp(self, position: int) -> int:
        """The size of the whole .mat, which holds all frames."""
        return DiskFile(self.path).num_bytes

    def read(self, position: int, side: int | None = None) -> Image.Image:
        # MATLAB stores columns first, so each array arrives transposed.
        return Image.fromarray(np.ascontiguousarray(self.arrays["images"][position].transpose(2, 1, 0)))

    def target(self, position: int) -> np.ndarray:
        if self.mapping is None:
            return np.ascontiguousarray(self.arrays["depths"][position].T.astype(np.float32))
        return np.asarray(self.mapping[self.arrays["labels"][position].T])


def _load_mat(path: Path, what: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"no {path}; put {path.name} there, it holds {what} of NYUv2")
    return loadmat(path)
