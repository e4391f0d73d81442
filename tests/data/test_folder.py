"""Image folders: their layouts, classes and splits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tiny_images import SPLIT_TREE, encoded, same, write_tree
from torchvision.datasets import ImageFolder

from raptor.data import open_data
from raptor.data.classes import for_head, head_names
from raptor.data.folder import arrange
from raptor.data.split import choose_sample, name_share

REMEDY = "convert, repair, unpack or move them to use them"


def test_folder_with_splits_equals_imagefolder(tmp_path: Path) -> None:
    write_tree(tmp_path, [*SPLIT_TREE, "train/.hidden.png"])
    for split in ("train", "val"):
        data = open_data(str(tmp_path), split)
        reference = ImageFolder(str(tmp_path / split))
        assert data.classes == reference.classes == ["ant", "bee", "cat"]
        assert data.labels == reference.targets
        assert data.names == [Path(path).relative_to(tmp_path).as_posix() for path, _ in reference.imgs]
        assert all(same(data.load(i), reference[i][0]) for i in range(len(data)))
    assert len(open_data(str(tmp_path), "all")) == 18


def test_folder_without_splits_holds_out_by_name(tmp_path: Path) -> None:
    write_tree(tmp_path, [f"{name}/{i}.webp" for name in ("cat", "ant") for i in range(60)])
    train, val, everything = (open_data(str(tmp_path), split) for split in ("train", "val", "all"))
    assert sorted([*train.names, *val.names]) == everything.names and len(everything) == 120
    assert val.names == [name for name in everything.names if name_share(name.removesuffix(".webp")) < 0.05]
    assert train.classes == ["ant", "cat"] and set(train.labels or []) == {0, 1}
    (tmp_path / "cat" / "new.png").write_bytes(encoded(1))
    assert set(val.names) <= set(open_data(str(tmp_path), "val").names)


def test_flat_folder_and_limit(tmp_path: Path) -> None:
    write_tree(tmp_path, [f"x{i:03d}.{kind}" for i, kind in enumerate(["png", "bmp", "tiff", "jpeg", "webp"] * 8)])
    data = open_data(str(tmp_path), "all")
    assert len(data) == 40 and data.labels is None and data.classes is None
    ten, twenty = (open_data(str(tmp_path), "all", limit=n).names for n in (10, 20))
    assert len(ten) == 10 and set(ten) < set(twenty) and ten == sorted(ten) and ten != list(data.names)[:10]
    assert choose_sample(data.names, 100) == list(range(40))
    with pytest.raises(ValueError, match="number of images"):
        open_data(str(tmp_path), limit=0)


def test_layouts() -> None:
    def split_and_class(*paths: str) -> list[tuple[str | None, str | None]]:
        return [entry[1:] for entry in arrange(paths, Counter())]

    assert split_and_class("set/train/a/1.png", "set/val/b/2.png") == [("train", "a"), ("val", "b")]
    assert split_and_class("bus/1.png", "train/2.png") == [(None, "bus"), (None, "train")]
    assert split_and_class("notes/1.png", "train/a/2.png", "val/a/3.png") == [("train", "a"), ("val", "a")]
    assert split_and_class("flowers/rose/1.png", "flowers/lily/2.png") == [(None, "lily"), (None, "rose")]
    assert split_and_class("train/a/1.png", "val/2.png") == [("train", "a"), ("val", None)]


def test_a_class_is_one_however_unicode_writes_it(tmp_path: Path) -> None:
    """macOS writes an accent as a letter of its own; a set that was made on two machines has both."""
    write_tree(tmp_path, ["train/caf\u00e9/1.png", "train/bar/2.png", "val/cafe\u0301/3.png"])
    data = open_data(str(tmp_path), "all")
    assert data.classes == ["bar", "caf\u00e9"] and data.labels == [0, 1, 1]
    (tmp_path / "classes.txt").write_text("cafe\u0301\nbar\n", encoding="utf-8")
    assert for_head(data, 2, head_names(str(tmp_path / "classes.txt"), 2)).labels == [1, 0, 0]


def test_flat_validation_folder_has_no_labels(tmp_path: Path) -> None:
    write_tree(tmp_path, ["train/a/1.png", "train/b/2.png", "val/3.png"])
    assert open_data(str(tmp_path), "train").labels == [0, 1]
    assert open_data(str(tmp_path), "val").labels is None and open_data(str(tmp_path), "val").classes is None


def test_folders_beside_splits_are_left_out_and_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A class may be called as a split is."""
    write_tree(tmp_path, [f"{name}/{i}.png" for name in ("train", "test", "bus") for i in range(2)])
    assert len(open_data(str(tmp_path), "all")) == 4
    told = f"left out of {tmp_path}: images beside the folders of splits (2); convert, repair, unpack or move them"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "hint"),
    [
        ("a.zip", "'{}/*.zip' reads the .zip files in it"),
        ("b/a.tar", "'wds/{}/b/*.tar' reads the .tar files in it"),
        ("a.parquet", "'hf/{}' reads the .parquet files in it"),
    ],
)
def test_archives_in_a_folder_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, hint: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(ValueError, match="no images in folder") as error:
        open_data(str(tmp_path), "all")
    assert str(error.value).endswith(f"; {hint.format(tmp_path)}")
    write_tree(tmp_path, ["a/1.png", "b/2.png"])
    for split in ("train", "val"):
        open_data(str(tmp_path), split)
    kind = Path(file).suffix
    assert capsys.readouterr().err == f"left out of {tmp_path}: {kind} (1); {REMEDY}\n"


def test_a_table_of_labels_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tree(tmp_path, ["images/1.png", "images/2.png"])
    (tmp_path / "images" / "metadata.csv").write_text("file_name,label\n1.png,cat\n")
    (tmp_path / "notes.csv").write_text("")
    open_data(str(tmp_path), "all")
    told = f"{tmp_path}/images/metadata.csv is not read: the classes of images are their folders\n"
    assert capsys.readouterr().err == told


def test_a_file_is_not_taken_for_a_misspelt_name(tmp_path: Path) -> None:
    write_tree(tmp_path, ["1.png", "2.png"])
    (tmp_path / "set.tar.gz").write_bytes(b"")
    for name in ("1.png", "set.tar.gz"):
        with pytest.raises(ValueError, match=f"the file .*{name} is not a set of images: give its folder"):
            open_data(str(tmp_path / name))
