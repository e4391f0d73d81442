"""raptor report: where the page goes, and which images it shows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from tiny_images import save_array, write_tree

from raptor.cli import main
from raptor.commands.dynamics import dynamics
from raptor.commands.phases import phases
from raptor.commands.report import open_models, report
from raptor.config import ReportConfig
from raptor.files import RunError
from raptor.report.results import Results
from raptor.vit.open import open_vit
from raptor.vit.saved import save_vit
from raptor.vit.view import ViT
from raptor.vit.weights import fingerprint


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    phases(["scenes"], k=[2], num_images=16, out=str(folder), device="cpu")
    (folder / "config.yaml").write_text("model: scenes\ndata: scenes\n")
    return folder


def test_the_page_goes_where_out_says(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--num_images", "0", "--out", str(tmp_path / "page.html"), "--device", "cpu"]) == 0
    assert "page written to" in capsys.readouterr().out
    page = (tmp_path / "page.html").read_text()
    assert "No images were asked for" in page and "--num_images 4</code>" in page
    assert not (run / "report.html").exists()


def test_a_page_does_not_take_the_place_of_a_result(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "phases.json").read_bytes()
    assert main(["report", str(run), "--num_images", "0", "--out", str(run / "phases.json")]) == 2
    assert "give a name with --out that ends in .html" in capsys.readouterr().err
    assert (run / "phases.json").read_bytes() == before


def test_the_page_of_a_result(run: Path) -> None:
    """In Python a Path or a command's own result stands for its folder, and the page for its file."""
    found = phases(["scenes"], k=[2], num_images=4, out=str(run / "other"), device="cpu", twin=False)
    for given in (run / "other", found):
        page = report(given, num_images=0)
        assert page.path == run / "other" / "report.html" == Path(page) and page.files == ["phases"]
        assert Path(page).stat().st_size == page.num_bytes and page.to_dict()["path"] == str(page.path)
    assert len(repr(page)) < 400 and "phases.json" in page._repr_html_() and len(page.to_dataframe()) == 1


def test_images_are_measured_once(run: Path) -> None:
    assert report(str(run), num_images=1, device="cpu").path == run / "report.html"
    measured = json.loads((run / "images.json").read_text())
    assert measured["num_images"] == 1 and measured["data"] == "scenes"
    made = (run / "images.json").stat().st_mtime_ns
    report(str(run), num_images=1, device="cpu")
    assert (run / "images.json").stat().st_mtime_ns == made


def test_images_are_measured_again_where_they_changed(run: Path, tmp_path: Path) -> None:
    """Files that were replaced under their names, and another teacher than the run's own."""
    write_tree(tmp_path / "photos", [f"{part}/{i}.png" for part in ("train", "val") for i in range(3)])
    made = partial(report, str(run), num_images=2, data=str(tmp_path / "photos"), device="cpu")

    def shown() -> list[str]:
        made()
        return [entry["image"] for entry in json.loads((run / "images.json").read_text())["images"]]

    first = shown()
    for i in range(3):
        save_array(tmp_path / "photos" / "val" / f"{i}.png", np.full((9, 9, 3), 40 * i, np.uint8))
    assert shown() != first
    measured = json.loads((run / "images.json").read_text())
    (run / "images.json").write_text(json.dumps({**measured, "teacher": "scenes (another teacher)"}))
    made()
    assert json.loads((run / "images.json").read_text())["teacher"] == "scenes"
    shutil.rmtree(tmp_path / "photos")
    (run / "images.json").unlink()


@pytest.mark.parametrize("measure", [phases, dynamics], ids=["phases", "dynamics"])
def test_plain_results_show_the_images_that_they_measured(measure: Callable[..., Any], tmp_path: Path) -> None:
    """Their folder is no run: its results name the model and the images."""
    photos, folder = tmp_path / "photos", tmp_path / "plain"
    write_tree(photos, [f"{i}.png" for i in range(6)])
    few: dict[str, Any] = {"k": [2], "twin": False} if measure is phases else {"stability": False, "sample_images": 2}
    model: Any = ["scenes"] if measure is phases else "scenes"
    measure(model, data=str(photos), num_images=4, out=str(folder), device="cpu", **few)
    page = partial(report, str(folder), num_images=2, device="cpu")
    assert 'id="strip"' in page().path.read_text()
    shown = json.loads((folder / "images.json").read_text())
    measured = json.loads((folder / f"{measure.__name__}.json").read_text())["subject"]
    assert shown["num_images"] == 2 and shown["subject"]["num_images"] == measured["num_images"] == 4
    assert [shown["subject"][name] for name in ("model", "images")] == [measured[name] for name in ("model", "images")]
    made = (folder / "images.json").stat().st_mtime_ns
    page()
    assert (folder / "images.json").stat().st_mtime_ns == made
    (folder / "images.json").unlink()
    for file in photos.iterdir():
        save_array(file, np.full((9, 9, 3), 90, np.uint8))
    assert "holds other images than those that were measured" in page().path.read_text()
    assert not (folder / "images.json").exists()


