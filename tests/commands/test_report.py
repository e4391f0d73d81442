"""raptor report: where the page goes, and which images it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raptor.cli import main
from raptor.commands.phases import phases
from raptor.commands.report import report


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    phases(["scenes"], k=[2], num_images=16, out=str(folder), device="cpu")
    (folder / "config.yaml").write_text("model: scenes\ndata: scenes\n")
    return folder


def test_the_page_goes_where_out_says(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--images", "0", "--out", str(tmp_path / "page.html"), "--device", "cpu"]) == 0
    assert "page written to" in capsys.readouterr().out
    assert "No images were asked for" in (tmp_path / "page.html").read_text()
    assert not (run / "report.html").exists()


def test_the_page_of_a_result(run: Path) -> None:
    """In Python a Path or a command's own result stands for its folder, and the page for its file."""
    found = phases(["scenes"], k=[2], num_images=4, out=str(run / "other"), device="cpu", twin=False)
    for given in (run / "other", found):
        page = report(given, images=0)
        assert page.path == run / "other" / "report.html" == Path(page) and page.files == ["phases"]
        assert Path(page).stat().st_size == page.num_bytes and page.to_dict()["path"] == str(page.path)
    assert len(repr(page)) < 400 and "phases.json" in page._repr_html_() and len(page.to_dataframe()) == 1


def test_images_are_measured_once(run: Path) -> None:
    assert report(str(run), images=1, device="cpu").path == run / "report.html"
    measured = json.loads((run / "images.json").read_text())
    assert measured["num_images"] == 1 and measured["data"] == "scenes"
    made = (run / "images.json").stat().st_mtime_ns
    report(str(run), images=1, device="cpu")
    assert (run / "images.json").stat().st_mtime_ns == made


def test_a_negative_number_of_images_is_refused(run: Path) -> None:
    with pytest.raises(ValueError, match="--images must be at least 0"):
        report(str(run), images=-1)


def test_data_that_was_asked_for_and_is_not_there_is_an_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--data", "nowhere"]) == 2
    assert "unknown data 'nowhere'" in capsys.readouterr().err
