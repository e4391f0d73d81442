"""Zip and tar archives, read in place."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_certified import tiny_vit
from tiny_images import SHARED, SPLIT_TREE, encoded, needs_shared, pixels, same, write_tree

from raptor.data import BadImage, Preprocess, iterate, open_data
from raptor.data.archives import expand_ranges, open_tars
from raptor.subject import Subject


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zips_equal_their_folder(tmp_path: Path, method: int) -> None:
    write_tree(tmp_path / "tree", SPLIT_TREE)
    halves = [SPLIT_TREE[0::2], SPLIT_TREE[1::2]]
    for i, half in enumerate(halves):
        with zipfile.ZipFile(tmp_path / f"part-{i}.zip", "w", method) as archive:
            for path in half:
                archive.write(tmp_path / "tree" / path, path)
            archive.writestr("__MACOSX/._x.png", b"junk")
    folder = open_data(str(tmp_path / "tree"), "val")
    joined = f"{tmp_path}/part-0.zip, {tmp_path}/part-1.zip"
    for spec in (joined, f"{tmp_path}/part-*.zip", f"{tmp_path}/part-{{0..1}}.zip"):
        data = open_data(spec, "val")
        assert (data.names, data.labels, data.classes) == (folder.names, folder.labels, folder.classes)
        assert all(same(data.load(i), folder.load(i)) for i in range(len(data)))


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_archives_of_the_parts_of_one_set_are_one_set_however_they_are_named(kind: str, tmp_path: Path) -> None:
    """One by one as by a pattern, though only one of them has images to train on and each lacks a class."""
    classes = {"train": "xyy", "val": "yz"}
    for number, (part, names) in enumerate(classes.items()):
        files: dict[str, bytes] = {}
        for i, name in enumerate(names):
            if kind == "zip":
                files[f"{part}/{name}/{number}{i}.png"] = encoded(i)
            else:
                files |= {f"{number}{i}.png": encoded(i), f"{number}{i}.cls": name.encode()}
        if kind == "zip":
            with zipfile.ZipFile(tmp_path / f"{part}.zip", "w") as archive:
                for path, content in files.items():
                    archive.writestr(path, content)
        else:
            write_tar(tmp_path / f"{part}.tar", files)
    archives = [str(tmp_path / f"{part}.{kind}") for part in classes]
    for part, num_images in (("train", 3), ("val", 2), ("all", 5)):
        listed, pattern = open_data(archives, part), open_data(f"{tmp_path}/*.{kind}", part)
        assert len(listed) == num_images and listed.names == pattern.names and listed.classes == ["x", "y", "z"]
        assert listed.labels == pattern.labels and listed.fingerprint() == pattern.fingerprint()
    # Where all of them can be trained on, or none, each is a set by itself.
    assert len(open_data([archives[0]] * 2, "train")) == 4 and len(open_data([archives[1]] * 2, "val")) == 2


def test_backslashes_between_the_folders_of_a_zip(tmp_path: Path) -> None:
    """As archivers on Windows write them; the folders themselves are entries too."""
    write_tree(tmp_path / "tree", SPLIT_TREE)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("tree\\pictures.png\\", b"")
        for path in SPLIT_TREE:
            archive.write(tmp_path / "tree" / path, f"tree/{path}".replace("/", "\\"))
    folder, data = open_data(str(tmp_path / "tree"), "val"), open_data(str(tmp_path / "x.zip"), "val")
    assert data.names == [f"tree/{name}" for name in folder.names] and data.keys == folder.keys
    assert (data.labels, data.classes) == (folder.labels, folder.classes)
    assert all(same(data.load(i), folder.load(i)) for i in range(len(data)))


def test_names_in_a_zip_are_read_as_when_it_is_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file, pytest.warns(UserWarning, match="Duplicate name"):
        names = ("./a/1.png", "a/2.png", "/b/3.png", "../b/4.png", "a//5.png", "a/2.png", "b/.hidden/6.png", "c/")
        for seed, name in enumerate(names):
            file.writestr(name, encoded(seed))
    data = open_data(str(tmp_path / "x.zip"), "all")
    assert list(data.names) == ["a/1.png", "a/2.png", "a/5.png", "b/3.png", "b/4.png"]
    assert data.classes == ["a", "b"] and data.labels == [0, 0, 0, 1, 1]
    assert data.left_out == {"files whose name comes again": 1}
    with zipfile.ZipFile(tmp_path / "x.zip") as file:
        file.extractall(tmp_path / "x")
    assert [same(data[i], Image.open(tmp_path / "x" / name)) for i, name in enumerate(data.names)] == [True] * 5


def test_the_image_of_a_tar_sample_is_not_its_mask(tmp_path: Path) -> None:
    """Whatever comes first; hidden files of macOS are none."""
    entries = {"1.depth.png": 5, "1.png": 6, "1.jpg": 7, "./._1.jpg": 8, "./2.png": 9, "2.seg.png": 10}
    kinds = {"png": "png", "jpg": "jpeg"}
    write_tar(tmp_path / "a.tar", {name: encoded(seed, kinds[name[-3:]]) for name, seed in entries.items()})
    data = open_data(f"wds/{tmp_path}/a.tar", "all")
    assert list(data.names) == ["1", "2"]
    found = [data.file(i).read() for i in range(2)]
    assert found == [encoded(7, "jpeg"), encoded(9)]
    write_tar(tmp_path / "b.tar", {f"img.{i}.png": encoded(i) for i in range(3)})
    with pytest.raises(ValueError, match=r"b\.tar holds img\.0\.png and img\.1\.png, which are one sample"):
        open_data(f"wds/{tmp_path}/b.tar", "all")


def test_damaged_zip_entry_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/1.png", encoded(1))
        archive.writestr("a/2.png", encoded(2))
    content = bytearray(path.read_bytes())
    content[80] ^= 0xFF
    path.write_bytes(bytes(content))
    data = open_data(str(path), "all")
    with pytest.raises(BadImage, match=r"a/1\.png.*checksum"):
        data.load(0)
    assert same(data.load(1), pixels(2))


def test_zip_in_forked_workers(tmp_path: Path) -> None:
    """Workers that shared one file position would read each other's bytes."""
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(200):
            archive.writestr(f"{i:03d}.png", encoded(i))
    data = open_data(str(path), "all")
    data.load(0)  # the parent opens its handle before the fork
    preprocess = Preprocess(size=8, resize=8, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    batches = list(iterate(data, preprocess, 5, num_workers=2))
    images = torch.cat([batch.images for batch in batches]).mul(255).round().byte().permute(0, 2, 3, 1)
    assert same(images.numpy(), np.stack([pixels(i) for i in range(200)]))


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def test_tar_shards(tmp_path: Path) -> None:
    for shard in range(3):
        members: dict[str, bytes] = {}
        for i in range(shard * 10, shard * 10 + 10):
            members[f"img{i:03d}.cls"] = str(i % 4).encode()
            members[f"img{i:03d}.{['png', 'webp'][i % 2]}"] = encoded(i, ["png", "webp"][i % 2])
        write_tar(tmp_path / f"shard-{shard:04d}.tar", members)
    data = open_data(f"wds/{tmp_path}/shard-{{0000..0002}}.tar", "all")
    assert data.names == [f"img{i:03d}" for i in range(30)]
    assert data.labels == [i % 4 for i in range(30)] and data.classes == ["0", "1", "2", "3"]
    assert all(same(data.load(i), pixels(i)) for i in (29, 3, 17))
    pattern = f"wds/{tmp_path}/*.tar"
    assert sorted([*open_data(pattern, "train").names, *open_data(pattern, "val").names]) == data.names


def test_tar_shards_with_own_validation_and_json(tmp_path: Path) -> None:
    for part, seeds in (("train", range(6)), ("val", range(6, 8))):
        members: dict[str, bytes] = {}
        for i in seeds:
            members[f"{i}.jpg"] = encoded(i, "jpeg")
            members[f"{i}.json"] = json.dumps({"label": "dog" if i % 2 else "cat", "width": 8}).encode()
        write_tar(tmp_path / f"set-{part}-000.tar", members)
    val = open_data(f"wds/{tmp_path}/set-*-000.tar", "val")
    assert val.names == ["6", "7"] and val.labels == [0, 1] and val.classes == ["cat", "dog"]
    with tarfile.open(tmp_path / "z.tar", "w:gz"):
        pass
    with pytest.raises(ValueError, match="unpack a compressed one"):
        open_data(f"{tmp_path}/z.tar")


def _labelled(labels: dict[str, bytes | None], suffix: str = "cls") -> dict[str, bytes]:
    """Members of a tar: an image for each key, with a label file if it has one."""
    members: dict[str, bytes] = {}
    for seed, (key, label) in enumerate(labels.items()):
        members[f"{key}.png"] = encoded(seed)
        if label is not None:
            members[f"{key}.{suffix}"] = label
    return members


@pytest.mark.parametrize("without", [None, b"-1", b""])
def test_a_sample_without_a_label_does_not_renumber_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], without: bytes | None
) -> None:
    """Class 2 is class 2, though `10` comes before `2` as text."""
    write_tar(tmp_path / "x.tar", _labelled({"a": b"2", "b": b"10", "c": without, "d": b"3"}))
    whole = open_tars(f"{tmp_path}/x.tar")
    assert whole.labels == [2, 10, -1, 3] and whole.classes == [str(i) for i in range(11)]
    assert open_data(f"wds/{tmp_path}/x.tar", "all").labels is None
    assert "the labels of" in capsys.readouterr().err
    assert whole.select([0, 1, 3]).labels == [2, 10, 3]


