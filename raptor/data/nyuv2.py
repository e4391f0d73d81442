"""NYUv2 in its three layouts: the labelled .mat, the `nyu2_train.csv` layout of depth papers, and plain folders."""

from __future__ import annotations

import csv
import io
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from raptor.data.dense import IGNORE_INDEX, DenseData, Files, PairedFiles
from raptor.data.images import file_bytes, open_image

_MAX_DEPTH = 10.0
_CLASS_NAMES = """
    wall, floor, cabinet, bed, chair, sofa, table, door, window, bookshelf, picture, counter, blinds, desk, shelves,
    curtain, dresser, pillow, mirror, floor mat, clothes, ceiling, books, refrigerator, television, paper, towel,
    shower curtain, box, whiteboard, person, night stand, toilet, sink, lamp, bathtub, bag, other structure,
    other furniture, other prop
"""
CLASSES = [name.strip() for name in _CLASS_NAMES.split(",")]
_NUM_FOLDER_CLASSES = 39
"""Of the 40 classes, label 39 of the folder layout mixes one with "unlabelled" and is left out."""


def open_nyuv2(spec: str, task: str = "depth") -> DenseData:
    """Open the layout that is there: a .mat file (or a folder with one), a folder or zip with nyu2_train.csv, or
    folders (or zips) of `<split>/rgb`, `<split>/depth`, `<split>/label40`."""
    path = Path(spec).expanduser()
    mat = path if path.suffix == ".mat" else path / "nyu_depth_v2_labeled.mat"
    if mat.is_file():
        return _NyuMat(mat, task)
    if path.suffix == ".mat":
        raise ValueError(f"no file {path}; give the path of nyu_depth_v2_labeled.mat")
    files = Files(spec)
    if any(PurePosixPath(name).name in ("nyu2_train.csv", "nyu2_test.csv") for name in files.paths):
        return _NyuCsv(files, spec, task)
    return _NyuFolders(files, spec, task)


def _decode_depth(data: bytes) -> np.ndarray:
    """A depth picture to metres, float32 (H, W): 8 bit is value x 10 / 255, 16 bit is millimetres; 0 is no reading."""
    image = open_image(data)
    if image.mode != "L" and not image.mode.startswith("I"):  # a palette's numbers, or metres as real numbers
        raise ValueError(f"a depth picture is grey with 8 or 16 bits, this one is {image.mode}: save it as one of them")
    values = np.array(image).astype(np.float32)
    return values * np.float32(_MAX_DEPTH / 255) if image.mode == "L" else values / np.float32(1000)


def _decode_labels(data: bytes) -> np.ndarray:
    """A picture of class numbers, uint8 (H, W); numbers without a class in the folder layout are ignored."""
    image = open_image(data)
    labels = np.array(image)
    if labels.ndim != 2:
        raise ValueError(f"a label picture has one channel, this one is {image.mode}: save the class numbers as grey")
    return np.where(labels < _NUM_FOLDER_CLASSES, labels, IGNORE_INDEX).astype(np.uint8)


class _NyuFolders(PairedFiles):
    """`train/rgb/0000.webp`, `train/depth/0000.png`, `train/label40/0000.png`, in a folder or in zips."""

    def __init__(self, files: Files, spec: str, task: str) -> None:
        self.files = files
        folder = "depth" if task == "depth" else "label40"
        targets = {_key(path): path for path in files.paths if _folder(path) == folder}
        images = [path for path in files.paths if _folder(path) == "rgb"]
        if not images:
            raise ValueError(f"no NYUv2 in {spec}; expected a .mat, nyu2_train.csv or train/rgb/0000.png")
        bare = [path for path in images if _key(path) not in targets]
        if bare:
            raise ValueError(f"{bare[0]} of {spec} has no picture in {folder}/; the task {task} needs it")
        self.pairs = [(path, targets[_key(path)]) for path in images]
        width, height = open_image(files.read(self.pairs[0][1])).size
        parts = [PurePosixPath(path).parts[-3] if len(PurePosixPath(path).parts) > 2 else None for path in images]
        super().__init__(
            f"nyuv2:{spec}", task, images, parts, frame=(height, width), **_facts(task, _NUM_FOLDER_CLASSES)
        )

    def read(self, position: int) -> tuple[Image.Image, np.ndarray]:
        image_path, target_path = self.pairs[position]
        image = open_image(self.files.read(image_path))
        target = self.files.read(target_path)
        if self.task == "depth":
            return image, _decode_depth(target)
        return image, _decode_labels(target)


