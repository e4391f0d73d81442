"""raptor probe: frames of the dense tasks take any size, whatever the model's patches."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raptor.commands.demo import demo
from raptor.commands.probe import Probed, probe
from raptor.files import RunError
from raptor.report.probes import probes
from raptor.report.results import read_results
from raptor.vit.names import ASSETS
from raptor.vit.open import open_vit
from raptor.vit.pair import open_pair

SMALL = dict(data="scenes", lr=[1e-2], train_images=12, num_images=6, budget="1epochs", batch_size=4, device="cpu")


def test_frames_of_any_size_are_padded(tmp_path: Path) -> None:
    # The built-in teacher has patches of 8 pixels: 30 is no multiple of it.
    done = probe("scenes", task="depth", size=30, out=str(tmp_path), **SMALL)
    teacher = done.results["teacher"]
    assert teacher.score > 0
    # A share of an error is the teacher's divided by the other one.
    shares = {name: teacher.score / floor for name, floor in teacher.floors.items()}
    assert done.report.floors == pytest.approx(shares) and set(shares) == {"constant depth", "mean map"}
    assert (tmp_path / "probe-depth.json").is_file()
    with pytest.raises(ValueError):
        probe("scenes", task="classify", size=30, out=str(tmp_path), **SMALL)


def test_the_default_folder_and_the_structure_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = {}

    def opened(source, **options):
        seen.update(options)
        return open_pair("scenes")

    monkeypatch.setattr(sys.modules["raptor.commands.job"], "open_pair", opened)
    done = probe("timm/some model", size=48, **SMALL)
    assert done.folder == Path("runs/probe-timm_some_model")
    assert seen["size"] == 48 and seen["pretrained"]


def test_teacher_and_surrogate_are_probed_for_equal_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.3, 0.03])  # a machine that is busy while the teacher trains
    monkeypatch.setattr("raptor.probes.protocol.step_seconds", lambda *_: next(seconds))
    done = probe("scenes-k3", task="segment", out=str(tmp_path), **{**SMALL, "budget": "1s"})
    assert {side: result.num_steps for side, result in done.results.items()} == {"teacher": 3, "surrogate": 3}
    assert done.text().count("(only 3 of 20 planned steps)") == 2 and "recovery" in done.text()
    floors = done.report.floors
    beside = ", ".join(f"{share:.1%} by {name}" for name, share in floors.items())
    assert f"(without seeing the image: {beside})" in done.text() and "majority map" in beside
    saved = json.loads((tmp_path / "probe-segment.json").read_text())
    assert saved["results"]["teacher"]["unfinished"] == "only 3 of 20 planned steps"
    page = probes(read_results(tmp_path)).html
    assert page.count("only 3 of 20 planned steps") == 2


def test_unequal_steps_give_no_recovery(tmp_path: Path) -> None:
    report = probe("scenes-k3", task="segment", out=str(tmp_path), **SMALL).report
    assert report.recovery is not None and report.unequal is None
    report.results["teacher"].seeds[0].num_steps = 1
    assert report.recovery is None and report.to_dict()["recovery"] is None
    assert "unequal steps (1 of the teacher" in Probed(report, tmp_path).text()


def test_the_demo_does_not_probe_by_the_clock() -> None:
    source = inspect.getsource(demo)
    assert "max_seconds" not in source


def test_a_recovery_that_says_little_is_told_of(tmp_path: Path) -> None:
    done = probe("scenes-k3", task="classify", out=str(tmp_path), **{**SMALL, "train_images": 32, "num_images": 40})
    told = done.report.caution
    assert told is not None and told.startswith("this recovery says little: ")
    steps = done.results["teacher"].num_steps
    assert told.endswith(f"only 40 images were scored, and only {steps} steps were trained") and told in done.text()
    assert json.loads((tmp_path / "probe-classify.json").read_text())["caution"] == told
    assert told in probes(read_results(tmp_path)).html
    teacher = done.results["teacher"]
    assert teacher.chance == 1 / len(teacher.classes or ())
    pick = replace(teacher.seeds[0].chosen, reported={"accuracy": teacher.chance})
    guessing = replace(teacher, seeds=[replace(teacher.seeds[0], chosen=pick)])
    report = replace(done.report, results={**done.results, "teacher": guessing})
    assert report.caution is not None and "the teacher is no better than a guess (" in report.caution
    assert "guess" not in told


def test_scores_on_training_images_say_so(tmp_path: Path) -> None:
    done = probe("scenes", task="depth", split="train", size=32, out=str(tmp_path), **SMALL)
    assert " on 6 training images of scenes at 32 px" in done.text() and "held-out" not in done.text()
    assert "6 training images of scenes at 32 px" in probes(read_results(tmp_path)).html


def test_all_frames_of_data_that_are_only_judged_on_are_scored(tmp_path: Path) -> None:
    for folder, seed in (("a", 0), ("b", 1)):
        rng = np.random.default_rng(seed)
        for i in range(10):
            for kind, values in (
                ("rgb", rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)),
                ("depth", rng.integers(500, 5000, (24, 32), dtype=np.uint16)),
            ):
                path = tmp_path / folder / kind / f"{i:04d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(values).save(path)
    few = {**SMALL, "train_images": None, "num_images": None, "size": 24, "out": str(tmp_path / "out")}
    given = {"data": f"nyuv2:{tmp_path / 'a'}", "val": f"nyuv2:{tmp_path / 'b'}"}
    done = probe("scenes", task="depth", **{**few, **given})
    assert done.results["teacher"].num_images["reported"] == 10
    same = {**given, "val": given["data"]}  # its held-out part
    few["out"] = str(tmp_path / "part")
    assert probe("scenes", task="depth", **{**few, **same}).results["teacher"].num_images["reported"] == 1


def test_results_do_not_go_into_the_run_of_another_model(tmp_path: Path) -> None:
    """Its page would show both as one."""
    run = tmp_path / "run"
    shutil.copytree(ASSETS / "scenes-k3", run / "surrogate")
    for other in ("scenes-k2", open_vit("scenes-k2")):
        with pytest.raises(RunError, match=r"run is the run of another model \(.*\): choose another --out"):
            probe(other, task="depth", out=str(run), **SMALL)
    assert probe("scenes", task="depth", out=str(run), **SMALL).folder == run  # its teacher
    assert probe(str(run), task="depth", **SMALL).folder == run
    assert probe("scenes-k3", task="depth", out=str(run), **SMALL).folder == run  # a copy of it
