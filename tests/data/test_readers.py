from __future__ import annotations

import hashlib
import io
import json
import pickle
import struct
import tarfile
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100, ImageFolder

from raptor.data import BadImage, Preprocess, iterate, open_data
from raptor.data.archives import expand_braces
from raptor.data.cifar import LAYOUTS
from raptor.data.folder import arrange
from raptor.data.split import choose_sample, name_share, split_word

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder of real images is not here")


def pixels(seed: int, side: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def same(left: Any, right: Any) -> bool:
    return np.array_equal(np.asarray(left), np.asarray(right))


def encoded(seed: int, kind: str = "png") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels(seed)).save(stream, kind, **({"lossless": True} if kind == "webp" else {}))
    return stream.getvalue()


def write_tree(root: Path, paths: list[str]) -> None:
    for seed, path in enumerate(paths):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(encoded(seed, path.rsplit(".", 1)[1]))


SPLIT_TREE = [f"{part}/{name}/{i}.png" for part in ("train", "val") for name in ("cat", "ant", "bee") for i in range(3)]


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
    assert sorted(train.names + val.names) == everything.names and len(everything) == 120
    assert val.names == [name for name in everything.names if name_share(name) < 0.05]
    assert train.classes == ["ant", "cat"] and set(train.labels or []) == {0, 1}
    (tmp_path / "cat" / "new.png").write_bytes(encoded(1))
    assert set(val.names) <= set(open_data(str(tmp_path), "val").names)


def test_share_is_known_and_uniform() -> None:
    """The split must never change between versions: values by hand from BLAKE2b."""
    digest = hashlib.blake2b(b"cat/1.png", digest_size=8).hexdigest()
    assert name_share("cat/1.png") == name_share("train/cat/1.png") == pytest.approx(int(digest, 16) / 2**64, abs=1e-15)
    shares = np.array([name_share(f"image_{i}.jpg") for i in range(20_000)])
    assert np.abs(np.sort(shares) - np.linspace(0, 1, 20_000)).max() < 1.63 / np.sqrt(20_000)  # KS test at 1 %
    assert (shares < 0.05).mean() == pytest.approx(0.05, abs=0.005)


def test_flat_folder_and_limit(tmp_path: Path) -> None:
    write_tree(tmp_path, [f"x{i:03d}.{kind}" for i, kind in enumerate(["png", "bmp", "tiff", "jpeg", "webp"] * 8)])
    data = open_data(str(tmp_path), "all")
    assert len(data) == 40 and data.labels is None and data.classes is None
    ten, twenty = (open_data(str(tmp_path), "all", limit=n).names for n in (10, 20))
    assert len(ten) == 10 and set(ten) < set(twenty) and ten == sorted(ten) and ten != data.names[:10]
    assert choose_sample(data.names, 100) == list(range(40))
    with pytest.raises(ValueError, match="limit"):
        open_data(str(tmp_path), limit=0)


def test_layouts() -> None:
    def split_and_class(*paths: str) -> list[tuple[str | None, str | None]]:
        return [(entry.part, entry.class_name) for entry in arrange(paths)]

    assert split_and_class("set/train/a/1.png", "set/val/b/2.png") == [("train", "a"), ("val", "b")]
    assert split_and_class("bus/1.png", "train/2.png") == [(None, "bus"), (None, "train")]
    assert split_and_class("notes/1.png", "train/a/2.png", "val/a/3.png") == [("train", "a"), ("val", "a")]
    assert split_and_class("flowers/rose/1.png", "flowers/lily/2.png") == [(None, "lily"), (None, "rose")]
    assert split_and_class("train/a/1.png", "val/2.png") == [("train", "a"), ("val", None)]


def test_flat_validation_folder_has_no_labels(tmp_path: Path) -> None:
    write_tree(tmp_path, ["train/a/1.png", "train/b/2.png", "val/3.png"])
    assert open_data(str(tmp_path), "train").labels == [0, 1]
    assert open_data(str(tmp_path), "val").labels is None and open_data(str(tmp_path), "val").classes is None