def test_labels_in_json(tmp_path: Path) -> None:
    def labels(**values: object) -> tuple[list[int] | None, list[str] | None]:
        written = {key: json.dumps({"label": value}).encode() for key, value in values.items()}
        write_tar(tmp_path / "x.tar", _labelled(written, "json"))
        data = open_data(f"wds/{tmp_path}/x.tar", "all")
        return data.labels, data.classes

    assert labels(a="2", b="10", c=1) == ([2, 10, 1], [str(i) for i in range(11)])
    with pytest.raises(ValueError, match="numbers such as 3 and names such as cat: give all samples the same kind"):
        labels(a="cat", b=3)


@pytest.mark.parametrize("label", [1.5, [0, 1], {"id": 3}, float("nan")])
def test_labels_that_are_neither_numbers_nor_names_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], label: object
) -> None:
    content = json.dumps({"label": label}).encode()
    write_tar(tmp_path / "x.tar", _labelled({"a": content, "b": content}, "json"))
    assert open_data(f"wds/{tmp_path}/x.tar", "all").labels is None
    assert "are not used: 2 of its images have none" in capsys.readouterr().err


def test_links_to_labels_and_special_files_are_counted(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", {"a.png": encoded(1), "a.cls": b"1", "b.png": encoded(2)})
    with tarfile.open(tmp_path / "x.tar", "a") as tar:
        for name, kind in (("b.cls", tarfile.LNKTYPE), ("c.png", tarfile.FIFOTYPE), ("d.png", tarfile.GNUTYPE_SPARSE)):
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = "a.cls"
            tar.addfile(info)
    data = open_data(f"{tmp_path}/x.tar", "all")
    assert list(data.names) == ["a", "b"] and data.left_out == {"links": 1, "special files": 2}


def test_archives_without_images_say_what_they_hold(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("a.heic", "b.tar.gz"):
        (tmp_path / "folder" / name).write_bytes(b"x")
    write_tar(tmp_path / "x.tar", {"a.heic": b"x", "b.tar.gz": b"x"})
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.heic", b"x")
        archive.writestr("b.tar.gz", b"x")
    for name in ("folder", "x.tar", "x.zip"):
        with pytest.raises(ValueError, match=r"no images in .*and found \.\w+ \(1\), \.\w+ \(1\)"):
            open_data(str(tmp_path / name))


def test_zips_end_to_end_are_refused(tmp_path: Path) -> None:
    """Only the last would be listed."""
    for seed in range(2):
        with zipfile.ZipFile(tmp_path / f"{seed}.zip", "w") as archive:
            archive.writestr(f"{seed}.png", encoded(seed))
    (tmp_path / "both.zip").write_bytes((tmp_path / "0.zip").read_bytes() + (tmp_path / "1.zip").read_bytes())
    with pytest.raises(ValueError, match="several zips end to end"):
        open_data(f"{tmp_path}/both.zip")
    (tmp_path / "own.zip").write_bytes(b"a program that unpacks itself" + (tmp_path / "1.zip").read_bytes())
    assert same(open_data(f"{tmp_path}/own.zip", "all").load(0), pixels(1))


def _put(offset: int, content: bytes) -> Callable[[Path], None]:
    """Overwrite bytes of the tar."""

    def spoil(path: Path) -> None:
        whole = path.read_bytes()
        path.write_bytes(whole[:offset] + content + whole[offset + len(content) :])

    return spoil


def _cut(num_bytes: int) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes()[:num_bytes]) and None


def _lie_about_a_size(path: Path) -> None:
    info = tarfile.TarInfo("2.png")
    info.size = 2**40
    content = path.read_bytes()
    path.write_bytes(content[: 4 * 512] + info.tobuf() + content[5 * 512 :])


@pytest.mark.parametrize(
    ("spoil", "names", "told"),
    [
        # An image of one block follows each header of one block: the second header is block 2.
        (_put(2 * 512, b"x"), ["0", "2", "3"], "damaged stretches (1)"),
        (_put(2 * 512, bytes(512)), ["0", "2", "3"], "damaged stretches (1)"),
        (_cut(4 * 512 + 300), ["0", "1"], "damaged stretches (1)"),
        (_cut(4 * 512), ["0", "1"], "missing ends of archives (1)"),
        (_cut(5 * 512 + 20), ["0", "1"], "damaged stretches (1)"),
        (_cut(5 * 512 + len(encoded(2))), ["0", "1", "2"], "missing ends of archives (1)"),
        (_put(0, bytes(512)), ["1", "2", "3"], "damaged stretches (1)"),
        (_put(0, b"x"), ["1", "2", "3"], "damaged stretches (1)"),
        (_lie_about_a_size, ["0", "1"], "damaged stretches (1)"),
    ],
)
def test_what_a_damaged_tar_still_holds_is_read_and_the_rest_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], names: list[str], told: str
) -> None:
    path = tmp_path / "x.tar"
    write_tar(path, {f"{i}.png": encoded(i) for i in range(4)})
    spoil(path)
    data = open_data(str(path), "all")
    assert list(data.names) == names and all(same(data.load(i), pixels(int(name))) for i, name in enumerate(names))
    assert data.left_out == {told.removesuffix(" (1)"): 1}
    assert f"left out of wds/{path}: {told}" in capsys.readouterr().err


