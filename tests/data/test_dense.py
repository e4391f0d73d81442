"""Dense readers and ImageNet: real samples where they are at hand, generated files of every layout, bad input."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from raptor.data import BadImage, open_data, open_dense
from raptor.data.dense import FrameStore
from raptor.data.scenes.render import Scenes

SAMPLES = Path(__file__).parents[3] / "shared" / "data"


def sample(name: str) -> Path:
    if not (SAMPLES / name).is_file():
        pytest.skip(f"the real sample {name} is not at hand")
    return SAMPLES / name


def picture(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def colour(seed: int, height: int = 6, width: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def zip_folder(folder: Path, archive: Path) -> None:
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(folder.rglob("*.*")):
            packed.write(path, path.relative_to(folder))


def test_scenes_have_masks_and_depths() -> None:
    scenes = Scenes("val", size=24)[3]
    masks, depths = (open_dense("scenes", "val", task, limit=5, size=24) for task in ("segment", "depth"))
    assert (len(masks), masks.num_classes, masks.classes and masks.classes[0]) == (5, 6, "background")
    assert depths.max_depth == 12 and masks.max_depth is None and masks.frame == (24, 24)
    image, mask = masks.load(3)
    np.testing.assert_array_equal(np.array(image).transpose(2, 0, 1), scenes.images.numpy())
    np.testing.assert_array_equal(mask, scenes.masks.numpy())
    np.testing.assert_array_equal(depths.load(3)[1], scenes.depths.numpy())
    assert open_dense("scenes", "train", "depth", limit=1).load(0)[1].max() <= 12


def test_ade20k_sample() -> None:
    archive = sample("ade20k-sample.zip")
    data = open_dense(f"ade20k:{archive}", "val", "segment")
    assert (len(data), data.num_classes, data.ignore_index, data.frame) == (3, 150, 255, (518, 518))
    assert data.classes is not None and data.classes[:3] == ["wall", "building", "sky"]
    with zipfile.ZipFile(archive) as packed:
        for i, name in enumerate(data.names):
            raw = packed.read(name.replace("images", "annotations").replace(".jpg", ".png"))
            raw_mask = np.array(Image.open(io.BytesIO(raw))).astype(int)
            image, mask = data.load(i)
            assert image.size == raw_mask.shape[::-1] and mask.dtype == np.uint8
            np.testing.assert_array_equal(mask.astype(int), np.where(raw_mask == 0, 255, raw_mask - 1))
    with pytest.raises(ValueError, match="no train images"):
        open_dense(f"ade20k:{archive}", "train")
    store = FrameStore(data, (112, 112), torch.device("cpu"))
    images, masks = store.batch(torch.tensor([2, 0]))
    store.images = store.targets = None  # too large to keep
    store.prefetch(torch.tensor([2, 1]))
    again = store.batch(torch.tensor([2, 0]))
    assert torch.equal(again[0], images) and torch.equal(again[1], masks)
    assert images.shape == (2, 3, 112, 112) and masks.shape == (2, 518, 518)
    third = data.load(2)[1]
    rows, columns = ((np.arange(518) + 0.5) * third.shape[0] / 518), ((np.arange(518) + 0.5) * third.shape[1] / 518)
    np.testing.assert_array_equal(masks[0].numpy(), third[rows.astype(int)][:, columns.astype(int)])


def test_ade20k_folder(tmp_path: Path) -> None:
    root = tmp_path / "ADEChallengeData2016"
    for split, name in (("training", "ADE_train_00000001"), ("validation", "ADE_val_00000001")):
        picture(root / "images" / split / f"{name}.jpg", colour(0))
        picture(
            root / "annotations" / split / f"{name}.png", np.full((6, 8), 150 if split == "training" else 0, np.uint8)
        )
    for path in (tmp_path, root):
        train, val = (open_dense(f"ade20k:{path}", split) for split in ("train", "val"))
        assert (train.load(0)[1] == 149).all() and (val.load(0)[1] == 255).all()
    with pytest.raises(ValueError, match="no depths"):
        open_dense(f"ade20k:{root}", "val", "depth")
    picture(root / "annotations" / "validation" / "ADE_val_00000001.png", np.full((6, 8), 151, np.uint8))
    with pytest.raises(BadImage, match="ADE_val_00000001"):
        open_dense(f"ade20k:{root}", "val").load(0)
    (root / "annotations" / "validation" / "ADE_val_00000001.png").unlink()
    with pytest.raises(ValueError, match="has no annotation"):
        open_dense(f"ade20k:{root}", "val")


def test_nyuv2_samples() -> None:
    first = sample("nyuv2-train.zip")
    sample("nyuv2-test.zip")
    spec = f"nyuv2:{SAMPLES}/nyuv2-*.zip"
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
    np.testing.assert_allclose(train.load(5)[1], raw[0] / 25.5, rtol=1e-6)
    np.testing.assert_array_equal(masks.load(5)[1], np.where(raw[1] == 39, 255, raw[1]))


def make_csv(root: Path) -> tuple[np.ndarray, np.ndarray]:
    train_depth = np.arange(48, dtype=np.uint8).reshape(6, 8) * 5
    test_depth = (np.arange(48, dtype=np.uint16).reshape(6, 8) * 200).astype(np.uint16)
    picture(root / "data/nyu2_train/room_0001_out/1.jpg", colour(1))
    picture(root / "data/nyu2_train/room_0001_out/1.png", train_depth)
    picture(root / "data/nyu2_test/00000_colors.png", colour(2))
    picture(root / "data/nyu2_test/00000_depth.png", test_depth)
    line = "data/nyu2_train/room_0001_out/1.jpg,data/nyu2_train/room_0001_out/1.png\n"
    (root / "data/nyu2_train.csv").write_text(line)
    (root / "data/nyu2_test.csv").write_text("data/nyu2_test/00000_colors.png,data/nyu2_test/00000_depth.png\n")
    return train_depth, test_depth


def test_nyuv2_csv(tmp_path: Path) -> None:
    train_depth, test_depth = make_csv(tmp_path / "nyu")
    zip_folder(tmp_path / "nyu", tmp_path / "nyu.zip")
    for path in (tmp_path / "nyu", tmp_path / "nyu/data", tmp_path / "nyu.zip"):
        train, val = (open_dense(f"nyuv2:{path}", split, "depth") for split in ("train", "val"))
        assert (len(train), len(val), train.frame, train.eigen_crop) == (1, 1, (6, 8), True)
        np.testing.assert_allclose(train.load(0)[1], train_depth / 25.5, rtol=1e-6)
        np.testing.assert_allclose(val.load(0)[1], test_depth / 1000, rtol=1e-6)
        np.testing.assert_array_equal(np.array(val.load(0)[0]), colour(2))
    with pytest.raises(ValueError, match="no masks"):
        open_dense(f"nyuv2:{tmp_path / 'nyu'}", "train", "segment")
    (tmp_path / "nyu/data/nyu2_test/00000_depth.png").unlink()
    with pytest.raises(ValueError, match="00000_depth"):
        open_dense(f"nyuv2:{tmp_path / 'nyu'}", "train", "depth")


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
        image, depth = train.load(1)
        np.testing.assert_array_equal(np.array(image), images[3])
        np.testing.assert_array_equal(depth, depths[3])
    with pytest.raises(ValueError, match="classMapping40"):
        open_dense(f"nyuv2:{path}", "train", "segment")
    savemat(tmp_path / "classMapping40.mat", {"mapClass": np.array([[40, 7, 7]])})
    masks = open_dense(f"nyuv2:{path}", "train", "segment")
    assert masks.num_classes == 40
    np.testing.assert_array_equal(masks.load(1)[1], np.array([255, 39, 6, 6])[labels[3]])


@pytest.mark.parametrize(
    ("spec", "task", "message"),
    [
        ("ade20", "segment", "did you mean ade20k:PATH"),
        ("scenes", "sort", "unknown dense task"),
        ("nyuv2:/nowhere/labelled.mat", "depth", "no file"),
        ("ade20k:/nowhere", "segment", "no file"),
        ("something", "depth", "give scenes"),
    ],
)
def test_bad_specs_are_named(spec: str, task: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_dense(spec, "train", task)


def make_imagenet(root: Path) -> None:
    for i, wnid in enumerate(("n01440764", "n01443537", "n02102040")):
        picture(root / "train" / wnid / f"{wnid}_1.JPEG", colour(i))
    for i in (1, 2, 3):
        picture(root / "val" / f"ILSVRC2012_val_{i:08d}.JPEG", colour(10 + i))


def test_imagenet_flat_validation_by_the_devkit(tmp_path: Path) -> None:
    make_imagenet(tmp_path)
    with pytest.raises(ValueError, match="is flat"):
        open_data(f"imagenet:{tmp_path}", "val")
    devkit = tmp_path / "ILSVRC2012_devkit_t12" / "data"
    devkit.mkdir(parents=True)
    # The devkit numbers classes in its own order: 1 is the dog, which sorts last.
    rows = [(1, "n02102040", 0), (2, "n01440764", 0), (3, "n01443537", 0), (4, "n02084071", 2)]
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("num_children", "O")]
    savemat(devkit / "meta.mat", {"synsets": np.array(rows, dtype=kinds).reshape(-1, 1)})
    (devkit / "ILSVRC2012_validation_ground_truth.txt").write_text("1\n3\n2\n")
    val = open_data(f"imagenet:{tmp_path}", "val")
    assert val.labels == [2, 1, 0] and val.classes == ["n01440764", "n01443537", "n02102040"]
    train = open_data(f"imagenet:{tmp_path}", "train")
    assert train.labels == [0, 1, 2] and train.classes == val.classes
    assert val.load(0).size == (8, 6)


def test_imagenet_kaggle_list_and_class_folders(tmp_path: Path) -> None:
    inner = tmp_path / "ILSVRC/Data/CLS-LOC"
    make_imagenet(inner)
    lines = ["ImageId,PredictionString"] + [
        f"ILSVRC2012_val_{i:08d},{wnid} 1 2 3 4" for i, wnid in ((2, "n02102040"), (1, "n01443537"), (3, "n01440764"))
    ]
    (tmp_path / "LOC_val_solution.csv").write_text("\n".join(lines))
    assert open_data(f"imagenet:{tmp_path}", "val").labels == [1, 2, 0]
    for path in sorted((inner / "val").iterdir()):
        folder = inner / "val" / "n01443537"
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)
    assert open_data(f"imagenet:{tmp_path}", "val").labels == [1, 1, 1]
