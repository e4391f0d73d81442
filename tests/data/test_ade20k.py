"""ADE20K from its folder and from the real sample."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_images import colour, sample, save_array

from raptor.data import BadImage, open_dense
from raptor.data.dense import FrameStore


def test_ade20k_sample() -> None:
    archive = sample("ade20k-sample.zip")
    data = open_dense(f"ade20k:{archive}", "val", "segment")
    assert (len(data), data.num_classes, data.frame) == (3, 150, (518, 518))
    assert data.classes is not None and data.classes[:3] == ["wall", "building", "sky"]
    with zipfile.ZipFile(archive) as packed:
        for i, name in enumerate(data.names):
            raw = packed.read(name.replace("images", "annotations").replace(".jpg", ".png"))
            raw_mask = np.array(Image.open(io.BytesIO(raw))).astype(int)
            image, mask = data.pair(i)
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
    third = data.pair(2)[1]
    rows, columns = ((np.arange(518) + 0.5) * third.shape[0] / 518), ((np.arange(518) + 0.5) * third.shape[1] / 518)
    np.testing.assert_array_equal(masks[0].numpy(), third[rows.astype(int)][:, columns.astype(int)])


def test_ade20k_folder(tmp_path: Path) -> None:
    root = tmp_path / "ADEChallengeData2016"
    for split, name in (("training", "ADE_train_00000001"), ("validation", "ADE_val_00000001")):
        save_array(root / "images" / split / f"{name}.jpg", colour(0))
        save_array(
            root / "annotations" / split / f"{name}.png", np.full((6, 8), 150 if split == "training" else 0, np.uint8)
        )
    for path in (tmp_path, root):
        train, val = (open_dense(f"ade20k:{path}", split) for split in ("train", "val"))
        assert (train.pair(0)[1] == 149).all() and (val.pair(0)[1] == 255).all()
    with pytest.raises(ValueError, match="no depths"):
        open_dense(f"ade20k:{root}", "val", "depth")
    save_array(root / "annotations" / "validation" / "ADE_val_00000001.png", np.full((6, 8), 151, np.uint8))
    with pytest.raises(BadImage, match="ADE_val_00000001"):
        open_dense(f"ade20k:{root}", "val").pair(0)
    (root / "annotations" / "validation" / "ADE_val_00000001.png").unlink()
    with pytest.raises(ValueError, match="has no picture in annotations/"):
        open_dense(f"ade20k:{root}", "val")
