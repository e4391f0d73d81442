"""Bad, odd and enormous images, in folders, zips and tars: one line that names the image, or features of it."""

from __future__ import annotations

import io
import os
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_world import Case, bomb_png, check, check_refusal, noise, png, run_words, write_tar, write_zip
from PIL import ExifTags, Image
from tiny_images import encoded

from raptor.data import open_data
from raptor.data.archives import list_files

GOOD = encoded(0)


def animated() -> bytes:
    frames = [Image.new("P", (8, 8), i) for i in range(3)]
    stream = io.BytesIO()
    frames[0].save(stream, "gif", save_all=True, append_images=frames[1:])
    return stream.getvalue()


def as_mode(mode: str, kind: str, size: tuple[int, int] = (8, 8)) -> bytes:
    return png(mode, size, kind)


WORKS: dict[str, tuple[str, bytes]] = {
    "cmyk": ("x.jpg", as_mode("CMYK", "jpeg")),
    "cmyk tiff": ("x.tif", as_mode("CMYK", "tiff")),
    "greyscale": ("x.png", as_mode("L", "png")),
    "1 bit": ("x.png", as_mode("1", "png")),
    "16 bit": ("x.png", as_mode("I;16", "png")),
    "alpha": ("x.png", as_mode("RGBA", "png")),
    "grey with alpha": ("x.png", as_mode("LA", "png")),
    "palette": ("x.png", as_mode("P", "png")),
    "YCbCr": ("x.jpg", as_mode("YCbCr", "jpeg")),
    "Lab": ("x.tif", as_mode("LAB", "tiff")),
    "animated": ("x.gif", animated()),
    "webp": ("x.webp", as_mode("RGB", "webp")),
    "bmp": ("x.bmp", as_mode("RGB", "bmp")),
    "ppm": ("x.ppm", as_mode("RGB", "ppm")),
    "one pixel": ("x.png", as_mode("RGB", "png", (1, 1))),
    "odd size": ("x.png", as_mode("RGB", "png", (7, 13))),
    "very wide": ("x.png", as_mode("RGB", "png", (60000, 1))),
    "very tall": ("x.png", as_mode("RGB", "png", (1, 60000))),
    "png named jpg": ("x.jpg", GOOD),
    "jpg named png": ("x.png", as_mode("RGB", "jpeg")),
    "upper case": ("X.PNG", GOOD),
    "spaces": ("my image.png", GOOD),
    "unicode": ("é ü 猫.png", GOOD),
    "a leading dash": ("-x.png", GOOD),
    "a newline": ("a\nb.png", GOOD),
    "a quote": ("'\".png", GOOD),
    "a percent": ("%s%d.png", GOOD),
    "braces": ("{1..9}.png", GOOD),
    "two dots": ("a..b.png", GOOD),
    "bytes after the end": ("x.png", GOOD + noise()),
}
REFUSED: dict[str, bytes] = {
    "empty": b"",
    "one byte": b"\x89",
    "noise": noise(),
    "text": b"this is no image",
    "html of a failed download": b"<!DOCTYPE html><html><body>404</body></html>",
    "a git lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "an interrupted download": encoded(1)[: len(encoded(1)) // 2],
    "only a header": encoded(1)[:33],
    "a truncated jpeg": as_mode("RGB", "jpeg", (64, 64))[:300],
    "a bomb": bomb_png(60000),
    "a bigger bomb": bomb_png(2**31 - 1),
    "zero pixels": bomb_png(0),
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    "a pickle": b"cos\nsystem\n(S'touch canary'\ntR.",
    "a zip": b"PK\x03\x04" + noise(),
    "32 bit": as_mode("I", "tiff"),
    "float": as_mode("F", "tiff"),
}


def folder_with(root: Path, name: str, content: bytes) -> Path:
    (root / "pictures").mkdir()
    (root / "pictures" / name).write_bytes(content)
    return root / "pictures"


def states(data: str, out: Path, *more: str) -> list[str]:
    return ["states", "teacher", f"--data={data}", "--split", "all", "--out", str(out), *more]


