"""Image sets of the datasets package."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from tiny_images import pixels, same

from raptor.data import open_data


def test_hub_sets_from_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})

    def table(seeds: range) -> object:
        rows = {"image": [Image.fromarray(pixels(i)) for i in seeds], "label": [i % 2 for i in seeds]}
        return datasets.Dataset.from_dict(rows, features=features)

    tables = {"train": table(range(8)), "test": table(range(8, 11))}
    datasets.DatasetDict(tables).save_to_disk(str(tmp_path / "pair"))
    tables["train"].save_to_disk(str(tmp_path / "single"))  # type: ignore[attr-defined]
    train, val = (open_data(f"hf/{tmp_path}/pair", split) for split in ("train", "val"))
    assert (len(train), len(val)) == (8, 3) and val.labels == [0, 1, 0] and val.classes == ["cat", "dog"]
    assert same(train.load(5), pixels(5)) and same(val.load(2), pixels(10))
    assert len(open_data(f"hf/{tmp_path}/pair:test", "val")) == 3
    single = [open_data(f"hf/{tmp_path}/single", split) for split in ("train", "val")]
    assert sorted([*single[0].names, *single[1].names]) == [f"train/{i}" for i in range(8)] and len(single[1]) >= 1
    with pytest.raises(ValueError, match="no split 'dev'; it has train, test"):
        open_data(f"hf/{tmp_path}/pair:dev")
    with pytest.raises(ValueError, match="has no train images"):
        open_data(f"hf/{tmp_path}/pair:test", "train")


def test_each_split_numbers_its_classes_by_name(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    orders = {"train": ["ant", "bee", "cat"], "test": ["cat", "ant", "bee"]}

    def save(orders: dict[str, list[str]], folder: Path) -> None:
        tables = {}
        for part, names in orders.items():
            features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
            rows = {"image": [Image.fromarray(pixels(i)) for i in range(3)], "label": [0, 1, 2]}
            tables[part] = datasets.Dataset.from_dict(rows, features=features)
        datasets.DatasetDict(tables).save_to_disk(str(folder))

    save(orders, tmp_path / "mixed")
    val = open_data(f"hf/{tmp_path}/mixed", "val")
    assert val.classes == orders["train"] and val.labels == [2, 0, 1]
    save({**orders, "test": ["ant", "dog", "cat"]}, tmp_path / "other")
    with pytest.raises(ValueError, match="class dog of one split is not in the first one"):
        open_data(f"hf/{tmp_path}/other", "val")
