"""raptor watch: its files, its sets, and what it refuses."""

from __future__ import annotations

import base64
import csv
import importlib
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import raptor
from raptor.cli import main
from raptor.commands import watch
from raptor.recurrence.watch import Watcher, WatchFile

FEW = ["--num_images", "60", "--false_alarms", ".1", "--device", "cpu"]


def test_sets_that_are_known_to_be_unusual(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    rng = np.random.default_rng(0)
    for i in range(5):
        Image.fromarray(rng.integers(0, 255, (60, 60, 3), dtype=np.uint8)).save(photos / f"{i}.png")
    options = dict(num_images=60, false_alarms=0.1, device="cpu")
    found = watch("scenes-k3", unusual=["noise:5", "pgd", str(photos)], out=str(tmp_path / "out"), **options)
    measured = WatchFile.read(tmp_path / "out")
    scenes, noise, attack, folder = measured.sets
    assert (scenes.name, scenes.num_images, scenes.scores) == ("scenes", 30, None) and measured.num_calibration == 30
    assert noise.name == "noise:5" and noise.num_images == 30 and noise.alarms > 0.5
    assert noise.scores is not None and noise.scores["surrogate"].auroc > 0.9
    assert set(noise.scores) == {"surrogate", "maximum softmax", "energy", "mahalanobis", "nearest neighbours", "norm"}
    assert attack.fooled is not None and attack.num_images == round(30 * attack.fooled) > 0
    assert folder.num_images == 5
    rows = list(csv.DictReader((tmp_path / "out" / "watch.csv").open()))
    assert len(rows) == 30 + 30 + attack.num_images + 5
    assert np.mean([row["alarm"] == "True" for row in rows if row["set"] == "noise:5"]) == noise.alarms
    assert [image.of for image in measured.shown] == ["scenes"] * 2 + ["noise:5"] * 2 + ["pgd"] * 2 + [folder.name] * 2
    assert Image.open(io.BytesIO(base64.b64decode(measured.shown[0].picture))).size == (48, 48)
    assert np.asarray(measured.shown[0].map).shape == (6, 6) and len(measured.shown[0].profile) == 12
    assert "noise:5: AUROC" in found.text() and len(found.table_rows()) == 18


def test_an_attack_is_at_the_precision_of_the_watcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def attacked(images: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        return images, torch.ones(len(images), dtype=torch.bool)

    monkeypatch.setattr(importlib.import_module("raptor.commands.watch"), "attack", attacked)
    options = dict(num_images=60, false_alarms=0.1, device="cpu", precision="bf16")
    watch("scenes-k3", unusual=["pgd"], out=str(tmp_path), **options)
    assert seen == [torch.bfloat16]


def test_the_watcher_in_python() -> None:
    monitor = raptor.watch(raptor.open_vit("scenes-k3"), raptor.open_vit("scenes"))
    assert isinstance(monitor, Watcher) and monitor.group_names == ["cls", "registers", "patches"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--calibrate", "scenes", "--data", "scenes"], "are also in the calibration images of scenes"),
        (["--calibrate", "no/such/folder"], "no/such/folder"),
        (["--unusual", "noise:9"], "the severity of noise is 1 to 5"),
        (["--unusual", "noise", "noise:3"], "--unusual names two sets noise:3: give each once"),
        (["--num_images", "8"], "4 calibration images are too few"),
        (["--num_images", "30"], "give --num_images 36 or more, or others with --calibrate"),
        (["--false_alarms", "2"], "--false_alarms"),
    ],
)
def test_what_is_refused(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = [word for i, word in enumerate(FEW) if FEW[i - i % 2] not in words]
    assert main(["watch", "scenes-k3", *words, *few, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
