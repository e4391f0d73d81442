"""CIFAR from its pickles, its archives and its sheets."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_images import SHARED, needs_shared, same

from raptor.data import open_data


class Python2Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Writes text and bytes as Python 2 did: the original CIFAR files are such pickles."""

    dispatch = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_string(self, value: str | bytes) -> None:
        raw = value if isinstance(value, bytes) else value.encode("latin1")
        self.write(b"T" + struct.pack("<i", len(raw)) + raw)  # type: ignore[attr-defined]
        self.memoize(value)  # type: ignore[attr-defined]

    dispatch[str] = dispatch[bytes] = save_string  # type: ignore[assignment]


def python2_pickle(values: object) -> bytes:
    stream = io.BytesIO()
    Python2Pickler(stream, protocol=2).dump(values)
    return stream.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def write_cifar10(folder: Path) -> tuple[np.ndarray, list[int]]:
    rows = np.random.default_rng(0).integers(0, 256, (24, 3072), dtype=np.uint8)
    labels = [int(i) for i in np.random.default_rng(1).integers(0, 10, 24)]
    folder.mkdir(parents=True)
    for i, name in enumerate([f"data_batch_{j}" for j in range(1, 6)] + ["test_batch"]):
        part = slice(4 * i, 4 * i + 4)
        (folder / name).write_bytes(python2_pickle({"data": rows[part].copy(), "labels": labels[part]}))
    (folder / "batches.meta").write_bytes(python2_pickle({"label_names": [f"class{i}" for i in range(10)]}))
    return rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


def test_cifar10_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = write_cifar10(tmp_path / "cifar-10-batches-py")
    train, val = (open_data(f"cifar10:{tmp_path}", split) for split in ("train", "val"))
    assert (len(train), len(val)) == (20, 4)
    assert train.labels == labels[:20] and val.labels == labels[20:] and val.classes == [f"class{i}" for i in range(10)]
    assert same(train.load(7), images[7]) and same(val.load(3), images[23])
    monkeypatch.setenv("RAPTOR_CACHE", str(tmp_path))
    assert open_data("cifar10", "val").labels == labels[20:]


def test_pickles_cannot_run_code(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "c")
    marker = tmp_path / "ran"

    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return open, (str(marker), "w")

    (tmp_path / "c" / "test_batch").write_bytes(pickle.dumps({"data": Attack()}))
    with pytest.raises(ValueError, match=r"test_batch.*io\.open"):
        open_data(f"cifar10:{tmp_path}/c")
    assert not marker.exists()


def test_cifar_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give cifar100:PATH"):
        open_data(f"cifar100:{tmp_path}")
    write_cifar10(tmp_path / "c")
    (tmp_path / "c" / "data_batch_3").unlink()
    with pytest.raises(ValueError, match="lacks data_batch_3"):
        open_data(f"cifar10:{tmp_path}/c")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"labels": [1.5] * 4}, "values of type float64 and not whole numbers"),
        ({"labels": [None] * 4}, "values of type object"),
        ({"data": np.full((4, 3072), 300)}, "its pixels are int64 and not uint8"),
    ],
)
def test_values_that_are_not_whole_numbers_are_refused(tmp_path: Path, batch: dict[str, Any], message: str) -> None:
    """They were cut to fit."""
    write_cifar10(tmp_path / "c")
    folder = next(tmp_path.rglob("test_batch")).parent
    whole = {"data": np.zeros((4, 3072), np.uint8), "labels": [0, 1, 2, 3]}
    (folder / "test_batch").write_bytes(pickle.dumps({**whole, **batch}))
    with pytest.raises(ValueError, match=message):
        open_data(f"cifar10:{folder}")


def test_a_damaged_archive_is_one_line(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "c")
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        for path in sorted((tmp_path / "c").rglob("*")):
            if path.is_file():
                archive.write(path, path.name)
    content = bytearray((tmp_path / "c.zip").read_bytes())
    content[100] ^= 0xFF
    (tmp_path / "c.zip").write_bytes(bytes(content))
    (tmp_path / "junk.tar.gz").write_bytes(b"junk" * 100)
    for name, words in (("c.zip", "c.zip as cifar-10-batches-py"), ("junk.tar.gz", "junk.tar.gz as a zip")):
        with pytest.raises(ValueError, match=f"cannot read .*{words}") as error:
            open_data(f"cifar10:{tmp_path}/{name}")
        assert "\n" not in str(error.value)


def test_cifar10_sheets(tmp_path: Path) -> None:
    sheets = np.random.default_rng(0).integers(0, 256, (6, 5, 1024, 3), dtype=np.uint8)
    for i, name in enumerate([f"data_batch_{j}" for j in range(1, 6)] + ["test_batch"]):
        Image.fromarray(sheets[i]).save(tmp_path / f"{name}.png")
    (tmp_path / "train_lables.json").write_text(json.dumps([i % 10 for i in range(25)]))
    (tmp_path / "test_lables.json").write_text(json.dumps([9, 8, 7, 6, 5]))
    train, val = (open_data(f"cifar10:{tmp_path}", split) for split in ("train", "val"))
    assert train.labels == [i % 10 for i in range(25)] and val.labels == [9, 8, 7, 6, 5]
    assert train.classes is not None and train.classes[3] == "cat"
    assert same(train.load(13), sheets[2, 3].reshape(32, 32, 3))


@needs_shared
def test_real_cifar100_sample(tmp_path: Path) -> None:
    archive = SHARED / "cifar-100-sample.zip"
    train, val = open_data(f"cifar100:{archive}", "train"), open_data(f"cifar100:{archive}", "val")
    assert (len(train), len(val)) == (1_117, 916)
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(tmp_path)
    values = pickle.loads((tmp_path / "cifar-100-python" / "test").read_bytes(), encoding="bytes")
    assert val.labels == values[b"fine_labels"]
    assert same(val.load(5), values[b"data"][5].reshape(3, 32, 32).transpose(1, 2, 0))
    names = pickle.loads((tmp_path / "cifar-100-python" / "meta").read_bytes())["fine_label_names"]
    assert val.classes == names
    assert open_data(f"cifar100:{tmp_path}", "val").labels == val.labels
