"""raptor head: both heads in its result and in the certificate."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_models import tiny_timm

from raptor.certificate.certificate import Certificate
from raptor.certificate.refit import HeadFit
from raptor.cli import main
from raptor.commands.evaluate import evaluate
from raptor.commands.head import head
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.open import open_vit
from raptor.vit.saved import save_vit

FEW = dict(data="scenes", device="cpu", num_images=12)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_vit(tiny_timm(num_classes=5), tmp_path / "tiny")
    save_vit(make_surrogate(open_vit(tmp_path / "tiny"), (1, 3)), tmp_path / "run" / "surrogate")
    return tmp_path / "run"


def test_the_certificate_has_both_heads(run: Path) -> None:
    fitted = head(str(run), budget="6steps", batch_size=8, train_images=16, lr=1e-2, **FEW)
    fit = HeadFit.read(run)
    assert fit.num_steps == 6 and fit.num_judged == 12 and fit.head.endswith("(untrained) itself")
    assert fit.last_loss < fit.first_loss
    assert f"agreement with the teacher {fit.untouched} with the untouched head, {fit.refitted}" in fitted.text()

    again = head(str(run), budget="6steps", batch_size=8, train_images=16, lr=1e-2, **FEW)
    assert (again.fit.first_loss, again.fit.last_loss) == (fit.first_loss, fit.last_loss)

    judged = evaluate(str(run), sample_images=0, shift=["noise"], **FEW)
    predictions = Certificate.read(run).predictions
    assert predictions["agreement"] == fit.untouched and predictions["refitted_agreement"] == fit.refitted
    assert judged.certificate.shift[0].refitted is not None
    text = judged.text()
    assert "refitted head" in text and "norm and head fitted to the teacher's outputs in 6 steps" in text

    # A head that judges by other classes has no refitted twin.
    saved = json.loads((run / HeadFit.FILE).read_text())
    (run / HeadFit.FILE).write_text(json.dumps({**saved, "head": "the head in other.safetensors"}))
    other = evaluate(str(run), sample_images=0, **FEW).certificate
    assert "refitted_agreement" not in other.predictions
    assert any("the refitted head is left out" in note for note in other.notes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "soon"], "cannot read the budget 'soon'"),
        (["--lr", "0"], "--lr"),
        (["--data", "missing"], "missing"),
    ],
)
def test_wrong_options_are_one_line(
    run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["head", str(run), "--device", "cpu", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


def test_without_head_and_labels_there_is_nothing_to_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_vit(tiny_timm(num_classes=0), tmp_path / "tiny")
    save_vit(make_surrogate(open_vit(tmp_path / "tiny"), (1, 3)), tmp_path / "run" / "surrogate")
    photos = write_photos(tmp_path / "photos")
    assert main(["head", str(tmp_path / "run"), "--data", str(photos), "--device", "cpu"]) == 2
    assert "give --head_file, or --data with labels" in capsys.readouterr().err
    assert main(["head", "scenes", "--device", "cpu"]) == 2
    assert "scenes is no surrogate" in capsys.readouterr().err


def write_photos(folder: Path) -> Path:
    """Twenty-four pictures without labels."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for i in range(24):
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return folder
