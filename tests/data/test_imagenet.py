"""ImageNet with flat validation images and with class folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat
from tiny_images import colour, save_array

from raptor.data import open_data


def make_imagenet(root: Path) -> None:
    for i, wnid in enumerate(("n01440764", "n01443537", "n02102040")):
        save_array(root / "train" / wnid / f"{wnid}_1.JPEG", colour(i))
    for i in (1, 2, 3):
        save_array(root / "val" / f"ILSVRC2012_val_{i:08d}.JPEG", colour(10 + i))


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
    assert train.labels == [0, 1, 2] and train.classes == val.classes and train.specs == [f"imagenet:{tmp_path}"]
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
