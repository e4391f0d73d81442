"""raptor study: one folder with phases, dynamics and a page; what is there is not measured again."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from raptor.cli import main
from raptor.commands import phases, study
from raptor.commands.study import Study
from raptor.config import DynamicsConfig, PhasesConfig, StudyConfig
from raptor.run import RunError
from raptor.vit.open import open_vit

module = import_module("raptor.commands.study")


@pytest.fixture(autouse=True)
def few_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most studies here are about what is read and written: they measure few images, and leave out what takes long."""
    quick = {"num_images": 8, "sample_images": 1, "stability": False, "interventions": False, "num_classes": 0}
    monkeypatch.setattr(module, "QUICK_DYNAMICS", quick)
    monkeypatch.setattr(module, "QUICK_IMAGES", 8)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A study with everything that a study measures."""
    out = tmp_path_factory.mktemp("finished") / "study"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "QUICK_DYNAMICS", {"num_images": 8, "sample_images": 2})
        patch.setattr(module, "QUICK_IMAGES", 8)
        return study("scenes", out=str(out), device="cpu")


@pytest.fixture
def out(finished: Study, tmp_path: Path) -> Path:
    """A copy of its folder."""
    return shutil.copytree(finished.folder, tmp_path / "study")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(12):
        Image.fromarray(random.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return folder


def test_a_full_study_measures_what_the_two_commands_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: dict[str, Any] = {}
    monkeypatch.setattr(module, "_unless_done", lambda _folder, name, part, _run: planned.update({name: part}) or [])
    monkeypatch.setattr(module, "_suggested", lambda _: None)
    monkeypatch.setattr(module, "read_results", lambda _: SimpleNamespace(measured=None))
    monkeypatch.setattr(module, "report", lambda *_, **__: None)
    study("scenes", full=True, out=str(tmp_path), device="cpu")
    for name, kind in (("phases", PhasesConfig), ("dynamics", DynamicsConfig)):
        own = kind("scenes")
        for option in ("num_images", "sample_images"):
            assert getattr(planned[name], option, None) == getattr(own, option, None)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.safetensors"
    save_file(timm.create_model("vit_tiny_patch16_224", num_classes=0).state_dict(), path)
    return path


def test_a_study_is_one_folder(finished: Study) -> None:
    results = {"phases.json", "dynamics.json", "interventions.json", "images.json"}
    assert {path.name for path in finished.folder.glob("*.json")} == results
    assert finished.page.path == finished.folder / "report.html" and finished.page.path.is_file()
    assert any("similarity within" in line for line in finished.findings)


def test_a_study_goes_on_where_it_stopped(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in out.glob("*.json")}
    (out / "dynamics.json").unlink()
    again = study("scenes", out=str(out), device="cpu")
    told = capsys.readouterr().err
    assert f"phases: {out / 'phases.json'} is there already" in told and "dynamics: " not in told
    assert not any("similarity within" in line for line in again.findings)
    assert (out / "phases.json").read_bytes() == before["phases.json"]
    new = json.loads((out / "dynamics.json").read_text())["teacher"]
    old = json.loads(before["dynamics.json"])["teacher"]
    assert new["direction"] == old["direction"] and new["modes"] == old["modes"]


def test_other_options_are_measured_anew(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    for name in ("phases", "dynamics"):
        result = SimpleNamespace(text=lambda: "")
        monkeypatch.setattr(module, name, lambda config, result=result: measured.append(type(config)) or result)
    monkeypatch.setattr(module, "QUICK_DYNAMICS", {"num_images": 8, "sample_images": 2})
    study("scenes", out=str(out), device="cpu")
    assert measured == []
    study("scenes", out=str(out), device="cpu", precision="fp32")
    assert measured == [PhasesConfig, DynamicsConfig]


def test_other_images_go_to_another_folder(out: Path) -> None:
    with pytest.raises(RunError, match="is about other images of scenes: choose another --out"):
        study("scenes", out=str(out), device="cpu", data="scenes", split="train")


def test_a_real_model_needs_images(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "timm/vit_tiny_patch16_224", "--weights", str(weights), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "say which images" in error and "--data photos/" in error


def test_the_time_is_said_first(
    weights: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_measurement(*_: object, **__: object) -> None:
        raise ValueError("phases begin here")

    monkeypatch.setattr(module, "phases", no_measurement)
    words = ["study", "timm/vit_tiny_patch16_224", "--weights", str(weights), "--data", str(photos), "--device", "cpu"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("study of ") and "about" in first and "phases begin here" in last


def test_the_time_is_of_the_images_that_are_there(
    weights: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passes = []
    monkeypatch.setattr(module, "clock", lambda seconds: passes.append(seconds) or "a while")
    monkeypatch.setattr(module.time, "monotonic", iter([0.0, 4.0] * 2).__next__)  # a second for each image
    vit = open_vit("timm/vit_tiny_patch16_224", weights=str(weights), size=64)
    config = StudyConfig("scenes", data=str(photos))
    for num_images in (5, 1000):
        for_phases = PhasesConfig("scenes", num_images=num_images)
        module._tell_time(vit, config, for_phases, DynamicsConfig("scenes", num_images=1, sample_images=1))
    assert passes == [5 + 2 + 134, 12 + 2 + 134]
    assert capsys.readouterr().err.count("about a while") == 2


def test_phases_read_all_images_of_a_plain_folder(weights: Path, photos: Path, tmp_path: Path) -> None:
    """Nothing is fitted, so that the 5 % that other commands hold out are not all that is read."""
    options = {"weights": str(weights), "data": str(photos), "k": [2], "twin": False, "device": "cpu"}
    found = phases(["timm/vit_tiny_patch16_224"], **options, out=str(tmp_path / "all"))
    assert (found.models[0].num_images, found.models[0].split) == (12, "all")
    held_out = phases(["timm/vit_tiny_patch16_224"], **options, split="val", out=str(tmp_path / "held-out"))
    assert held_out.models[0].num_images < 12


def test_the_page_shows_images_of_a_weight_file(
    weights: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The results name such a model by its file's stem, which `raptor report` could not open."""
    model = f"timm/vit_tiny_patch16_224@{weights}"
    options: dict[str, Any] = {"data": str(photos), "out": str(tmp_path / "out"), "size": 64, "device": "cpu"}
    first = study(model, **options)
    made = (tmp_path / "out/images.json").read_bytes()
    saved = json.loads(made)
    assert saved["num_images"] == 4 and saved["surrogate"] is None
    assert saved["images"][0]["teacher"] in first.page.path.read_text() and "images" not in first.page.notes
    study(model, **options)
    assert (tmp_path / "out/images.json").read_bytes() == made