def test_tars_put_end_to_end_are_read_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in range(2):
        write_tar(tmp_path / f"{part}.tar", {f"{2 * part + i}.png": encoded(2 * part + i) for i in range(2)})
    (tmp_path / "both.tar").write_bytes((tmp_path / "0.tar").read_bytes() + (tmp_path / "1.tar").read_bytes())
    data = open_data(f"{tmp_path}/both.tar", "all")
    assert list(data.names) == ["0", "1", "2", "3"] and all(same(data.load(i), pixels(i)) for i in range(4))
    assert not data.left_out and not capsys.readouterr().err


def test_names_that_come_again_in_a_tar_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two shards that each count from 0, put end to end: of each name the later image is read."""
    for part in range(2):
        write_tar(tmp_path / f"{part}.tar", {f"{i}.png": encoded(2 * part + i) for i in range(2)})
    (tmp_path / "both.tar").write_bytes((tmp_path / "0.tar").read_bytes() + (tmp_path / "1.tar").read_bytes())
    data = open_data(f"{tmp_path}/both.tar", "all")
    assert list(data.names) == ["0", "1"] and all(same(data.load(i), pixels(2 + i)) for i in range(2))
    assert "files whose name comes again (2)" in capsys.readouterr().err


def test_a_tar_with_a_header_for_all_its_entries_is_whole(tmp_path: Path) -> None:
    """As `git archive` writes it."""
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "a"}) as tar:
        for i in range(2):
            info = tarfile.TarInfo(f"{'n' * 120 if i else ''}{i}.png")
            info.size = len(encoded(i))
            tar.addfile(info, io.BytesIO(encoded(i)))
    data = open_data(f"{tmp_path}/x.tar", "all")
    assert len(data) == 2 and not data.left_out


def test_files_that_are_not_read_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Photographs of telephones and archives in archives; JPEG under its other names is read."""
    jpeg = encoded(1, "jpeg")
    files = {
        "a.jfif": jpeg,
        "b.JPE": jpeg,
        "c.heic": b"x",
        "d.HEIC": b"x",
        "more.zip": b"PK",
        "e.txt": b"x",
        ".f.heic": b"x",
    }
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    write_tar(tmp_path / "x.tar", files)
    with tarfile.open(tmp_path / "x.tar", "a") as tar:
        link = tarfile.TarInfo("hard.png")
        link.type = tarfile.LNKTYPE
        link.linkname = "a.jfif"
        tar.addfile(link)
    (tmp_path / "folder").mkdir()
    for name, content in files.items():
        (tmp_path / "folder" / name).write_bytes(content)
    found = {kind: open_data(f"{tmp_path}/{kind}", "all") for kind in ("x.zip", "x.tar", "folder")}
    assert [len(data) for data in found.values()] == [2, 2, 2]
    assert found["x.zip"].left_out == {".heic": 2, ".zip": 1}
    assert found["x.tar"].left_out == {".heic": 2, ".zip": 1, "links": 1}
    assert found["folder"].left_out == {".heic": 2, ".zip": 1}
    assert Subject.of(tiny_vit(), found["x.zip"]).left_out == {".heic": 2, ".zip": 1}
    told = capsys.readouterr().err
    for name in ("x.zip", "folder"):
        assert (
            f"left out of {tmp_path}/{name}: .heic (2), .zip (1); convert, repair, unpack or move them to use them"
            in told
        )


