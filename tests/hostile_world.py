"""A folder with tiny models, a run and images to damage, and how a case runs in it.

Cases run with this folder as the current one, so that they name its files as a user would: `phases run --data images`.
"""

from __future__ import annotations

import io
import json
import shlex
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_images import write_tree

from raptor.cli import main
from raptor.vit.open import open_vit
from raptor.vit.saved import save_vit

SHAPE = dict(img_size=24, patch_size=8, embed_dim=32, depth=4, num_heads=2, num_classes=3)
DISTIL = "--phases 2 2 --budget 2steps --batch_size 8 --num_images 4 --device cpu --augment none"
TREE = [f"{part}/{name}/{i}.png" for part in ("train", "val") for name in ("ant", "bee", "cat") for i in range(4)]


@dataclass(frozen=True)
class Case:
    """One command line. `thing` and `remedy` are what its one line of stderr says; both empty: it works."""

    name: str
    line: str
    thing: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    def lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.strip()]


def run_words(words: list[str], capsys: Any) -> Outcome:
    """Run the command line in this process. SystemExit is what `--help` ends with."""
    capsys.readouterr()
    try:
        code = main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return Outcome(code, out, err)


def check(case: Case, out: Path, capsys: Any) -> Outcome:
    """Run a case; OUT in its line is a fresh folder. It works, or gives code 2 and one line with both words."""
    words = [word.replace("OUT", str(out)) for word in shlex.split(case.line)]
    found = run_words(words, capsys)
    assert "Traceback" not in found.err, found.err
    if not case.thing:
        assert found.code == 0, found.err
        return found
    check_refusal(found, case.thing, case.remedy)
    assert not out.exists(), f"refused, but it left {sorted(out.rglob('*'))}"
    return found


def check_refusal(found: Outcome, thing: str, remedy: str) -> None:
    assert found.code == 2, (found.code, found.err)
    errors = [line for line in found.lines() if line.startswith("raptor: ")]  # what is measured may be told before
    assert len(errors) == 1 and found.lines()[-1] == errors[0], found.err
    line = errors[0]
    assert thing in line, (thing, line)
    assert remedy in line, (remedy, line)
    assert len(line) < 700, line


def make_world(root: Path) -> Path:
    """Models, a run and images under `root`."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **SHAPE)
    plain = open_vit(model, size=24)
    write_tree(root / "images", TREE)
    write_tree(root / "flat", [f"{i}.png" for i in range(6)])
    vit = open_vit("timm/vit_tiny_patch16_224", pretrained=False, size=24, **SHAPE)
    vit.model.load_state_dict(plain.model.state_dict())
    save_vit(vit, root / "teacher")
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, root / "weights.safetensors")
    torch.save(model.state_dict(), root / "weights.pth")
    (root / "classes.txt").write_text("ant\nbee\ncat\n")
    head = {"weight": torch.randn(3, 64), "bias": torch.zeros(3)}
    save_file(head, root / "head.safetensors")
    save_file(head, root / "named.safetensors", {"classes": '["x", "y", "z"]'})
    return root


def make_run(root: Path) -> Path:
    """A finished distillation in `run`."""
    words = ["distill", str(root / "teacher"), "--data", str(root / "images"), "--out", str(root / "run")]
    assert main([*words, *DISTIL.split()]) == 0
    return root / "run"


def copied(root: Path, of: str, name: str) -> Path:
    """A copy of a model or run of the world, to damage."""
    folder = root / "damaged" / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / of, folder)
    return folder


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    saved = json.loads(path.read_text())
    changed = change(saved)
    path.write_text(json.dumps(saved if changed is None else changed))


def png(mode: str = "RGB", size: tuple[int, int] = (8, 8), kind: str = "png", **options: Any) -> bytes:
    """An image file of one mode and size."""
    stream = io.BytesIO()
    Image.new(mode, size).save(stream, kind, **options)
    return stream.getvalue()


def bomb_png(side: int) -> bytes:
    """A PNG of a few hundred bytes whose header says `side` x `side` pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


def write_tar(path: Path, files: dict[str, bytes], links: dict[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return path


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def noise(seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(256)