def test_unknown_data_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    cases = {
        "cifar-10": "did you mean cifar10",
        "scene": "did you mean scenes",
        "hf:user/set": "did you mean hf/user/set",
        str(tmp_path / "photo"): "did you mean .*photos",
        "": "give a folder",
        str(tmp_path / "photos"): "no images in folder",
        str(tmp_path / "no.zip"): "no file",
        f"wds/{tmp_path}/x-{{0..1}}.tar": "no file",
    }
    for spec, message in cases.items():
        with pytest.raises(ValueError, match=message) as caught:
            open_data(spec)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="unknown split"):
        open_data("scenes", "dev")  # type: ignore[arg-type]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_images_are_named(tmp_path: Path, num_workers: int) -> None:
    write_tree(tmp_path, [f"{i}.png" for i in range(6)])
    (tmp_path / "2.png").write_bytes(b"no image")
    (tmp_path / "4.png").write_bytes((tmp_path / "4.png").read_bytes()[:60])
    preprocess = Preprocess(size=8, resize=8)
    with pytest.raises(BadImage, match=r"2\.png") as caught:
        list(iterate(open_data(str(tmp_path), "all"), preprocess, 4, num_workers=num_workers))
    assert "\n" not in str(caught.value)
    data = open_data(str(tmp_path), "all", skip_bad=True)
    for _ in range(2):
        batches = list(iterate(data, preprocess, 4, num_workers=num_workers))
        assert torch.cat([batch.indices for batch in batches]).tolist() == [0, 1, 3, 5]
        assert data.bad == ["2.png", "4.png"]


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
    for spec in (
        joined,
        f"{tmp_path}/part-*.zip",
        f"{tmp_path}/part-{{0..1}}.zip",
        f"{tmp_path}/{{part-0,part-1}}.zip",
    ):
        data = open_data(spec, "val")
        assert (data.names, data.labels, data.classes) == (folder.names, folder.labels, folder.classes)
        assert all(same(data.load(i), folder.load(i)) for i in range(len(data)))
    assert open_data("part-0.zip,part-1.zip", "val", root=str(tmp_path)).names == folder.names


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
    assert sorted(open_data(pattern, "train").names + open_data(pattern, "val").names) == data.names


def test_tar_shards_with_own_validation_and_json(tmp_path: Path) -> None:
    for part, seeds in (("train", range(6)), ("val", range(6, 8))):
        members: dict[str, bytes] = {}
        for i in seeds:
            members[f"{i}.jpg"] = encoded(i, "jpeg")
            members[f"{i}.json"] = json.dumps({"label": "dog" if i % 2 else "cat", "width": 8}).encode()
        write_tar(tmp_path / f"set-{part}-000.tar", members)
    val = open_data(f"wds/{tmp_path}/set-{{train,val}}-000.tar", "val")
    assert val.names == ["6", "7"] and val.labels == [0, 1] and val.classes == ["cat", "dog"]
    with tarfile.open(tmp_path / "z.tar", "w:gz"):
        pass
    with pytest.raises(ValueError, match="unpack a compressed one"):
        open_data(f"{tmp_path}/z.tar")


def test_split_words() -> None:
    assert split_word("/x/imagenet-val-0003.tar") == "val" and split_word("/x/train/0003.tar") == "train"
    assert split_word("/test_run/shard-0003.tar") is None and split_word("strain-1.tar") is None


def test_braces() -> None:
    assert expand_braces("s-{08..10}.tar") == ["s-08.tar", "s-09.tar", "s-10.tar"]
    assert expand_braces("{a,b{1..2}}-{x,y}") == ["a-x", "a-y", "b1-x", "b1-y", "b2-x", "b2-y"]
    for wrong in ("a{1..", "a{3..1}"):
        with pytest.raises(ValueError, match=r"brace|backwards"):
            expand_braces(wrong)


class Python2Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Writes text and bytes as Python 2 did: the original CIFAR files are such pickles."""

    dispatch = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_string(self, value: str | bytes) -> None:
        raw = value if isinstance(value, bytes) else value.encode("latin1")
        self.write(b"T" + struct.pack("<i", len(raw)) + raw)  # type: ignore[attr-defined]
        self.memoize(value)  # type: ignore[attr-defined]

    dispatch[str] = dispatch[bytes] = save_string  # type: ignore[assignment]


def python2_pickle(values: object) -> bytes:
    stream = io.BytesIO()
    Python2Pickler(stream, protocol=2).dump(values)
    return stream.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def write_cifar10(folder: Path) -> tuple[np.ndarray, list[int]]:
    rows = np.random.default_rng(0).integers(0, 256, (24, 3072), dtype=np.uint8)
    labels = [int(i) for i in np.random.default_rng(1).integers(0, 10, 24)]
    folder.mkdir(parents=True)
    for i, name in enumerate([f"data_batch_{j}" for j in range(1, 6)] + ["test_batch"]):
        part = slice(4 * i, 4 * i + 4)
        (folder / name).write_bytes(python2_pickle({"data": rows[part].copy(), "labels": labels[part]}))
    (folder / "batches.meta").write_bytes(python2_pickle({"label_names": [f"class{i}" for i in range(10)]}))
    return rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


def test_cifar10_pickles(tmp_path: Path) -> None:
    images, labels = write_cifar10(tmp_path / "cifar-10-batches-py")
    train, val = (open_data(f"cifar10:{tmp_path}", split) for split in ("train", "val"))
    assert (len(train), len(val)) == (20, 4)
    assert train.labels == labels[:20] and val.labels == labels[20:] and val.classes == [f"class{i}" for i in range(10)]
    assert same(train.load(7), images[7]) and same(val.load(3), images[23])
    assert open_data("cifar10", "val", root=str(tmp_path)).labels == labels[20:]
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "cifar-10-batches-py", "cifar-10-batches-py")
    packed = open_data(f"cifar10:{tmp_path}/cifar-10-python.tar.gz", "val")
    assert same(packed.load(0), images[20])


def test_pickles_cannot_run_code(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "c")
    marker = tmp_path / "ran"

    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return open, (str(marker), "w")

    (tmp_path / "c" / "test_batch").write_bytes(pickle.dumps({"data": Attack()}))
    with pytest.raises(ValueError, match=r"test_batch.*io\.open"):
        open_data(f"cifar10:{tmp_path}/c")
    assert not marker.exists()


def test_cifar_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give cifar100:PATH"):
        open_data(f"cifar100:{tmp_path}")
    write_cifar10(tmp_path / "c")
    (tmp_path / "c" / "data_batch_3").unlink()
    with pytest.raises(ValueError, match="lacks data_batch_3"):
        open_data(f"cifar10:{tmp_path}/c")
    for kind, reference in (("cifar10", CIFAR10), ("cifar100", CIFAR100)):
        assert (LAYOUTS[kind].url, LAYOUTS[kind].md5) == (reference.url, reference.tgz_md5)


def test_cifar_download_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive comes over HTTP; with another checksum than expected nothing stays behind."""
    images, _ = write_cifar10(tmp_path / "cifar-10-batches-py")
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "cifar-10-batches-py", "cifar-10-batches-py")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{archive.name}"
        monkeypatch.setitem(LAYOUTS, "cifar10", LAYOUTS["cifar10"]._replace(url=url))
        store = tmp_path / "store"
        with pytest.raises(ValueError, match="could not download"):
            open_data("cifar10", root=str(store), download=True)
        assert list(store.iterdir()) == []
        md5 = hashlib.md5(archive.read_bytes()).hexdigest()
        monkeypatch.setitem(LAYOUTS, "cifar10", LAYOUTS["cifar10"]._replace(md5=md5))
        assert same(open_data("cifar10", root=str(store), download=True).load(3), images[3])
        server.shutdown()
    assert len(open_data("cifar10", "val", root=str(store))) == 4


