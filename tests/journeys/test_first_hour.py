"""The first hour with weights and photographs of one's own: what is typed then, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from tiny_images import write_hashed

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
    assert "40 training and held-out images of photos" in capsys.readouterr().out


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
