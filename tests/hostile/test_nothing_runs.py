"""Nothing in a file runs: pickles, YAML tags, archives, model folders and names on the page leave no canary behind."""

from __future__ import annotations

import io
import json
import pickle
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hostile_world import DISTIL, copied, run_words, write_tar, write_zip
from PIL import Image
from tiny_images import encoded

from raptor.checks import members
from raptor.config import COMMANDS
from raptor.data import BadImage, open_data
from raptor.data.ade20k import open_ade20k
from raptor.report.perturbed_image import read_image
from raptor.vit.open import open_vit


class Evil:
    """Its pickle makes a file called `canary` in the current folder when it is loaded."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return open, ("canary", "w")


def payloads() -> dict[str, bytes]:
    inside = io.BytesIO()
    with zipfile.ZipFile(inside, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"model": Evil()}, 2))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return {"pickle": pickle.dumps(Evil(), 2), "torch": inside.getvalue(), "proto5": pickle.dumps([Evil()], 5)}


PAYLOADS = payloads()


def test_the_payloads_bite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(PAYLOADS["pickle"]).close()
    assert (tmp_path / "canary").exists()


FILES = {
    "weights": ("phases teacher --data images --weights FILE", ".pth"),
    "head_file": ("dynamics teacher --data images --head_file FILE", ".pth"),
    "init_head": ("probe teacher --data images --init_head FILE", ".pth"),
    "classes": ("probe teacher --data images --classes FILE", ".txt"),
    "config": ("phases teacher --config FILE", ".yaml"),
    "recipe": ("distill teacher --data images --recipe FILE", ".yaml"),
    "model": ("phases FILE --data images", ".pth"),
    "models": ("phases teacher FILE --data images", ".pth"),
    "run": ("evaluate FILE", ""),
    "teacher": ("evaluate run --teacher FILE", ""),
    "start": ("distill teacher --data images --phases 2 2 --batch_size 4 --start FILE", ""),
    "data": ("phases teacher --data FILE", ".zip"),
    "val": ("phases teacher --data images --val FILE", ".tar"),
    "segment": ("probe teacher --task segment --data ade20k:FILE", ".zip"),
    "depth": ("probe teacher --task depth --data nyuv2:FILE", ".mat"),
    "for_": ("models --for FILE", ".pth"),
    "image": ("show teacher FILE", ".png"),
    "shift": ("evaluate run --data images --shift FILE", ".zip"),
    "autonomous": ("evaluate run --data images --autonomous FILE", ""),
    "calibrate": ("watch run --data images --calibrate FILE", ".zip"),
    "unusual": ("watch run --data images --unusual FILE", ".zip"),
    "beside": ("correct run --data images --beside FILE", ""),
}
NO_FILES = {
    *("out", "device", "precision", "split", "tokens", "k", "phases", "stage", "budget", "block", "optimizer", "task"),
    *("conditioning", "copy", "normalise", "augment", "track", "shape", "filter", "to", "exit", "closed_form"),
    *("method", "perturbation"),
}
"""Options that are words, but name no file that is read."""


def text_options() -> Iterator[str]:
    for config in COMMANDS.values():
        yield from (name for name, kind in config.kinds().items() if str in members(kind) and dict not in members(kind))


def test_every_option_that_takes_a_file_has_a_case() -> None:
    unknown = sorted(set(text_options()) - FILES.keys() - NO_FILES)
    assert not unknown, f"say in FILES how {unknown} is attacked, or in NO_FILES that it names no file"


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("option", FILES)
def test_a_malicious_pickle(option: str, payload: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    line, suffix = FILES[option]
    path = tmp_path / f"evil{suffix}"
    path.write_bytes(PAYLOADS[payload])
    words = [word.replace("FILE", str(path)) for word in line.split()]
    more = (
        []
        if option in ("table", "results", "dynamics", "reference", "certificates", "for_")
        else ["--out", str(tmp_path / "out")]
    )
    found = run_words([*words, *more], capsys)
    errors = [line for line in found.lines() if line.startswith("raptor: ")]
    assert found.code == 2 and len(errors) == 1 and "Traceback" not in found.err, found.err
    assert not (world / "canary").exists()


@pytest.mark.parametrize("payload", ["pickle", "proto5"])
@pytest.mark.parametrize("file", ["batches.meta", "data_batch_1"])
def test_a_malicious_cifar(file: str, payload: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in ("batches.meta", "test_batch", *(f"data_batch_{i}" for i in range(1, 6))):
        harmless = {"label_names": list("abcdefghij")}  # so that the reader goes on to the batches
        (folder / name).write_bytes(PAYLOADS[payload] if name == file else pickle.dumps(harmless))
    found = run_words(["states", "teacher", "--data", f"cifar10:{folder}", "--out", str(tmp_path / "out")], capsys)
    assert found.code == 2 and "not a part of CIFAR" in found.err
    assert not (world / "canary").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_pickle_in_a_model_folder(file: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    folder = copied(world, "teacher", "model")
    (folder / file).write_bytes(PAYLOADS["torch"])
    found = run_words(["states", str(folder), "--data", "images", "--out", str(tmp_path / "out")], capsys)
    assert found.code == 2 and not (world / "canary").exists()


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json"])
def test_a_pickle_in_a_checkpoint(file: str, world: Path, capsys: Any) -> None:
    folder = copied(world, "run", "run")
    (folder / "summary.json").unlink()
    path = next((folder / "checkpoint").glob("step-*")) / file
    for other in (folder / "checkpoint").glob(f"step-*/{file}"):
        other.write_bytes(PAYLOADS["torch"])
    assert path.exists()
    words = ["distill", str(world / "teacher"), "--data", str(world / "images"), "--out", str(folder)]
    found = run_words([*words, *DISTIL.split()], capsys)
    assert found.code == 2 and not (world / "canary").exists()


def eps() -> bytes:
    """A picture that Pillow draws by starting Ghostscript."""
    written = io.BytesIO()
    Image.new("RGB", (8, 8)).save(written, "EPS")
    return written.getvalue()


def hub_folder(folder: Path) -> str:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image()})
    rows = [{"bytes": eps(), "path": "cat.jpg"}]
    datasets.Dataset.from_dict({"image": rows}, features=features).save_to_disk(str(folder / "hub"))
    return f"hf/{folder / 'hub'}"


def frames_folder(folder: Path) -> str:
    for part in ("training", "validation"):
        for kind, name in (("images", "a.jpg"), ("annotations", "a.png")):
            path = folder / "ade" / kind / part / name
            path.parent.mkdir(parents=True)
            path.write_bytes(eps())
    return f"ade20k:{folder / 'ade'}"


def image_folder(folder: Path) -> str:
    (folder / "photos").mkdir()
    (folder / "photos" / "cat.jpg").write_bytes(eps())
    return str(folder / "photos")


EPS_PLACES = {
    "folder": image_folder,
    "zip": lambda folder: str(write_zip(folder / "x.zip", {"cat.jpg": eps()})),
    "tar": lambda folder: str(write_tar(folder / "x.tar", {"cat.jpg": eps()})),
    "webdataset": lambda folder: f"wds/{write_tar(folder / 'x.tar', {'cat.jpg': eps()})}",
    "hub": hub_folder,
    "frames": frames_folder,
}


@pytest.mark.parametrize("place", EPS_PLACES)
def test_no_reader_starts_ghostscript(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: started.append(place))
    spec = EPS_PLACES[place](tmp_path)
    data: Any = open_ade20k(spec.partition(":")[2]) if place == "frames" else open_data(spec, "all")
    with pytest.raises(BadImage):
        data.load(0)
    assert not started


def test_no_sheet_and_no_picture_starts_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: started.append("sheet"))
    (tmp_path / "cat.jpg").write_bytes(eps())
    with pytest.raises(ValueError, match="not an image"):
        read_image(tmp_path / "cat.jpg")
    for name in (*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png"):
        (tmp_path / name).write_bytes(eps())
    for name in ("train_lables.json", "test_lables.json"):
        (tmp_path / name).write_text("[0]")
    with pytest.raises(ValueError, match=r"cannot read .* as cifar-10-batches-py"):
        open_data(f"cifar10:{tmp_path}", "all")
    assert not started


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_a_configuration_cannot_ask_for_a_kernel(name: str, tmp_path: Path) -> None:
    """transformers fetches an attention called `owner/repository` from the hub and runs it."""
    transformers = pytest.importorskip("transformers")
    transformers.ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, name: "evil/kernel"}))
    with pytest.raises(ValueError, match="attention 'evil/kernel'"):
        open_vit(f"hf/{tmp_path}", pretrained=False)


def test_a_configuration_with_endless_layers_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.ViTConfig(hidden_size=16, num_hidden_layers=10**9, num_attention_heads=2).save_pretrained(tmp_path)
    for fetch in (False, True):
        with pytest.raises(ValueError, match="says 1000000000 layers, more than any model has"):
            open_vit(f"hf/{tmp_path}", pretrained=fetch)


OUTSIDE = ["../evil.png", "/tmp/evil-of-raptor.png", "a/../../evil.png", "..\\evil.png"]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_archives_write_nothing(kind: str, name: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    """Entries are read in place: a name that leads outside is only a name."""
    files = {name: encoded(0), "ok.png": encoded(1)}
    path = write_zip(tmp_path / "in" / "x.zip", files) if kind == "zip" else write_tar(tmp_path / "in" / "x.tar", files)
    before = sorted(tmp_path.rglob("*"))
    data = open_data(str(path), "all")
    assert all(data.load(i).size == (8, 8) for i in range(len(data)))
    assert sorted(tmp_path.rglob("*")) == before and not Path("/tmp/evil-of-raptor.png").exists()


@pytest.mark.parametrize("target", ["/etc/passwd", "../../secret.png", "ok.png"])
def test_links_in_a_tar_are_not_followed(target: str, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", {"ok.png": encoded(0)}, links={"evil.png": target})
    with tarfile.open(path, "a") as tar:
        hard = tarfile.TarInfo("hard.png")
        hard.type, hard.linkname = tarfile.LNKTYPE, target
        tar.addfile(hard)
    assert list(open_data(str(path), "all").names) == ["ok"]


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.mark.parametrize("place", ["name", "data", "config", "class names"])
def test_names_on_the_page_are_text(place: str, world: Path, capsys: Any) -> None:
    folder = copied(world, "run", "run")
    if place == "config":
        with (folder / "config.yaml").open("a") as file:
            file.write(json.dumps({"note": EVIL})[1:-1] + "\n")
    else:
        saved = json.loads((folder / "summary.json").read_text())
        if place == "name":
            saved["teacher"]["name"] = saved["surrogate"]["name"] = EVIL
        elif place == "data":
            saved["data"] = saved["val"] = saved["device"] = EVIL
        else:
            saved["bad_images"] = [EVIL]
        (folder / "summary.json").write_text(json.dumps(saved))
    found = run_words(["report", str(folder), "--num_images", "0"], capsys)
    assert found.code == 0, found.err
    page = (folder / "report.html").read_text()
    assert "<script>alert(1)" not in page and "<img src=x" not in page


def test_explore_is_only_for_this_machine(world: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The page is served on loopback, takes uploads of at most 10 MB and is never shared."""
    launched: dict[str, Any] = {}

    class Page:
        def launch(self, **options: Any) -> None:
            launched.update(options)

    import_module("raptor.commands.explore")
    module = sys.modules["raptor.commands.explore"]
    monkeypatch.setattr(module, "build_page", lambda *_args, **_options: Page())
    assert run_words(["explore", "teacher"], capsys).code == 0
    assert launched["server_name"] == "127.0.0.1" and launched["max_file_size"] == "10mb" and not launched["share"]
