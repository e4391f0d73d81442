"""raptor depth: its file, its rules by name, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import tiny_teacher

from raptor.cli import main
from raptor.commands import depth
from raptor.recurrence.depth import FULL, DepthFile
from raptor.surrogate.surrogate import make_surrogate

FEW = dict(num_images=12, device="cpu")


def test_rules_by_name_on_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["depth", "scenes-k3", "--exit", "turn<.3", "random<.2", "--out", str(tmp_path), "--json"]
    assert main([*words, "--num_images", "12", "--device", "cpu"]) == 0
    printed = json.loads(capsys.readouterr().out)["depth"]
    measured = DepthFile.read(tmp_path)
    assert (tmp_path / "depth.json").read_text().startswith('{"subject": {"model"') and measured.batch_size == 8
    assert printed["surrogate"] == [point.to_dict() for point in measured.surrogate]
    for points in measured.sides().values():
        assert [point.rule for point in points] == [FULL, "turn<.3", "random<.2"]
        assert points[0].num_images == 12 and points[0].blocks == 1 and 0.25 < points[1].blocks < 1
    assert measured.teacher[0].agreement == 1 and len(measured.findings) == 2
    assert (tmp_path / "figures" / "depth.png").exists()


def test_the_seed_is_also_that_of_a_rule_by_name(tmp_path: Path) -> None:
    found = []
    for seed in (0, 0, 1):
        measured = depth("scenes-k3", exit=["random<.5"], seed=seed, out=str(tmp_path), **FEW).measured
        found.append([points[1].blocks for points in measured.sides().values()])
    assert found[0] == found[1] != found[2]


def test_rules_that_fit_the_model_and_a_short_text(tmp_path: Path) -> None:
    found = depth("scenes-k2", num_images=4, device="cpu", out=str(tmp_path))
    families = {point.family for point in found.measured.surrogate}
    assert families == {FULL, "turn", "second", "entropy", "kl", "random", "shorter"}
    assert "full depth" in found.text() and found.text().count("\n") < 100 and len(found.table_rows()) > 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("scenes", "scenes is no surrogate: make one with raptor distill"),
        ("scenes-k3 --exit turn", "cannot read the rule 'turn'"),
        ("scenes-k3 --num_images 1", "has one image, and shares of images are measured: give at least two"),
    ],
)
def test_what_is_refused(words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["depth", *words.split(), "--out", str(tmp_path), "--device", "cpu"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error


def test_a_model_without_a_head_needs_labels_for_one(tmp_path: Path) -> None:
    teacher = tiny_teacher(num_classes=0)
    surrogate = make_surrogate(teacher, (2, 2))
    flat = tmp_path / "flat"
    flat.mkdir()
    for i in range(4):
        from PIL import Image

        Image.new("RGB", (30, 30), (60 * i, 0, 0)).save(flat / f"{i}.png")
    with pytest.raises(ValueError, match=r"has no head, none was given .* give --head_file, or --data with labels"):
        depth(surrogate, teacher=teacher, data=str(flat), split="all", out=str(tmp_path / "out"), **FEW)
    found = depth(
        surrogate, teacher=teacher, data="scenes", train_images=40, exit=["turn<.1"], out=str(tmp_path / "out"), **FEW
    )
    assert found.measured.head.startswith("a ridge probe")
