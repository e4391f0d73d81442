"""The first hour with weights and photographs of one's own: what is typed then, and what it says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from tiny_images import write_hashed
from torch.utils.data import DataLoader, TensorDataset

import raptor
from raptor.cli import main
from raptor.run import read_json

FEW = ["--size", "32", "--device", "cpu"]
CUT = ["--k", "2", "--twin", "false", *FEW]


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with photographs, and a weight file."""
    monkeypatch.chdir(tmp_path)
    write_hashed(Path("photos"), [f"{i:02}.png" for i in range(40)])
    write_hashed(Path("holiday"), [f"{i:02}.jpg.png" for i in range(20)])
    torch.save(timm.create_model("test_vit").state_dict(), "mine.pt")


@pytest.mark.parametrize("command", ["phases", "dynamics", "states", "study", "distill"])
def test_a_model_of_photographs_is_not_measured_on_drawings(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "timm/test_vit", "--weights", "mine.pt", *FEW]) == 2
    assert "works on: --data photos/" in capsys.readouterr().err
    assert not list(Path(".").rglob("*.json"))


def test_all_photographs_are_measured_or_what_is_left_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["timm/test_vit", "--weights", "mine.pt", "--data", "photos/"]
    assert main(["phases", *model, *CUT]) == 0
    assert "40 images of photos" in capsys.readouterr().out
    assert main(["phases", *model, *CUT, "--num_images", "8"]) == 0
    assert "8 of the 40 images of photos are measured" in capsys.readouterr().err
    small = ["--sample_images", "1", "--stability", "false", "--interventions", "false", "--num_classes", "0"]
    assert main(["dynamics", *model, *FEW, *small]) == 0
    said = capsys.readouterr()
    assert "mine, 40 images of photos" in said.out and "dynamics of mine: " in said.err
    assert "teacher" not in said.out + said.err


def test_an_untrained_twin_has_a_folder_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--data", "photos", "--num_images", "4", *CUT]
    assert main(["phases", "timm/test_vit", "--weights", "mine.pt", *few]) == 0
    assert main(["phases", "timm/test_vit", "--pretrained", "false", *few]) == 0
    folders = sorted(path.parent.name for path in Path("runs").rglob("phases.json"))
    assert folders == ["phases-timm_test_vit-mine", "phases-timm_test_vit-untrained"]
    one, other = (read_json(Path("runs") / folder / "phases.json")["subject"] for folder in folders)
    assert one["weights"] != other["weights"]


