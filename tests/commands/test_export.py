"""raptor export: files for other programs, measured; blocks that are made whole by the teacher's own file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import noise_images

from raptor import make_surrogate, open_pair, open_vit, save_vit
from raptor.cli import main
from raptor.commands import export
from raptor.run import RunError
from raptor.vit.pair import OtherTeacher

QUICK = dict(num_images=8)
TINY = dict(patch_size=8, embed_dim=24, depth=3, num_heads=2, img_size=32)


@pytest.mark.slow
def test_an_int8_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher = open_vit("timm/vit_tiny_patch16_224", pretrained=False, num_classes=20, **TINY)
    save_vit(teacher, tmp_path / "teacher")
    save_vit(make_surrogate(open_vit(tmp_path / "teacher"), (1, 2)), tmp_path / "run")
    out = tmp_path / "out"
    words = f"export {tmp_path}/run --data scenes --num_images 8 --weights int8 --out {out}".split()
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "surrogate | pt2 | int8" in printed and "teacher | pt2 | int8" in printed
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "export.json", "model.pt2"]
    found = json.loads((out / "export.json").read_text())
    assert next(iter(found)) == "subject" and found["subject"]["size"] == 32
    plain, own, taught, beside = found["rows"]
    assert max(plain["errors"]) < 1e-5 and len(own["errors"]) == 4 and max(taught["errors"]) == 0
    assert 0 < max(own["errors"]) < 0.1 and own["agreement"] is not None and own["largest"] < 1e-4
    assert beside["form"] == "pt2" and beside["agreement"] > 0.5
    model = torch.export.load(out / "model.pt2").module()
    assert model(torch.zeros(3, 3, 32, 32)).shape == (3, 20)
    # Results about another surrogate do not replace these.
    assert main(["export", "scenes-k2", "--weights", "int8", "--out", str(out)]) == 2
    assert "choose another --out" in capsys.readouterr().err


def test_shared_blocks_are_made_whole_by_the_readers_own_file(tmp_path: Path) -> None:
    name = "timm/vit_tiny_patch16_224"
    made = open_vit(name, pretrained=False, num_classes=20, **TINY)
    torch.save(made.model.state_dict(), tmp_path / "teacher.pth")
    teacher = open_vit(name, weights=str(tmp_path / "teacher.pth"), **TINY)
    save_vit(make_surrogate(teacher, (1, 2)), tmp_path / "run")
    shared = tmp_path / "shared"
    found = export(tmp_path / "run", to="blocks", weights="fp16", out=str(shared), **QUICK)
    assert found.data == "noise" and found.rows[1].agreement is None  # nobody has said on which images
    (shared / "export.json").unlink()  # it is of this machine, and is not shared
    card = (shared / "README.md").read_text()
    assert "--to folder --teacher FILE" in card and "1 \\| 2" in card
    blocks = sum(p.numel() for p in open_vit(tmp_path / "run").model.shared_blocks.parameters())
    assert (shared / "model.safetensors").stat().st_size < 2 * blocks + 6000
    assert str(tmp_path) not in (shared / "config.json").read_text()

    mine = (tmp_path / "teacher.pth").rename(tmp_path / "mine.pth")
    with pytest.raises(ValueError, match="holds only the blocks of a surrogate: give its teacher"):
        open_vit(shared)
    with pytest.raises(ValueError, match="is not there: give its new place with --teacher"):
        open_pair(shared)
    words = f"export {shared} --to folder --teacher {mine} --out {tmp_path}/whole --num_images 8"
    assert main(words.split()) == 0
    whole, original = open_vit(tmp_path / "whole"), open_vit(tmp_path / "run")
    images = noise_images(whole)
    with torch.no_grad():
        torch.testing.assert_close(whole(images), original(images), atol=2e-3, rtol=2e-3)
    kept = original.model.state_dict()
    for name, tensor in whole.model.state_dict().items():
        if not name.startswith("shared_blocks."):
            assert torch.equal(tensor, kept[name]), name
    other = open_vit(name="other", source="timm/vit_tiny_patch16_224", pretrained=False, num_classes=20, **TINY)
    with pytest.raises(OtherTeacher, match="was not made from other"):
        open_pair(shared, teacher=other)


def test_a_checkpoint_for_timm(tmp_path: Path) -> None:
    found = export("scenes-k3", to="timm", weights="int4", out=str(tmp_path / "out"), **QUICK)
    _, own, _, beside = found.rows
    assert own.num_bytes < 0.6e6 < beside.num_bytes and own.largest < 1e-5 and own.agreement is not None
    assert 'timm.create_model("raptor_vit_tiny_patch16_224", checkpoint_path=' in found.text()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architecture"] == "raptor_vit_tiny_patch16_224"


def test_a_model_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    kept = tmp_path / "mine" / "model.safetensors"
    kept.write_bytes(b"weights")
    with pytest.raises(RunError, match="mine holds a model that is no export: choose another --out"):
        export("scenes-k3", to="folder", out=str(tmp_path / "mine"), **QUICK)
    assert kept.read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("scenes", "scenes is no surrogate: make one with raptor distill"),
        ("scenes-k3 --to tflite", "--to must be one of pt2, onnx, timm, blocks, folder"),
        ("scenes-k3 --to blocks --weights int8", "--to blocks stores fp32 or fp16: take --weights fp16"),
        ("nothing", "nothing"),
    ],
)
def test_wrong_input_is_one_line(words: str, line: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", *words.split()]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_shared_blocks_of_a_dinov2_s_are_below_twelve_megabytes(tmp_path: Path) -> None:
    teacher = open_vit("timm/vit_small_patch14_reg4_dinov2.lvd142m", pretrained=False)
    folder = save_vit(make_surrogate(teacher, (7, 3, 2)), tmp_path / "shared", only_blocks=True, half=True)
    assert 10.7e6 < (folder / "model.safetensors").stat().st_size < 10.9e6
