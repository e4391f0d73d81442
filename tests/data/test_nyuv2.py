"""NYUv2 in its two layouts."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from tiny_images import SHARED, colour, sample, save_array

from raptor.data import open_dense


def zip_folder(folder: Path, archive: Path) -> None:
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(folder.rglob("*.*")):
            packed.write(path, path.relative_to(folder))


def test_nyuv2_samples() -> None:
    first = sample("nyuv2-train.zip")
    sample("nyuv2-test.zip")
    spec = f"nyuv2:{SHARED}/nyuv2-*.zip"
    train, val = (open_dense(spec, split, "depth") for split in ("train", "val"))
    assert (len(train), len(val), train.frame, train.max_depth) == (795, 654, (240, 320), 10)
    masks = open_dense(spec, "train", "segment")
    assert masks.num_classes == 39 and masks.classes is not None and masks.classes[1] == "floor"
    with zipfile.ZipFile(first) as packed:
        name = train.names[5]
        raw = [
            np.array(Image.open(io.BytesIO(packed.read(name.replace("rgb", folder).replace("webp", "png")))))
            for folder in ("depth", "label40")
        ]
    np.testing.assert_allclose(train.pair(5)[1], raw[0] / 25.5, rtol=1e-6)
    np.testing.assert_array_equal(masks.pair(5)[1], np.where(raw[1] == 39, 255, raw[1]))


def make_folders(root: Path) -> tuple[np.ndarray, np.ndarray]:
    train_depth = np.arange(48, dtype=np.uint8).reshape(6, 8) * 5
    test_depth = (np.arange(48, dtype=np.uint16).reshape(6, 8) * 200).astype(np.uint16)
    save_array(root / "train/rgb/1.jpg", colour(1))
    save_array(root / "train/depth/1.png", train_depth)
    save_array(root / "test/rgb/2.png", colour(2))
    save_array(root / "test/depth/2.png", test_depth)
    return train_depth, test_depth


def test_nyuv2_folders(tmp_path: Path) -> None:
    train_depth, test_depth = make_folders(tmp_path / "nyu")
    zip_folder(tmp_path / "nyu", tmp_path / "nyu.zip")
    for path in (tmp_path / "nyu", tmp_path / "nyu.zip"):
        train, val = (open_dense(f"nyuv2:{path}", split, "depth") for split in ("train", "val"))
        assert (len(train), len(val), train.frame, train.eigen_crop) == (1, 1, (6, 8), True)
        np.testing.assert_allclose(train.pair(0)[1], train_depth / 25.5, rtol=1e-6)
        np.testing.assert_allclose(val.pair(0)[1], test_depth / 1000, rtol=1e-6)
        np.testing.assert_array_equal(np.array(val.pair(0)[0]), colour(2))
    with pytest.raises(ValueError, match="has no picture in label40/; the task segment needs it"):
        open_dense(f"nyuv2:{tmp_path / 'nyu'}", "train", "segment")


def test_pictures_whose_numbers_are_no_depths_or_labels_are_refused(tmp_path: Path) -> None:
    """A palette's numbers were read as millimetres, and so were metres saved as real numbers."""
    grey = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(6, 8) * 5)
    real = Image.fromarray(np.full((6, 8), 3.5, dtype=np.float32))
    for number, (folder, picture, ending, message) in enumerate(
        [
            ("depth", grey.convert("P"), "png", "grey with 8 or 16 bits, this one is P"),
            ("depth", real, "tiff", "this one is F"),
            ("depth", grey.convert("RGB"), "png", "this one is RGB"),
            ("label40", grey.convert("RGB"), "png", "a label picture has one channel, this one is RGB"),
        ]
    ):
        for part in ("train", "test"):
            root = tmp_path / str(number) / part
            save_array(root / "rgb" / "0000.png", colour(1))
            (root / folder).mkdir(parents=True)
            picture.save(root / folder / f"0000.{ending}")
        data = open_dense(f"nyuv2:{root.parent}", "train", "depth" if folder == "depth" else "segment")
        with pytest.raises(ValueError, match=message) as error:
            data.pair(0)
        assert "0000" in str(error.value) and "\n" not in str(error.value)


def test_a_first_picture_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    save_array(tmp_path / "train" / "rgb" / "0.png", colour(1))
    (tmp_path / "train" / "depth").mkdir()
    (tmp_path / "train" / "depth" / "0.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0")
    with pytest.raises(ValueError, match=r"cannot read train/depth/0\.png of nyuv2:.*: cannot identify image file it$"):
        open_dense(f"nyuv2:{tmp_path}", "all", "depth")


def test_nyuv2_mat(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (4, 6, 8, 3), dtype=np.uint8)
    depths = rng.uniform(0.5, 9.5, (4, 6, 8)).astype(np.float32)
    labels = rng.integers(0, 4, (4, 6, 8)).astype(np.uint16)
    path = tmp_path / "nyu_depth_v2_labeled.mat"
    with h5py.File(path, "w") as file:  # MATLAB writes its H x W x 3 x N arrays back to front
        file["images"], file["depths"] = images.transpose(0, 3, 2, 1), depths.transpose(0, 2, 1)
        file["labels"] = labels.transpose(0, 2, 1)
    with pytest.raises(ValueError, match=r"splits\.mat"):
        open_dense(f"nyuv2:{path}", "train", "depth")
    savemat(tmp_path / "splits.mat", {"trainNdxs": np.array([[2], [4]]), "testNdxs": np.array([[1], [3]])})
    for spec in (f"nyuv2:{path}", f"nyuv2:{tmp_path}"):
        train, val = (open_dense(spec, split, "depth") for split in ("train", "val"))
        assert (train.names, val.names, train.frame) == (["0001", "0003"], ["0000", "0002"], (6, 8))
        image, depth = train.pair(1)
        np.testing.assert_array_equal(np.array(image), images[3])
        np.testing.assert_array_equal(depth, depths[3])
    before = train.fingerprint()
    with path.open("ab") as file:
        file.write(bytes(8))
    assert open_dense(spec, "train", "depth").fingerprint() != before
    with pytest.raises(ValueError, match="classMapping40"):
        open_dense(f"nyuv2:{path}", "train", "segment")
    savemat(tmp_path / "classMapping40.mat", {"mapClass": np.array([[40, 7, 7]])})
    masks = open_dense(f"nyuv2:{path}", "train", "segment")
    assert masks.num_classes == 40
    np.testing.assert_array_equal(masks.pair(1)[1], np.array([255, 39, 6, 6])[labels[3]])
