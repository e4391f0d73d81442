"""The same images are held out however the data is addressed."""

from __future__ import annotations

import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from PIL import Image
from tiny_images import pixels, write_hashed

from raptor.data import open_data
from raptor.data.split import choice_split, choose_sample, split_keys


def _tar(path: Path, root: Path, names: list[str]) -> None:
    with tarfile.open(path, "w") as tar:
        for name in names:
            tar.add(root / name, name)


@pytest.mark.parametrize("repeated", [False, True])
def test_every_address_holds_out_the_same_images(tmp_path: Path, repeated: bool) -> None:
    """`photos/`, its parent, a link, a copy, its zip, two zips, one tar shard, two shards."""
    paths = [f"{c}/{i if repeated else 100 * n + i}.jpg" for n, c in enumerate(("cat", "dog")) for i in range(60)]
    root = tmp_path / "above" / "photos"
    write_hashed(root, paths)
    (tmp_path / "link").symlink_to(root)
    shutil.copytree(root, tmp_path / "copied")
    with zipfile.ZipFile(tmp_path / "p.zip", "w") as whole:
        for path in paths:
            whole.write(root / path, f"photos/{path}")
    for part in (0, 1):
        with zipfile.ZipFile(tmp_path / f"half-{part}.zip", "w") as half:
            for path in paths[part::2]:
                half.write(root / path, path)
        _tar(tmp_path / f"shard-{part}.tar", root, paths[part::2])
    _tar(tmp_path / "one.tar", root.parent, [f"photos/{path}" for path in paths])
    specs = [
        str(root),
        str(root.parent),
        str(tmp_path / "link"),
        str(tmp_path / "copied"),
        str(tmp_path / "p.zip"),
        f"{tmp_path}/half-0.zip,{tmp_path}/half-1.zip",
        f"wds/{tmp_path}/shard-{{0..1}}.tar",
        f"{tmp_path}/one.tar",
    ]
    relative = os.path.relpath(root)
    found = {spec: open_data(spec, "val") for spec in [*specs, relative]}
    wanted = set(found[specs[0]].keys)
    assert 1 <= len(wanted) < 30 and len(wanted) == len(found[specs[0]])
    for spec, data in found.items():
        assert set(data.keys) == wanted, spec
        train = open_data(spec, "train")
        assert not set(train.keys) & wanted and len(train) + len(data) == 120
        assert {train.keys[i] for i in choice_split(train.keys)[1]} == {
            open_data(specs[0], "train").keys[i] for i in choice_split(open_data(specs[0], "train").keys)[1]
        }
        assert set(open_data(spec, "train", limit=9).keys) == set(open_data(specs[0], "train", limit=9).keys)
        assert data.fingerprint() == found[specs[0]].fingerprint(), spec
    Image.fromarray(pixels(999)[:3]).save(root / found[specs[0]].names[0])
    assert open_data(specs[0], "val").fingerprint() != found[specs[4]].fingerprint()


def test_one_class_folder_of_several(tmp_path: Path) -> None:
    """Where names do not repeat, a class folder by itself keeps the split of the whole."""
    write_hashed(tmp_path, [f"{c}/{c}{i}.png" for c in ("cat", "dog") for i in range(60)])
    whole = open_data(str(tmp_path), "val").keys
    assert [key for key in whole if key.startswith("cat")] == open_data(str(tmp_path / "cat"), "val").keys


def test_keys() -> None:
    assert split_keys(["a/1.jpg", "train/b/2.JPEG", "c/x.y.png", "v1.0"]) == ["1", "2", "x.y", "v1.0"]
    assert split_keys(["p/a/1.jpg", "b/1.png", "3.jpg"]) == ["a/1", "b/1", "3"]
    assert split_keys(["cafe\u0301.jpg"]) == split_keys(["caf\u00e9.jpg"])  # as a Mac and a zip write it
    assert choose_sample(["b", "a", "c"], 2) == sorted(choose_sample(["b", "a", "c"], 2))


def test_parts_by_name(tmp_path: Path) -> None:
    write_hashed(tmp_path, [f"{part}/a/{part}{i}.png" for part in ("train", "val", "test") for i in range(4)])
    assert {n.split("/")[0] for n in open_data(str(tmp_path), "test").names} == {"test"}
    assert {n.split("/")[0] for n in open_data(str(tmp_path), "val").names} == {"val"}
    assert len(open_data(str(tmp_path), "all")) == 8
    with pytest.raises(ValueError, match=r"unknown split 'dev' of .*; use train, val, all, test"):
        open_data(str(tmp_path), "dev")
