"""The index of a large set: the same images as a listing, read without listing, and never an old one."""

from __future__ import annotations

import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_images import write_tree

from raptor.data import ImageData, Preprocess, iterate, open_data
from raptor.data import archives as archives_module
from raptor.data import folder as folder_module
from raptor.data import index as index_module

PATHS = [f"{part}/{name}/{i}.png" for part in ("train", "val") for name in ("cat", "dög") for i in range(4)]


def make_old(root: Path) -> None:
    """Set the times of all files and folders back, because an index is not kept of what has just changed."""
    for path in [root, *root.rglob("*")]:
        os.utime(path, (1e9, 1e9))


def as_folder(root: Path) -> str:
    write_tree(root / "photos", PATHS)
    return str(root / "photos")


def as_zip(root: Path) -> str:
    write_tree(root / "photos", PATHS)
    with zipfile.ZipFile(root / "photos.zip", "w") as archive:
        for path in PATHS:
            archive.write(root / "photos" / path, path)
    return str(root / "photos.zip")


def as_tars(root: Path) -> str:
    write_tree(root / "photos", PATHS)
    for part in ("train", "val"):
        with tarfile.open(root / f"{part}-0.tar", "w") as archive:
            for path in (path for path in PATHS if path.startswith(part)):
                archive.add(root / "photos" / path, path.replace("/", "-"))
                (root / "label").write_text(path.split("/")[1])
                archive.add(root / "label", path.replace("/", "-").replace(".png", ".cls"))
    return f"wds/{root}/train-0.tar,{root}/val-0.tar"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(index_module, "MIN_IMAGES", 5)
    monkeypatch.setenv("RAPTOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "index"


@pytest.fixture
def no_listing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on a listing fails."""

    def forbid() -> None:
        listed_again = lambda *_: pytest.fail("listed again")  # noqa: E731
        monkeypatch.setattr(folder_module, "_list_folder", listed_again)
        monkeypatch.setattr(archives_module, "_list_zips", listed_again)
        monkeypatch.setattr(archives_module, "_list_tars", listed_again)

    return forbid


def content(data: ImageData) -> list[object]:
    images = torch.cat([batch.images for batch in iterate(data, Preprocess(size=8, resize=8), 3)])
    rows = [*data.names], [*data.keys], data.labels, data.classes, data.parts
    return [*rows, data.sample(3), data.fingerprint(), images.tolist()]


@pytest.mark.parametrize("make", [as_folder, as_zip, as_tars])
def test_the_index_gives_what_a_listing_gives(make, tmp_path: Path, cache: Path, no_listing: Callable) -> None:
    spec = make(tmp_path)
    listed = [content(open_data(spec, split)) for split in ("train", "val", "all")]
    assert not cache.exists()  # the data is only a moment old
    make_old(tmp_path)
    open_data(spec, "all")
    assert len(list(cache.iterdir())) == 1
    no_listing()
    assert [content(open_data(spec, split)) for split in ("train", "val", "all")] == listed


@pytest.mark.parametrize("make", [as_folder, as_zip, as_tars])
def test_an_old_index_is_not_used(make: Callable, tmp_path: Path, cache: Path) -> None:
    spec = make(tmp_path)
    make_old(tmp_path)
    before = len(open_data(spec, "all"))
    added = tmp_path / "photos" / "train" / "cat" / "new.png"
    added.write_bytes((tmp_path / "photos" / PATHS[0]).read_bytes())
    if make is as_zip:
        with zipfile.ZipFile(tmp_path / "photos.zip", "a") as archive:
            archive.write(added, "train/cat/new.png")
    elif make is as_tars:
        with tarfile.open(tmp_path / "train-0.tar", "a") as archive:
            archive.add(added, "new.png")
    assert len(open_data(spec, "all")) == before + 1


SPOILED = [lambda b: b"", lambda b: b[:-9], lambda b: b.replace(b'"about"', b'"tuoba"'), lambda b: b"{" * 99]


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_broken_index_is_made_again(spoil: Callable[[bytes], bytes], tmp_path: Path, cache: Path) -> None:
    spec = as_folder(tmp_path)
    make_old(tmp_path)
    whole = content(open_data(spec, "all"))
    (kept,) = cache.iterdir()
    good = kept.read_bytes()
    kept.write_bytes(spoil(good))
    assert content(open_data(spec, "all")) == whole
    assert kept.read_bytes() == good


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch, capsys) -> None:
    spec = as_folder(tmp_path)
    make_old(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAPTOR_CACHE", str(tmp_path / "file"))
    assert len(open_data(spec, "all")) == len(PATHS)
    (line,) = capsys.readouterr().err.splitlines()
    assert "RAPTOR_CACHE" in line and str(tmp_path / "file") in line


def test_small_sets_leave_no_index(tmp_path: Path, cache: Path, monkeypatch) -> None:
    monkeypatch.setattr(index_module, "MIN_IMAGES", len(PATHS) + 1)
    spec = as_folder(tmp_path)
    make_old(tmp_path)
    open_data(spec, "all")
    assert not cache.exists()
