"""raptor correct: its file, its models, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_images import SPLIT_TREE, write_tree

from raptor import open_vit
from raptor.cli import main
from raptor.commands import correct
from raptor.recurrence.correct import CorrectFile
from raptor.vit.saved import save_vit


def test_every_disturbance_of_every_model(tmp_path: Path) -> None:
    options = dict(at=3, num_images=6, extra=2, noise=1.0, device="cpu")
    found = correct("scenes-k3", beside="scenes-k3", out=str(tmp_path), **options)
    measured = CorrectFile.read(tmp_path)
    assert list(measured.sides) == ["surrogate", "teacher", "twin", "beside"]
    for corrections in measured.sides.values():
        kinds = [(one.disturbance, one.size) for one in corrections]
        assert kinds == [("noise", 1.0), ("dropped patches", 0.3), ("blur", 3), ("jpeg", 3)]
        assert all(len(one.agreement) == 3 and one.agreement_clean[0] == 1 for one in corrections)
    assert measured.sides["beside"] == measured.sides["surrogate"], "it is the same model here"
    assert measured.beside == "scenes-k3" and "beside is scenes-k3" in found.text()
    assert "surrogate, noise 1:" in found.text() and len(found.table_rows()) == 4 * 4 * 3


def test_a_surrogate_beside_is_not_judged_on_images_that_it_was_trained_on(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    write_tree(photos, SPLIT_TREE)
    run = tmp_path / "run"
    save_vit(open_vit("scenes-k3"), run / "surrogate")
    (run / "config.yaml").write_text(f"data: {photos}\n")
    options = dict(at=3, extra=1, device="cpu", out=str(tmp_path / "out"))
    with pytest.raises(ValueError, match=r"are also in the training images of .*: name others with --data"):
        correct("scenes-k3", data="scenes", val=str(photos / "train"), beside=str(run / "surrogate"), **options)
    found = correct("scenes-k3", data="scenes", val=str(photos / "val"), beside=str(run / "surrogate"), **options)
    assert "beside" in found.measured.sides


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--at 7", "there is no phase 7: --at takes 1 to 3"),
        ("--beside scenes-k2", "is not a surrogate with the phases"),
        ("--extra 65", "--extra"),
    ],
)
def test_what_is_refused(words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--num_images", "4", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["correct", "scenes-k3", *words.split(), *few]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
