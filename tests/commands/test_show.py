"""raptor show: pictures as files, of a model or of a run's surrogate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_models import tiny_timm
from tiny_run import tiny_run

from raptor.cli import main
from raptor.commands import show


@pytest.fixture
def photo(tmp_path: Path) -> str:
    path = tmp_path / "cat.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)).save(path)
    return str(path)


@pytest.mark.usefixtures("drawn_figures")
def test_pictures_of_the_built_in_model(photo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["show", "scenes", photo, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "the head says" in printed
    for name in ("attention", "pca", "lens", "turn"):
        with Image.open(out / f"cat-{name}.png") as picture:
            assert picture.width > 300
        assert f"cat-{name}.png" in printed
    assert len(list(out.iterdir())) == 4


def test_only_what_is_asked_for_is_drawn(photo: str, tmp_path: Path) -> None:
    found = show("scenes", photo, what=["turn"], layers=[3], out=str(tmp_path / "out"))
    assert list(found.files) == ["turn"] and found.top == []
    assert [row["what"] for row in found.table_rows()] == ["turn"]


def test_a_model_without_a_head_has_no_lens(photo: str, tmp_path: Path) -> None:
    vit = tiny_timm("vit_small_patch14_dinov2")
    found = show(vit, photo, out=str(tmp_path / "out"))
    assert list(found.files) == ["attention", "pca", "turn"] and "no logit lens" in found.text()
    with pytest.raises(ValueError, match="has no classifier for a logit lens"):
        show(vit, photo, what=["lens"], out=str(tmp_path / "out"))


def test_pictures_of_a_surrogate(photo: str, tmp_path: Path) -> None:
    done = tiny_run(tmp_path / "run", budget="2steps")
    found = show(done, photo, what=["attention"], out=str(tmp_path / "out"))
    assert found.model == done.surrogate.name and found.files["attention"].exists()


def test_what_is_no_image_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cat.png").write_text("no picture")
    assert main(["show", "scenes", str(tmp_path / "cat.png")]) == 2
    assert "cat.png is not an image" in capsys.readouterr().err
    assert main(["show", "scenes", str(tmp_path / "absent.png")]) == 2
    assert "absent.png" in capsys.readouterr().err
