"""Image sets of the datasets package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny_images import encoded, pixels, same

from raptor.data import BadImage, open_data
from raptor.data.by_name import as_spec


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


def _table(labels: list[object], feature: object, images: list[dict[str, object] | None] | None = None) -> Any:
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features({"image": datasets.Image(), "label": feature})
    own = [{"bytes": encoded(i), "path": None} for i in range(len(labels))]
    return datasets.Dataset.from_dict({"image": images or own, "label": labels}, features=kinds)


def test_labels_of_a_column_without_declared_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers and names, as in other sets; others are told of."""
    datasets = pytest.importorskip("datasets")
    _table(["cat", "ant", "cat"], datasets.Value("string")).save_to_disk(str(tmp_path / "names"))
    data = open_data(f"hf/{tmp_path}/names", "all")
    assert data.labels == [1, 0, 1] and data.classes == ["ant", "cat"]
    _table([0.5, 1.0], datasets.Value("float32")).save_to_disk(str(tmp_path / "float"))
    assert open_data(f"hf/{tmp_path}/float", "all").labels is None
    assert "the column label of" in capsys.readouterr().err


def test_a_table_that_a_program_holds_is_read_as_one_from_disk(tmp_path: Path) -> None:
    """Its own decoder would start a program for EPS."""
    datasets = pytest.importorskip("datasets")
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    images: list[dict[str, object] | None] = [{"bytes": encoded(0), "path": None}, {"bytes": eps, "path": None}, None]
    table = _table([0, 1, -1], datasets.ClassLabel(names=["cat", "dog"]), images)
    data = open_data(table, "all")
    assert same(data.load(0), pixels(0)) and data.labels is None
    assert as_spec(table).select([0, 1]).labels == [0, 1]
    for number, message in ((1, "cannot identify image file"), (2, "its row holds no image")):
        with pytest.raises(BadImage, match=message):
            data.load(number)
