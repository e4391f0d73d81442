"""raptor edit: its file, classes by name, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_images import SPLIT_TREE, write_tree

from raptor.cli import main
from raptor.commands import edit
from raptor.recurrence.edit import EditFile

FEW = ["--num_images", "6", "--train_images", "120", "--device", "cpu"]


def test_an_edit_at_one_phase(tmp_path: Path) -> None:
    options = dict(at=2, num_images=6, train_images=200, device="cpu")
    found = edit("scenes-k3", to="matte cube", out=str(tmp_path), **options)
    measured = EditFile.read(tmp_path)
    assert (measured.to, measured.class_name, measured.num_means) == (4, "matte cube", 200)
    for results in measured.sides().values():
        (one,) = results
        assert one.phase == 2 and one.to == 4 and one.flipped > 0.5
    assert "end of phase 2" in found.text() and len(found.table_rows()) == 2


def test_the_precision_is_that_of_the_models(tmp_path: Path) -> None:
    options = dict(to="matte cube", at=2, num_images=6, train_images=200, device="cpu")
    fp32 = edit("scenes-k3", precision="fp32", out=str(tmp_path / "fp32"), **options).measured.surrogate
    bf16 = edit("scenes-k3", precision="bf16", out=str(tmp_path / "bf16"), **options).measured.surrogate
    assert fp32[0].step is not None and fp32 != bf16
    assert bf16[0].step == pytest.approx(fp32[0].step, rel=0.1)


def test_class_means_are_not_of_images_that_are_edited(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    write_tree(photos, SPLIT_TREE)
    with pytest.raises(ValueError, match="are also in the training images of"):
        edit("scenes-k3", to="0", data=str(photos), val=str(photos / "train"), out=str(tmp_path / "out"), device="cpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--at", "1"], "name the class to edit towards: --to CLASS, one of 20 such as matte sphere"),
        (["--to", "mate cube"], "--to mate cube is not a class of scenes: did you mean matte cube?"),
        (["--to", "99"], "--to 99 is not a class of scenes: choose from 20 such as"),
        (["--to", "3", "--at", "4"], "there is no phase 4: --at takes 1 to 3"),
    ],
)
def test_what_is_refused(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["edit", "scenes-k3", *words, *FEW, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