def test_plain_results_of_a_weight_file_take_their_model(tmp_path: Path) -> None:
    """They name it by the stem of the file, which opens nothing."""
    photos, folder = tmp_path / "photos", tmp_path / "plain"
    write_tree(photos, [f"{i}.png" for i in range(6)])
    names = []
    for seed in range(2):
        torch.manual_seed(seed)
        torch.save(timm.create_model("vit_tiny_patch16_224", num_classes=0).state_dict(), tmp_path / f"w{seed}.pth")
        names.append(f"timm/vit_tiny_patch16_224@{tmp_path / f'w{seed}.pth'}")
    phases([names[0]], data=str(photos), k=[2], size=32, out=str(folder), device="cpu", twin=False)
    page = partial(report, str(folder), num_images=2, device="cpu")
    assert f"raptor report {folder} --teacher MODEL, or --module, opens it" in page().notes["images"]
    with pytest.raises(ValueError, match=r"does not hold the weights that .* was made with"):
        page(teacher=names[1])
    found = page(teacher=names[0])
    assert "images" not in found.notes and 'id="strip"' in found.path.read_text()
    assert json.loads((folder / "images.json").read_text())["subject"]["size"] == 32
    write_tree(tmp_path / "others", ["0.png", "1.png", "2.png"])
    others = page(teacher=names[0], data=str(tmp_path / "others"), split="all")
    assert "images" not in others.notes and json.loads((folder / "images.json").read_text())["num_images"] == 2


def test_results_of_images_in_memory_have_a_page_with_a_note(tmp_path: Path) -> None:
    module = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=4, num_classes=0)
    phases([module], data=torch.rand(4, 3, 32, 32), k=[2], out=str(tmp_path), device="cpu", twin=False)
    page = report(str(tmp_path), teacher=module, device="cpu")
    assert "could not be followed" in page.notes["images"] and page.path.is_file()


def test_a_negative_number_of_images_is_refused(run: Path) -> None:
    with pytest.raises(ValueError, match="--num_images must be at least 0"):
        report(str(run), num_images=-1)


def test_data_that_was_asked_for_and_is_not_there_is_an_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--data", "nowhere"]) == 2
    assert "unknown data 'nowhere'" in capsys.readouterr().err


def test_a_run_of_an_own_module_with_a_weight_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights are those of the run: only the code of the model has to be given."""
    monkeypatch.chdir(tmp_path)
    shape = dict(img_size=32, embed_dim=48, num_heads=3, depth=3)
    Path("mine.py").write_text(
        f"import timm\n\ndef make_vit():\n    return timm.create_model('vit_tiny_patch16_224', **{shape})\n"
    )
    torch.save(timm.create_model("vit_tiny_patch16_224", **shape).state_dict(), "weights.pth")
    words = "--phases 1 2 --budget 2steps --batch_size 4 --train_images 8 --num_images 4 --out run"
    made = [*words.split(), "--data", "scenes", "--weights", "weights.pth", "--device", "cpu"]
    assert main(["distill", "--module", "mine.py:make_vit", *made]) == 0
    page = ["report", "run", "--module", "mine.py:make_vit", "--num_images", "1", "--device", "cpu"]
    assert main(page) == 0 and Path("run/images.json").exists()
    Path("run/images.json").unlink()
    Path("weights.pth").rename("moved.pth")
    capsys.readouterr()
    assert main(page) == 2
    told = "weights.pth, which run was made with, is not there: give its new place with --weights"
    assert capsys.readouterr().err.strip().splitlines()[-1] == f"raptor: {told}"
    assert main([*page, "--weights", "moved.pth"]) == 0 and Path("run/images.json").exists()


def test_a_run_without_a_surrogate_is_not_shown_with_other_weights(tmp_path: Path) -> None:
    """images.json would keep them under the name of the run's own model."""
    made = [timm.create_model("test_vit") for _ in range(2)]
    files = [str(tmp_path / f"{i}.safetensors") for i in range(2)]
    for model, file in zip(made, files):
        save_file(model.state_dict(), file)
    folder = tmp_path / "begun"
    folder.mkdir()
    begun = Results(folder, config={"model": "timm/test_vit", "fingerprint": fingerprint(made[0])})

    def shown(**given: str) -> ViT:
        return open_models(begun, ReportConfig(str(folder), **given), "cpu")[0]

    assert fingerprint(shown(weights=files[0]).model) == fingerprint(made[0])
    with pytest.raises(RunError, match=r"1\.safetensors does not hold the weights that .*begun was made with"):
        shown(weights=files[1])
    with pytest.raises(RunError, match="begun holds no surrogate and has no teacher"):
        shown(teacher="scenes")
    save_vit(open_vit("timm/test_vit", weights=files[0]), tmp_path / "trained" / "teacher")
    with pytest.raises(RunError, match="trained holds a model with its own weights: leave out --weights"):
        open_models(Results(tmp_path / "trained"), ReportConfig(str(tmp_path / "trained"), weights=files[1]), "cpu")