def test_ranges_of_files() -> None:
    assert expand_ranges("s-{08..10}.tar") == ["s-08.tar", "s-09.tar", "s-10.tar"]
    assert expand_ranges("{1..2}/{7..8}.zip") == ["1/7.zip", "1/8.zip", "2/7.zip", "2/8.zip"]
    assert expand_ranges("a{1..") == ["a{1.."]
    with pytest.raises(ValueError, match="backwards"):
        expand_ranges("a{3..1}")


@needs_shared
def test_real_zips() -> None:
    spec = ",".join(str(SHARED / f"imagenet-20-{part}.zip") for part in ("train-0", "train-1", "val"))
    train, val = open_data(spec, "train"), open_data(spec, "val")
    assert (len(train), len(val)) == (18_494, 2_392)
    assert train.classes == val.classes and train.classes is not None and len(train.classes) == 20
    assert train.labels is not None
    for i in range(0, len(train), 2_000):
        assert train.load(i).size == (160, 160)
        assert train.classes[train.labels[i]] == train.names[i].split("/")[1]
    only_train = str(SHARED / "imagenet-20-train-0.zip")
    held_out = len(open_data(only_train, "val"))
    assert held_out + len(open_data(only_train, "train")) == 9_247
    assert held_out == pytest.approx(0.05 * 9_247, abs=4 * (9_247 * 0.05 * 0.95) ** 0.5)
    with pytest.raises(ValueError, match="no train images"):
        open_data(str(SHARED / "imagenet-20-val.zip"), "train")
