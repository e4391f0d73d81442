"""raptor train-teacher: what it prints is what it saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from tiny_run import TEACHER as TINY

from raptor.cli import main
from raptor.commands.train_teacher import train_teacher
from raptor.data import ChosenData
from raptor.run import read_config
from raptor.train.teacher import TeacherSummary
from raptor.vit.open import open_vit


def test_accuracy_and_folder_are_printed(tmp_path: Path) -> None:
    done = train_teacher("vit_tiny_patch16_224", out=str(tmp_path / "run"), **{**TINY, "budget": "2steps"})
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert done.to_dict() == {"folder": str(tmp_path / "run"), **summary}
    assert TeacherSummary.read(tmp_path / "run") == done.summary
    assert f"accuracy {summary['accuracy']:.1%}" in done.text() and str(tmp_path / "run") in done.text()


def test_the_teacher_is_saved_where_other_commands_find_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    words = "train-teacher --size 16 --patch 8 --dim 16 --depth 2 --heads 2 --budget 1steps --batch_size 4"
    assert (
        main(
            [
                *words.split(),
                "--train-images",
                "16",
                "--num-images",
                "8",
                "--crop_scale",
                "0.5",
                "1",
                "--device",
                "cpu",
                "--out",
                out,
            ]
        )
        == 0
    )
    assert f"run folder {out}" in capsys.readouterr().out
    assert "crop_scale" in (tmp_path / "run" / "config.yaml").read_text()
    assert main(["phases", out, "--num-images", "8", "--k", "2", "--out", str(tmp_path / "p"), "--device", "cpu"]) == 0


def test_an_unknown_argument_is_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected argument 'head': did you mean heads"):
        train_teacher(out=str(tmp_path), head=3)  # type: ignore[call-arg]


def test_joined_images_and_others_to_judge_on(tmp_path: Path) -> None:
    for i in range(24):
        path = tmp_path / ("one", "two", "other")[i % 3] / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (24, 24), (10 * i, 90 * (i % 2), 30)).save(path)
    one, two, other = (str(tmp_path / name) for name in ("one", "two", "other"))
    tiny = {**TINY, "budget": "1steps", "batch_size": 4, "train_images": None}
    done = train_teacher(data=[one, two], val=[other], out=str(tmp_path / "run"), **tiny)
    config = read_config(tmp_path / "run")
    assert config["data"] == [one, two] and config["val"] == other and done.teacher.num_classes == 2
    chosen = ChosenData.of(tmp_path / "run", {})
    assert chosen == ChosenData([one, two], other) and (len(chosen.training()), len(chosen.judged())) == (14, 8)
    Image.new("RGB", (24, 24)).save(tmp_path / "other/a/new.png")
    with pytest.raises(ValueError, match=r"other holds other images than those .*run was made with: give --val"):
        ChosenData.of(tmp_path / "run", {}).judged()
    assert open_vit(tmp_path / "run").classes == ["a", "b"]
    (tmp_path / "other" / "a").rename(tmp_path / "other" / "c")
    with pytest.raises(ValueError, match=r"other has other classes than .*one .*two: give --val with the same ones"):
        train_teacher(data=[one, two], val=other, out=str(tmp_path / "wrong"), **tiny)
