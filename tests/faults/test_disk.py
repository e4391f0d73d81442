"""A disk that fills up and one that cannot be written: one line, and nothing that was there is lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_artefacts import Artefacts
from fault_cases import Faults, WholeRuns
from fault_runs import image_folder

BYTES = 800_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 800 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={BYTES}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"a small disk cannot be mounted here: {error}")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, left: int) -> Path:
    """A file that leaves only `left` bytes free."""
    ballast = disk / "ballast"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    ballast.write_bytes(b"\0" * max(0, free - left))
    return ballast


def test_a_training_on_a_disk_that_fills_up(disk: Path, tmp_path: Path, faults: Faults, whole_runs: WholeRuns) -> None:
    """Less and less is left, so that one write after the other fails: config, head, checkpoint, surrogate, summary."""
    whole, _ = whole_runs("distil")
    out = disk / "run"
    artefacts = Artefacts(out, "surrogate")
    for left in (0, 8_000, 70_000, 150_000, 280_000, 300_000, 20_000):
        ballast = fill(disk, left)
        code = faults.finish("distil", out)
        ballast.unlink()
        if code == 0:
            break
        assert code == 2 and "the disk is full" in faults.said() and "\n" not in faults.said(), faults.said()
        assert "checkpoint" in faults.said()
        faults.fault("other faults", artefacts)
    assert artefacts.step >= 0, "no checkpoint was written before the disk was full"
    assert faults.finish("distil", out) == 0, faults.said()
    faults.ends_like(artefacts, whole)
    assert not list(out.rglob("*.tmp"))


def test_commands_on_a_full_disk_keep_the_old_result(disk: Path, tmp_path: Path, faults: Faults) -> None:
    images = str(image_folder(tmp_path / "images"))
    for name, words in {
        "phases.json": ["phases", "scenes", "--k", "2", "--num_images", "4", "--twin", "false"],
        "states.json": ["states", "scenes", "--num_images", "4"],
        "probe-classify.json": [
            "probe",
            "scenes",
            "--closed_form",
            "ridge",
            "--train_images",
            "8",
            "--num_images",
            "4",
        ],
    }.items():
        out = disk / words[0]
        words = [*words, "--data", images, "--device", "cpu"]
        assert faults.finish("command", out, words=words) == 0
        old = (out / name).read_bytes()
        ballast = fill(disk, 0)
        assert faults.finish("command", out, words=words) == 2
        faults.fault("other faults")
        ballast.unlink()
        assert (out / name).read_bytes() == old, f"{name} was lost"
        assert not [path for path in out.iterdir() if path.suffix == ".tmp" and path.stat().st_size]


def test_an_output_that_cannot_be_written(disk: Path, faults: Faults, whole_runs: WholeRuns) -> None:
    whole, _ = whole_runs("teacher")
    out = disk / "run"
    artefacts = Artefacts(out, "teacher")
    assert faults.finish("teacher", out, {"die_at": 60}) == -9
    faults.fault("kills", artefacts)
    assert artefacts.step >= 0
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert faults.finish("teacher", out) == 2
    faults.fault("other faults", artefacts)
    assert "Read-only" in faults.said() and "last good checkpoint is" in faults.said() and "\n" not in faults.said()
    assert faults.finish("teacher", disk / "new") == 2 and "Read-only" in faults.said()
    faults.fault("other faults")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == files
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert faults.finish("teacher", out) == 0, faults.said()
    faults.ends_like(artefacts, whole)