class _NyuCsv(PairedFiles):
    """`nyu2_train.csv` and `nyu2_test.csv`: a picture and its depth per line, 480 x 640. It has depths only."""

    def __init__(self, files: Files, spec: str, task: str) -> None:
        if task != "depth":
            raise ValueError("the nyu2_train.csv layout has depths and no masks; use the task depth")
        self.files = files
        self.pairs = []
        parts: list[str | None] = []
        for part in ("train", "test"):
            table = next((path for path in files.paths if PurePosixPath(path).name == f"nyu2_{part}.csv"), None)
            if table is None:
                continue
            for row in csv.reader(io.StringIO(files.read(table).decode())):
                if len(row) >= 2:
                    self.pairs.append((self._place(table, row[0]), self._place(table, row[1])))
                    parts.append(part)
        if not self.pairs:
            raise ValueError(f"the csv files of {spec} list no pictures; expected lines image,depth")
        width, height = open_image(files.read(self.pairs[0][1])).size
        names = [image for image, _ in self.pairs]
        super().__init__(f"nyuv2:{spec}", task, names, parts, frame=(height, width), **_facts(task, 0))

    @cached_property
    def _known(self) -> set[str]:
        return set(self.files.paths)

    def _place(self, csv_path: str, listed: str) -> str:
        """A listed path starts at the csv's folder or, as published (`data/nyu2_train/...`), one above it."""
        listed = listed.strip()
        folder = PurePosixPath(csv_path).parent
        tail = PurePosixPath(*PurePosixPath(listed).parts[1:])
        for place in (folder / listed, folder / tail):
            if str(place) in self._known:
                return str(place)
        raise ValueError(f"{listed}, listed in {csv_path}, is not there; unpack the whole archive")

    def read(self, position: int) -> tuple[Image.Image, np.ndarray]:
        image_path, depth_path = self.pairs[position]
        return open_image(self.files.read(image_path)), _decode_depth(self.files.read(depth_path))


class _NyuMat(DenseData):
    """`nyu_depth_v2_labeled.mat` (1,449 frames of 480 x 640), read in place through h5py.

    The official split is `splits.mat` beside it. Masks have 894 classes there: the usual 40 need `classMapping40.mat`.
    """

    def __init__(self, path: Path, task: str) -> None:
        self.path = path
        self.mapping = None if task == "depth" else self._class_mapping()
        images = self._file["images"]
        num_images, _, width, height = images.shape
        parts = self._parts(num_images)
        names = [f"{i:04d}" for i in range(num_images)]
        super().__init__(f"nyuv2:{path}", task, names, parts, frame=(height, width), **_facts(task, len(CLASSES)))

    @cached_property
    def _file(self) -> Any:
        try:
            import h5py
        except ImportError:
            raise ValueError("the labelled .mat needs the extra: pip install 'raptor-vit[nyu]'") from None
        try:
            return h5py.File(self.path, "r")
        except OSError as error:
            raise ValueError(f"cannot read {self.path} as an HDF5 .mat: {error}") from None

    def _parts(self, num_images: int) -> list[str | None]:
        splits = _load_mat(self.path.parent / "splits.mat", "the official split")
        parts: list[str | None] = [None] * num_images
        for key, part in (("trainNdxs", "train"), ("testNdxs", "test")):
            for number in np.ravel(splits[key]).tolist():
                if number <= num_images:
                    parts[int(number) - 1] = part
        if None in parts:
            raise ValueError(f"splits.mat does not list frame {parts.index(None) + 1}; is it the official one?")
        return parts

    def _class_mapping(self) -> np.ndarray:
        """uint8 from a label of the file (0 is unlabelled) to 0..39, or `ignore_index`."""
        values = _load_mat(self.path.parent / "classMapping40.mat", "the 40 classes")["mapClass"]
        mapped = np.ravel(values).astype(np.int64)
        return np.concatenate([[IGNORE_INDEX], np.where(mapped > 0, mapped - 1, IGNORE_INDEX)]).astype(np.uint8)

    def stamp(self, position: int) -> int:
        """The size of the whole .mat, which holds all frames."""
        return file_bytes(self.path)

    def read(self, position: int) -> tuple[Image.Image, np.ndarray]:
        # MATLAB stores columns first, so each array arrives transposed.
        image = Image.fromarray(np.ascontiguousarray(self._file["images"][position].transpose(2, 1, 0)))
        if self.mapping is None:
            return image, np.ascontiguousarray(self._file["depths"][position].T.astype(np.float32))
        return image, self.mapping[self._file["labels"][position].T]


def _facts(task: str, num_classes: int) -> dict[str, Any]:
    if task == "depth":
        return {"max_depth": _MAX_DEPTH, "eigen_crop": True}
    return {"classes": CLASSES[:num_classes]}


def _load_mat(path: Path, what: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"no {path}; put {path.name} there, it holds {what} of NYUv2")
    try:
        from scipy.io import loadmat
    except ImportError:
        raise ValueError(f"{path.name} needs scipy: pip install scipy") from None
    return loadmat(path)


def _folder(path: str) -> str:
    parts = PurePosixPath(path).parts
    return parts[-2] if len(parts) >= 2 else ""


def _key(path: str) -> tuple[str, str]:
    pure = PurePosixPath(path)
    return pure.parts[-3] if len(pure.parts) > 2 else "", pure.stem