def test_the_page_shows_images_in_memory(tmp_path: Path) -> None:
    images = torch.rand(6, 3, 32, 32)
    module = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=4, num_classes=0)
    found = study(module, data=images, out=str(tmp_path / "out"), device="cpu")
    assert len(json.loads((tmp_path / "out/images.json").read_text())["images"]) == 4
    assert "data:image/png" in found.page.path.read_text()


def test_a_weight_file_is_matched_once(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.safetensors"
    save_file(timm.create_model("vit_tiny_patch16_224", num_classes=0).state_dict(), path)
    asked = []

    def only_fitting(file: str) -> list[str]:
        asked.append(file)
        return ["timm/vit_tiny_patch16_224"]

    monkeypatch.setattr("raptor.vit.names.models_for", only_fitting)
    study(str(path), data=str(photos), out=str(tmp_path / "out"), size=64, device="cpu")
    assert asked == [str(path)]
    assert capsys.readouterr().err.count("opened as that model") == 1


def test_missing_images_are_said_before_the_model_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "open_pair", lambda *_, **__: pytest.fail("the model was opened"))
    path = tmp_path / "my.pt"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"say which images .*my\.pt works on"):
        study(str(path), out=str(tmp_path / "out"))


def test_dynamics_takes_the_cut_that_the_phases_suggest(finished: Study) -> None:
    """The default of three phases would stand on the page beside a suggestion of four."""
    out = finished.folder
    entry = json.loads((out / "phases.json").read_text())["models"][0]
    measured = json.loads((out / "dynamics.json").read_text())["phases"]
    assert len(measured) == entry["chosen_k"] and measured == entry["phases"][str(entry["chosen_k"])]["lengths"]
    assert f"({' | '.join(map(str, measured))})" in finished.page.path.read_text()
    # A model by itself is nobody's teacher.
    changed = json.loads((out / "interventions.json").read_text())
    assert all(line.startswith("scenes: ") for line in changed["findings"])
    assert changed["class_names"] == json.loads((out / "dynamics.json").read_text())["class_names"]
    assert not any("teacher" in line for line in finished.findings)