def test_a_folder_of_another_run_is_refused_in_words_of_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--k", "2", "--batch_size", "2", "--num_images", "4", "--train_images", "8", "--out", "k2", *FEW]
    distil = ["distill", "timm/test_vit", "--weights", "mine.pt", *few]
    assert main([*distil, "--data", "photos", "--budget", "2steps"]) == 0
    capsys.readouterr()
    assert main([*distil, "--data", "holiday", "--budget", "4steps"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "--data: photos -> holiday" in said and "--budget: 2steps -> 4steps" in said
    assert "fingerprint" not in said and "images." not in said


def test_photographs_typed_as_a_model_are_named_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("phases", "study"):
        assert main([command, "timm/test_vit@mine.pt", "photos", *FEW]) == 2
        assert "--data photos" in capsys.readouterr().err


def test_one_command_gives_a_page_and_the_same_folder_takes_a_surrogate(capsys: pytest.CaptureFixture[str]) -> None:
    study = ["study", "timm/test_vit@mine.pt", "--data", "holiday", "--out", "mine.pt-results.pt", *FEW]
    assert main(study) == 0
    said = capsys.readouterr().err
    assert "study of mine: about" in said
    page = Path("mine.pt-results.pt/report.html")
    alone = page.read_bytes()
    # A second time nothing is measured.
    assert main(study) == 0
    said = capsys.readouterr().err
    assert said.count("is there already") == 2
    few = ["--k", "2", "--batch_size", "2", "--num_images", "4", "--train_images", "8", "--budget", "2steps"]
    # A folder may have the name of a weight file: that is what the default folder of `study mine.pt` has.
    assert main(["distill", "timm/test_vit@mine.pt", "holiday", *few, *FEW, "--out", "mine.pt-results.pt"]) == 0
    assert main(["evaluate", "mine.pt-results.pt", "--num_images", "4", "--sample_images", "0", "--device", "cpu"]) == 0
    assert main(["report", "mine.pt-results.pt", "--device", "cpu"]) == 0
    glance = page.read_text().partition("At a glance")[2]
    # What a reader must know stands before any number.
    assert 0 < glance.index("The surrogate is undertrained") < glance.index("R²")
    assert page.read_bytes() != alone


def test_weights_say_which_model_they_are_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["phases", "timm/test_vit2@mine.pt", "--data", "photos", *CUT]) == 2
    said = capsys.readouterr().err
    assert "raptor models --for mine.pt" in said
    assert main(["phases", "timm/resnet18@mine.pt", "--data", "photos", *CUT]) == 2
    said = capsys.readouterr().err
    assert "the model has no list of blocks" in said


def test_a_command_is_found_from_the_package() -> None:
    found = raptor.commands.phases("timm/test_vit", pretrained=False, data="photos", size=32, k=2, twin=False)
    assert found.models[0].num_images == 40
    with pytest.raises(AttributeError, match=r"the command is raptor\.commands\.evaluate"):
        raptor.evaluate  # noqa: B018


def test_what_a_notebook_holds_is_images() -> None:
    """Line by line of a session: files, pictures and tensors, for the view and for a command."""
    vit = raptor.open_vit("timm/test_vit@mine.pt", size=32)
    assert repr(vit).startswith("ViT(mine: ")
    files = [f"photos/{i:02}.png" for i in range(4)]
    pictures = [Image.open(file) for file in files]
    by_file, _ = vit.record(files)
    by_picture, _ = vit.record(pictures)
    assert torch.equal(by_file[-1], by_picture[-1])
    with pytest.raises(ValueError, match=r"use images\[None\] for a single image$"):
        vit.record(torch.rand(3, 32, 32))
    pixels = torch.rand(4, 3, 32, 32)
    given: dict[str, Any] = {"files": files, "pictures": pictures, "tensor": pixels, "array": pixels.numpy()}
    given["set"] = TensorDataset(pixels)
    given["loader"] = DataLoader(given["set"], batch_size=2)
    cuts = {}
    for name, images in given.items():
        found = raptor.commands.phases(vit, data=images, k=2, twin=False, device="cpu", out=name)
        assert "4 images of " in found.text() and "images of 4 images" not in found.text()
        cuts[name] = found.to_dataframe()["within"][0]
    assert cuts["files"] == cuts["pictures"] and cuts["tensor"] == cuts["array"] == cuts["set"] == cuts["loader"]
    (batch,) = raptor.iterate("photos", vit.preprocess, batch_size=64)
    assert len(batch.images) == 40


def test_a_colleague_gets_a_surrogate(capsys: pytest.CaptureFixture[str]) -> None:
    """Its files can be read, a card says what it is, and a teacher that has moved is named anew."""
    few = ["--k", "2", "--batch_size", "2", "--num_images", "4", "--train_images", "8", "--budget", "2steps"]
    before = os.umask(0o022)
    try:
        assert (
            main(["distill", "timm/test_vit", "--weights", "mine.pt", "--data", "photos", *few, *FEW, "--out", "k2"])
            == 0
        )
    finally:
        os.umask(before)
    written = [path for path in Path("k2/surrogate").rglob("*") if path.is_file()]
    assert written and all(path.stat().st_mode & 0o044 == 0o044 for path in written)
    Path("mine.pt").rename("moved.pt")
    capsys.readouterr()
    short = ["--num_images", "4", "--sample_images", "0", "--device", "cpu"]
    assert main(["evaluate", "k2", *short]) == 2
    assert "is not there: give its new place with --teacher" in capsys.readouterr().err
    assert main(["evaluate", "k2", *short, "--teacher", "timm/test_vit@moved.pt"]) == 0


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["phases", "dinov2s.pt", "--data", "photos"], "weights file dinov2s.pt does not exist"),
        (["show", "scenes", "photos/00.jpg"], "there is no file photos/00.jpg"),
        (["phases", "scenes", "--data", "photo"], "did you mean photos?"),
        (["phases", "scenes", "--num_imags", "4"], "did you mean --num_images?"),
        (["evaluate", "timm/test_vit@mine.pt", "--data", "photos"], "no surrogate: make one with raptor distill"),
        (["distill", "timm/test_vit@mine.pt", "photos", "--k", "2", "--dry_run"], "give --batch_size"),
    ],
)
def test_a_slip_is_answered_in_one_line_that_helps(
    typed: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
