from __future__ import annotations

import functools
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import tiny_timm

from raptor.cli import main
from raptor.commands.dynamics import choose_classes, dynamics
from raptor.config import DynamicsConfig
from raptor.data.images import ImageData
from raptor.dynamics.interventions import InterventionsFile
from raptor.dynamics.jacobian import measure_jacobians
from raptor.dynamics.measure import DynamicsFile
from raptor.recipes import load_recipe
from raptor.report import figures
from raptor.report.dynamics import dynamics_charts
from raptor.report.figures import FIGURES
from raptor.report.interventions import intervention_charts
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.open import open_vit
from raptor.vit.saved import save_vit

SMALL = dict(data="scenes", num_images=48, num_classes=2, sample_images=2, eps=(1e-2,))


def without_provenance(path: Path) -> dict:
    values = json.loads(path.read_text())
    assert {"command", "versions", "device", "seconds"} <= values.pop("provenance").keys()
    return values


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with an untrained surrogate of a tiny teacher, measured once."""
    folder = tmp_path_factory.mktemp("run")
    save_vit(tiny_timm("vit_small_patch14_reg4_dinov2", reg_tokens=2, num_classes=5), folder / "tiny")
    save_vit(make_surrogate(open_vit(folder / "tiny"), (1, 3)), folder / "surrogate")
    result = dynamics(str(folder), **SMALL, device="cpu")
    assert result.folder == folder
    return folder


def test_perturbations_in_half_precision_are_refused(run: Path) -> None:
    with pytest.raises(ValueError, match="is opened in bfloat16: perturbations are followed in fp32"):
        dynamics(open_vit(run / "tiny", dtype="bf16"), data="scenes")


def test_run_folder_gives_both_sides(run: Path) -> None:
    measured, changed = (json.loads((run / f"{name}.json").read_text()) for name in ("dynamics", "interventions"))
    assert measured["phases"] == [1, 3] and measured["num_images"] == 48 and measured["image_size"] == 28
    for side in ("teacher", "surrogate"):
        assert {"direction", "rank", "modes", "basins", "stability", "findings"} <= measured[side].keys()
        assert len(measured[side]["direction"]["norm"]["cls"]["mean"]) == 5
    assert measured["teacher"]["model"]["phases"] is None and measured["surrogate"]["model"]["phases"] == [1, 3]
    # a_0 is the same on both sides, a_4 is not
    norms = [np.array(measured[side]["direction"]["norm"]["all"]["mean"]) for side in ("teacher", "surrogate")]
    assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-6) and abs(norms[0][-1] - norms[1][-1]) > 1e-3
    assert changed["teacher"]["extrapolation"] is None and changed["surrogate"]["extrapolation"] is not None
    assert len(changed["findings"]) == 5
    assert len(changed["teacher"]["swaps"]["angle"]["all"]["mean"]) == 6  # pairs of four blocks


def test_every_panel_is_drawn(run: Path) -> None:
    names = {name for name in FIGURES if name.split("-")[0] in ("dynamics", "interventions")}
    assert {p.stem for p in (run / "figures").glob("*.svg")} == names


@pytest.mark.usefixtures("drawn_figures")
def test_figures_are_saved_as_two_files_and_twice_with_the_same_bytes(run: Path, tmp_path: Path, monkeypatch) -> None:
    speed = "dynamics-speed"
    monkeypatch.setattr(figures, "FIGURES", {speed: FIGURES[speed]})
    measured = DynamicsFile.read(run)
    names = ", ".join(side.model.name for side in measured.sides().values())
    source = f"{names}; {measured.images}"
    saved = []
    for folder in (tmp_path / "once", tmp_path / "again"):
        assert figures.save_figures(dynamics_charts(measured), folder, source) == [speed]
        saved.append([(folder / f"{speed}.{kind}").read_bytes() for kind in ("png", "svg")])
    assert all(len(content) > 1000 for content in saved[0])
    assert saved[0] == saved[1]


def test_figures_that_a_new_result_lacks_are_removed(run: Path, tmp_path: Path) -> None:
    found, changed = DynamicsFile.read(run), InterventionsFile.read(run)
    names = figures.save_figures(dynamics_charts(found) + intervention_charts(changed), tmp_path, "")
    assert {"dynamics-basins", "interventions-extrapolation"} <= {*names}
    (tmp_path / "certificate.png").write_text("of another command")
    teacher = replace(found.teacher, basins=None)
    less = dynamics_charts(replace(found, teacher=teacher)) + intervention_charts(replace(changed, surrogate=None))
    again = figures.save_figures(less, tmp_path, "")
    assert "dynamics-basins" not in again and "interventions-extrapolation" not in again
    kept = {f"{name}.{kind}" for name in again for kind in ("png", "svg")}
    assert {file.name for file in tmp_path.iterdir()} == {*kept, "certificate.png"}
    figures.save_figures(dynamics_charts(found), tmp_path, "")  # interventions.json stays, and so do its figures
    assert (tmp_path / "interventions-swaps.png").exists() and (tmp_path / "dynamics-basins.png").exists()


def test_the_same_command_twice_gives_the_same_numbers(run: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("raptor.report.figures.save_figures", lambda *_: [])
    dynamics(str(run), **SMALL, device="cpu", out=str(tmp_path))
    for name in ("dynamics.json", "interventions.json"):
        assert without_provenance(run / name) == without_provenance(tmp_path / name)


def test_a_model_alone_through_the_command_line(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("raptor.report.figures.save_figures", lambda *_: [])
    options = "--num-images 8 --stability false --sample-images 2 --eps 1e-2 1e-1 --k 2 --num_classes 0 --device cpu"
    code = main(["dynamics", "scenes", *options.split(), "--interventions", "false", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    measured = json.loads((tmp_path / "dynamics.json").read_text())
    assert code == 0 and "scenes, 8 held-out images of scenes at 48 px\n" in printed and "norm:" in printed
    assert "measured on very few images (8), so other images may give other curves: --split all" in printed
    assert measured["surrogate"] is None and len(measured["phases"]) == 2 and sum(measured["phases"]) == 12
    assert measured["teacher"]["stability"] is None and measured["teacher"]["basins"] is None
    assert not (tmp_path / "interventions.json").exists()


def test_the_weights_of_an_untrained_model_depend_on_the_seed_only(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("raptor.report.figures.save_figures", lambda *_: [])
    options = dict(num_images=4, sample_images=2, stability=False, num_classes=0, k=2, interventions=False)

    def norms(seed: int) -> list[float]:
        given = dict(data="scenes", pretrained=False, size=32, seed=seed, device="cpu", out=str(tmp_path / str(seed)))
        found = dynamics("timm/test_vit", **options, **given)
        return found.measured.teacher.direction.norm["all"].mean.tolist()

    first = norms(1)
    assert norms(1) == first != norms(2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scenes", "--phases", "3", "3"], "do not sum to the 12 blocks"),
        (["no-such-model"], "unknown model"),
        (["scenes", "--data", "no-such-data"], "unknown data"),
        (["scenes", "--eps", "0", "--num-images", "4", "--k", "1"], "must be more than 0"),
    ],
)
def test_errors_are_one_line(words: list[str], message: str, tmp_path: Path, capsys) -> None:
    assert main(["dynamics", *words, "--device", "cpu", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
    assert not (tmp_path / "out").exists()


def test_choose_classes() -> None:
    def data(labels: list[int] | None) -> ImageData:
        return ImageData("x", [str(i) for i in range(len(labels or [0]))], labels)

    assert choose_classes(data([0, 1, 1, 2, 2, 2, 3, 3]), 2) == [1, 2]  # 1 and 3 tie: the lower one
    assert choose_classes(data([0, 0, 1]), 5) is None and choose_classes(data(None), 5) is None
    assert choose_classes(data([0, 0, 1, 1]), 0) is None


def test_recipe_names_options_of_the_command() -> None:
    options = DynamicsConfig.kinds().keys()
    recipe = load_recipe("dynamics-paper")
    assert recipe.keys() <= options and recipe["num_images"] == 10_000 and recipe["num_classes"] == 5


def test_labels_follow_a_file_of_class_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "save_figures", lambda *_: [])
    vit = tiny_timm("vit_small_patch14_reg4_dinov2", reg_tokens=2, num_classes=3)
    for i in range(6):
        path = tmp_path / "pets" / "val" / ("cat", "dog")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (28, 28), (40 * i, 90, 30)).save(path)
    (tmp_path / "head.txt").write_text("bird\ndog\ncat\n")
    few = dict(num_images=6, sample_images=2, stability=False, interventions=False, device="cpu")
    options = dict(data=str(tmp_path / "pets"), classes=str(tmp_path / "head.txt"), out=str(tmp_path / "out"))
    assert dynamics(vit, **options, **few).measured.class_names == {"1": "dog", "2": "cat"}


def test_interventions_are_on_images_of_all_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are read class by class: the first images are all of one class."""
    for i in range(24):
        path = tmp_path / "pets" / "val" / ("cat", "dog", "fish")[i // 8] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (28, 28), (120 * (i // 8), 90, i)).save(path)
    path.write_bytes(b"no image")
    given: list[torch.Tensor] = []

    def intervene(_teacher: Any, _surrogate: Any, images: torch.Tensor, *_rest: Any) -> None:
        given.append(images)
        raise InterruptedError

    monkeypatch.setattr(sys.modules["raptor.commands.dynamics"], "intervene", intervene)
    vit = tiny_timm("vit_small_patch14_reg4_dinov2", reg_tokens=2, num_classes=3)
    few = dict(num_images=24, stability=False, num_classes=0, device="cpu", k=2, skip_bad=True)
    for num in (8, 100):
        with pytest.raises(InterruptedError):
            options = dict(data=str(tmp_path / "pets"), out=str(tmp_path / "out"), sample_images=num)
            dynamics(vit, **options, **few)
    assert len(given[0]) == 8 and len(given[1]) == 23
    assert len(given[0][:, 0, 0, 0].unique()) == 3


def test_stability_beside_an_untrained_twin(tmp_path: Path, monkeypatch, capsys) -> None:
    few = ("tangents-jacobian", "tangents-lyapunov")
    monkeypatch.setattr(figures, "FIGURES", {name: FIGURES[name] for name in few})
    quick = functools.partial(measure_jacobians, max_iterations=2, num_random=1)
    monkeypatch.setattr("raptor.dynamics.tangents.measure_jacobians", quick)
    save_vit(tiny_timm("vit_small_patch14_reg4_dinov2", reg_tokens=0, depth=2, num_classes=5), tmp_path / "tiny")
    given = dict(SMALL, sample_images=2, stability=False, num_classes=0, interventions=False, tangents=True)
    found = dynamics(str(tmp_path / "tiny"), **given, k=1, device="cpu", out=str(tmp_path / "out"))
    assert found.tangents is not None and {"tangents-jacobian", "tangents-lyapunov"} <= {*found.figures}
    saved = json.loads((tmp_path / "out" / "tangents.json").read_text())
    assert next(iter(saved)) == "subject" and saved["num_images"] == 2
    assert list(found.tangents.sides()) == ["teacher", "twin"]
    assert found.tangents.findings[0] in found.text()
    growth = [saved[side]["jacobians"]["step"]["all"]["mean"] for side in ("teacher", "twin")]
    assert growth[0] != growth[1]


def test_a_ridge_head_is_not_fitted_on_the_images_that_are_measured(tmp_path: Path) -> None:
    vit = tiny_timm("vit_small_patch14_reg4_dinov2", reg_tokens=0, num_classes=0, depth=3)
    for name in ("cat", "dog"):
        (tmp_path / "a" / "train" / name).mkdir(parents=True)
        for number in range(4):
            pixels = np.random.default_rng(number).integers(0, 255, (28, 28, 3), dtype=np.uint8)
            Image.fromarray(pixels + (name == "cat")).save(tmp_path / "a" / "train" / name / f"{number}.png")
    shutil.copytree(tmp_path / "a" / "train", tmp_path / "b")
    with pytest.raises(ValueError, match="are also in the training images"):
        dynamics(vit, data=str(tmp_path / "a"), val=str(tmp_path / "b"), num_images=8, out=str(tmp_path / "out"))