@pytest.mark.parametrize("name", WORKS)
def test_odd_images_work(name: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    data = folder_with(tmp_path, *WORKS[name])
    found = run_words(states(str(data), tmp_path / "out"), capsys)
    assert found.code == 0, found.err
    assert np.isfinite(np.load(tmp_path / "out" / "layer4.cls.npy")).all()


def test_a_photograph_taken_sideways_is_seen_upright(world: Path, tmp_path: Path, capsys: Any) -> None:
    exif, rows = Image.Exif(), []
    exif[ExifTags.Base.Orientation] = 6
    photo = Image.open(io.BytesIO(encoded(3))).resize((60, 40))
    for name, image in (("turned", photo), ("upright", photo.rotate(-90, expand=True))):
        (tmp_path / name).mkdir()
        image.save(tmp_path / name / "x.png", exif=exif if name == "turned" else None)
        found = run_words(states(str(tmp_path / name), tmp_path / f"{name}-out"), capsys)
        assert found.code == 0, found.err
        rows.append(np.load(tmp_path / f"{name}-out" / "layer4.cls.npy"))
    assert np.array_equal(*rows)


@pytest.mark.parametrize("name", REFUSED)
def test_bad_images_are_named(name: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    data = folder_with(tmp_path, "bad.png", REFUSED[name])
    check_refusal(run_words(states(str(data), tmp_path / "out"), capsys), "bad.png", "--skip_bad")


@pytest.mark.parametrize("name", REFUSED)
def test_bad_images_are_skipped(name: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    data = folder_with(tmp_path, "bad.png", REFUSED[name])
    (data / "good.png").write_bytes(GOOD)
    found = run_words(states(str(data), tmp_path / "out", "--skip_bad"), capsys)
    assert found.code == 0, found.err
    rows = np.load(tmp_path / "out" / "layer4.cls.npy")
    assert len(rows) == 1 and np.isfinite(rows).all()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


NO_FILES: dict[str, Callable[[Path], None]] = {
    "a pipe": fifo,
    "an endless device": link_to("/dev/zero"),
    "a terminal": link_to("/dev/tty"),
    "a dead link": link_to("nowhere.png"),
    "a link to itself": link_to("bad.png"),
    "a terabyte of nothing": sparse,
}


@pytest.mark.parametrize("skip", [False, True], ids=["stops", "skips"])
@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file_never_hangs(name: str, skip: bool, world: Path, tmp_path: Path, capsys: Any) -> None:
    data = folder_with(tmp_path, "good.png", GOOD)
    NO_FILES[name](data / "bad.png")
    words = states(str(data), tmp_path / "out", *(["--skip_bad"] if skip else []))
    found = run_words(words, capsys)
    if skip:
        assert found.code == 0, found.err
    else:
        check_refusal(found, "bad.png", "--skip_bad")


FOLDERS: dict[str, tuple[list[str], str, str]] = {
    "empty": ([], "no images", "expected files"),
    "only text": (["notes.txt"], "no images", "expected files"),
    "only hidden": ([".hidden.png", ".dir/a.png"], "no images", "expected files"),
    "only a resource fork": (["__MACOSX/a.png"], "no images", "expected files"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_without_images(name: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    paths, thing, remedy = FOLDERS[name]
    (tmp_path / "data").mkdir()
    for path in paths:
        (tmp_path / "data" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / path).write_bytes(GOOD)
    check_refusal(run_words(states(str(tmp_path / "data"), tmp_path / "out"), capsys), thing, remedy)


def test_links_in_a_circle(world: Path, tmp_path: Path, capsys: Any) -> None:
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / f"{name}.png").write_bytes(GOOD)
    (tmp_path / "data" / "a" / "up").symlink_to("..")
    assert len(open_data(str(tmp_path / "data"), "all")) == 2  # a link to a folder it lies in adds nothing
    for name, other in (("a", "b"), ("b", "a")):
        for i in range(3):
            (tmp_path / "data" / name / f"to{i}").symlink_to(f"../{other}")
    check_refusal(run_words(states(str(tmp_path / "data"), tmp_path / "out"), capsys), "circle", "remove the link")


def test_one_class_trains_no_probe_but_gives_features(world: Path, tmp_path: Path, capsys: Any) -> None:
    for i in range(4):
        folder = tmp_path / "data" / ("train" if i < 3 else "val") / "only"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.png").write_bytes(encoded(i))
    assert run_words(states(str(tmp_path / "data"), tmp_path / "out"), capsys).code == 0
    words = ["teacher", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "none")]
    found = run_words(["probe", *words, "--closed_form", "ridge"], capsys)
    check_refusal(found, "are of one class", "a probe needs two or more")
    found = run_words(["train-teacher", *words[1:], "--budget", "1steps"], capsys)
    check_refusal(found, "has one class only", "a classifier needs two or more")


def test_a_class_that_no_training_image_has_is_told_of(world: Path, tmp_path: Path, capsys: Any) -> None:
    """`Cat` in train and `cat` in val: the accuracy can only be low."""
    for i, path in enumerate(("train/Cat/1", "train/Cat/2", "train/dog/3", "train/dog/4", "val/cat/5", "val/dog/6")):
        (tmp_path / "data" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / f"{path}.png").write_bytes(encoded(i))
    words = [
        "probe",
        "teacher",
        "--data",
        str(tmp_path / "data"),
        "--closed_form",
        "ridge",
        "--out",
        str(tmp_path / "o"),
    ]
    found = run_words(words, capsys)
    assert found.code == 0 and "no training image is of class cat" in found.err


@pytest.mark.parametrize("name", ["caf\udce9", "<script>alert(1)</script>", "猫", "a b", "-rf", "%n", "\x1b[31mred"])
def test_class_names(name: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    """Names that are not UTF-8 (here the byte e9), and others that are none of a terminal's business."""
    for start, part in enumerate(("train", "val")):
        for other in ("ant", name.replace("/", "_")):
            folder = tmp_path / "data" / part / other
            folder.mkdir(parents=True)
            for i in range(2):
                (folder / f"{i}.png").write_bytes(encoded(2 * start + i))
    found = run_words(
        ["probe", "teacher", f"--data={tmp_path / 'data'}", "--closed_form", "ridge", "--out", str(tmp_path / "out")],
        capsys,
    )
    assert found.code == 0, found.err
    (tmp_path / "out" / "probe-classify.json").read_text(encoding="utf-8").encode("utf-8")
    data = open_data(str(tmp_path / "data"), "all")
    assert data.classes is not None and all(text.encode("utf-8") for text in data.classes)


# Archives.


def tar_of(labels: dict[str, bytes]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for i, (suffix, content) in enumerate(labels.items()):
        files |= {f"{i}.png": encoded(i), f"{i}.{suffix.split()[0]}": content}
    return files


TARS: dict[str, tuple[dict[str, bytes], str, str]] = {
    "a huge label": (tar_of({"cls": b"999999999999"}), "999999999999", "less than 1,000,000"),
    "a huge label in JSON": (tar_of({"json": b'{"label": 999999999999}'}), "999999999999", "less than 1,000,000"),
    "no images": ({"a.txt": b"x"}, "no images", "expected entries"),
    "a damaged image": ({"a.png": noise()}, "cannot read image a", "--skip_bad"),
}


@pytest.mark.parametrize("name", TARS)
def test_bad_tars(name: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    files, thing, remedy = TARS[name]
    path = write_tar(tmp_path / "x.tar", files)
    check_refusal(run_words(states(f"wds/{path}", tmp_path / "out"), capsys), thing, remedy)


TAR_LABELS = {
    "many digits": b"9" * 5000,
    "not UTF-8": b"\xff\xfe",
    "empty": b"",
    "an exponent": b"1e400",
    "superscript": "²".encode(),
    "a script": b"<script>",
}


@pytest.mark.parametrize("name", TAR_LABELS)
def test_odd_labels_of_a_tar(name: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    path = write_tar(tmp_path / "x.tar", tar_of({"cls": TAR_LABELS[name], "json": b"[" * 5000}))
    assert run_words(states(f"wds/{path}", tmp_path / "out"), capsys).code == 0


ARCHIVES: dict[str, tuple[str, bytes]] = {
    "an empty zip": ("x.zip", b""),
    "a zip of noise": ("x.zip", noise()),
    "a zip of text": ("x.zip", b"not a zip"),
    "a truncated zip": ("x.zip", b"PK\x03\x04" + bytes(30)),
    "an empty tar": ("x.tar", b""),
    "a tar of noise": ("x.tar", noise() * 4),
    "a gzip named tar": ("x.tar", b"\x1f\x8b\x08" + noise()),
    "a zip named tar": ("x.tar", b"PK\x03\x04" + noise() * 4),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_bad_archives(name: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    file, content = ARCHIVES[name]
    (tmp_path / file).write_bytes(content)
    found = run_words(states(str(tmp_path / file), tmp_path / "out"), capsys)
    check_refusal(found, file, "")
    assert any(word in found.err for word in ("make it again", "unpack", "expected")), found.err


def cut_tar(path: Path) -> None:
    write_tar(path, {f"{i}.png": encoded(i) for i in range(3)})
    path.write_bytes(path.read_bytes()[:700])


def test_a_cut_tar_names_its_image(world: Path, tmp_path: Path, capsys: Any) -> None:
    cut_tar(tmp_path / "x.tar")
    found = run_words(states(f"wds/{tmp_path / 'x.tar'}", tmp_path / "out"), capsys)
    check_refusal(found, "x.tar", "")


def test_a_zip_that_lies_about_its_sizes(world: Path, tmp_path: Path, capsys: Any) -> None:
    """A stream that would inflate to far more than its entry says is read no further than that."""
    path = write_zip(tmp_path / "x.zip", {"a/0.png": b"\0" * 5_000_000})
    content = bytearray(path.read_bytes())
    place = content.rfind(b"PK\x01\x02")
    content[place + 24 : place + 28] = struct.pack("<I", 100)
    path.write_bytes(content)
    check_refusal(run_words(states(str(path), tmp_path / "out"), capsys), "a/0.png", "--skip_bad")


def test_an_encrypted_zip(world: Path, tmp_path: Path, capsys: Any) -> None:
    path = write_zip(tmp_path / "x.zip", {"a/0.png": GOOD})
    content = bytearray(path.read_bytes())
    content[content.rfind(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    check_refusal(run_words(states(str(path), tmp_path / "out"), capsys), "encrypted", "zip -0")


def test_a_zip_with_an_entry_outside_the_file(world: Path, tmp_path: Path, capsys: Any) -> None:
    path = write_zip(tmp_path / "x.zip", {"a/0.png": GOOD})
    content = bytearray(path.read_bytes())
    place = content.rfind(b"PK\x01\x02")
    content[place + 42 : place + 46] = struct.pack("<I", 2**31)
    path.write_bytes(content)
    check_refusal(run_words(states(str(path), tmp_path / "out"), capsys), "x.zip", "")


def test_an_lzma_zip(world: Path, tmp_path: Path, capsys: Any) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a/0.png", GOOD)
    check_refusal(run_words(states(str(tmp_path / "x.zip"), tmp_path / "out"), capsys), "oddly compressed", "zip -0")


def test_a_pipe_named_tar(world: Path, tmp_path: Path, capsys: Any) -> None:
    os.mkfifo(tmp_path / "x.tar")
    check_refusal(run_words(states(f"wds/{tmp_path / 'x.tar'}", tmp_path / "out"), capsys), "x.tar", "check the path")


PATTERNS = {
    "a long range": ("a{1..10000000000}.tar", "shorter range"),
    "a range of ranges": ("{1..9999}{1..9999}{1..9999}.tar", "shorter range"),
    "digits without end": ("{1.." + "9" * 5000 + "}.tar", "check the path"),
    "many braces": ("{" * 5000 + "}" * 5000, "check the path"),
    "many ranges": ("{0..0}" * 5000, "check the path"),
    "an open brace": ("{1..9", "check the path"),
    "backwards": ("{9..1}.tar", "runs backwards"),
    "nothing": ("", "check the path"),
    "a null byte": ("a\0b.tar", "check the path"),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_of_files(name: str) -> None:
    pattern, remedy = PATTERNS[name]
    with pytest.raises(ValueError, match=remedy) as error:
        list_files(pattern)
    assert "\n" not in str(error.value) and len(str(error.value)) < 12000


CIFAR = {
    "nothing": {},
    "noise": {"batches.meta": noise()},
    "text": {"batches.meta": b"hello"},
    "a list": {"batches.meta": b"\x80\x02]q\x00."},
    "no batches": {"batches.meta": b"\x80\x02}q\x00."},
}


@pytest.mark.parametrize("name", CIFAR)
def test_bad_cifar(name: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for file, content in CIFAR[name].items():
        (folder / file).write_bytes(content)
    found = run_words(states(f"cifar10:{folder}", tmp_path / "out"), capsys)
    check_refusal(found, "cifar", "")


def test_random_bytes_are_never_a_traceback(world: Path, tmp_path: Path, capsys: Any) -> None:
    """A hundred images with flipped bytes: each is read or named."""
    rng = random.Random(0)
    data = tmp_path / "data"
    data.mkdir()
    for i in range(100):
        content = bytearray(as_mode("RGB", ["png", "jpeg", "gif", "webp", "tiff"][i % 5], (16, 16)))
        for _ in range(8):
            content[rng.randrange(len(content))] = rng.randrange(256)
        (data / f"{i}.{['png', 'jpg', 'gif', 'webp', 'tif'][i % 5]}").write_bytes(content)
    assert run_words(states(str(data), tmp_path / "out", "--skip_bad"), capsys).code == 0


WORDS = [
    Case("spaces", "states teacher --data 'my images' --out 'OUT a b'"),
    Case("unicode", "states teacher --data bilder-ü --out OUT-é"),
    Case("a leading dash", "states teacher --data ./-images --out=OUT"),
    Case("a trailing slash", "states teacher/ --data images/ --out OUT/"),
    Case("dots", "states ./teacher/../teacher --data ./images/. --out OUT"),
]


@pytest.mark.parametrize("case", WORDS, ids=lambda case: case.name)
def test_paths(case: Case, world: Path, tmp_path: Path, capsys: Any) -> None:
    for name in ("my images", "bilder-ü", "-images"):
        if not (world / name).exists():
            (world / name).symlink_to("images")
    check(case, tmp_path / "out", capsys)