def test_cifar10_sheets(tmp_path: Path) -> None:
    sheets = np.random.default_rng(0).integers(0, 256, (6, 5, 1024, 3), dtype=np.uint8)
    for i, name in enumerate([f"data_batch_{j}" for j in range(1, 6)] + ["test_batch"]):
        Image.fromarray(sheets[i]).save(tmp_path / f"{name}.png")
    (tmp_path / "train_lables.json").write_text(json.dumps([i % 10 for i in range(25)]))
    (tmp_path / "test_lables.json").write_text(json.dumps([9, 8, 7, 6, 5]))
    train, val = (open_data(f"cifar10:{tmp_path}", split) for split in ("train", "val"))
    assert train.labels == [i % 10 for i in range(25)] and val.labels == [9, 8, 7, 6, 5]
    assert train.classes is not None and train.classes[3] == "cat"
    assert same(train.load(13), sheets[2, 3].reshape(32, 32, 3))


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
    sliced = open_data(f"hf/{tmp_path}/pair:train[:50%]", "train")
    assert len(sliced) == 4 and same(sliced.load(3), pixels(3))
    single = [open_data(f"hf/{tmp_path}/single", split) for split in ("train", "val")]
    assert sorted(single[0].names + single[1].names) == [f"train/{i}" for i in range(8)] and len(single[1]) >= 1
    with pytest.raises(ValueError, match="no split 'dev'; it has train, test"):
        open_data(f"hf/{tmp_path}/pair:dev")
    with pytest.raises(ValueError, match="has no train images"):
        open_data(f"hf/{tmp_path}/pair:test", "train")


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


@needs_shared
def test_real_cifar100_sample(tmp_path: Path) -> None:
    archive = SHARED / "cifar-100-sample.zip"
    train, val = open_data(f"cifar100:{archive}", "train"), open_data(f"cifar100:{archive}", "val")
    assert (len(train), len(val)) == (1_117, 916)
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(tmp_path)
    values = pickle.loads((tmp_path / "cifar-100-python" / "test").read_bytes(), encoding="bytes")
    assert val.labels == values[b"fine_labels"]
    assert same(val.load(5), values[b"data"][5].reshape(3, 32, 32).transpose(1, 2, 0))
    names = pickle.loads((tmp_path / "cifar-100-python" / "meta").read_bytes())["fine_label_names"]
    assert val.classes == names
    assert open_data(f"cifar100:{tmp_path}", "val").labels == val.labels


@needs_shared
def test_real_images_as_a_flat_folder(tmp_path: Path) -> None:
    with zipfile.ZipFile(SHARED / "imagenet-20-val.zip") as archive:
        for name in archive.namelist()[:40]:
            (tmp_path / name.rsplit("/", 1)[1]).write_bytes(archive.read(name))
    data = open_data(str(tmp_path), "all")
    assert len(data) == 40 and data.labels is None
    zipped = open_data(str(SHARED / "imagenet-20-val.zip"), "val")
    index = {name.rsplit("/", 1)[1]: i for i, name in enumerate(zipped.names)}
    assert all(same(data.load(i), zipped.load(index[data.names[i]])) for i in (0, 20, 39))
