"""Validation images that are training images: files, other copies of them, and images in memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_images import colour, picture, pixels, save_array, write_hashed

from raptor.commands.probe import probe
from raptor.data import ChosenData, ImageData, open_data
from raptor.data.apart import check_apart


def test_a_few_images_that_are_also_trained_on_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_hashed(
        tmp_path / "x", [f"{part}/{c}/{part}{i}.png" for part in ("train", "val") for c in "ab" for i in range(8)]
    )
    chosen = ChosenData(str(root))
    assert len(chosen.judged(like=chosen.training())) == 16
    assert "training images" not in capsys.readouterr().err
    shutil.copy(root / "train/a/train3.png", root / "val/a/same.png")
    other = write_hashed(tmp_path / "y", ["1.png", "2.png"])
    (other / "empty.png").write_bytes(b"")
    check_apart(chosen.training(), open_data(str(other), "all"))
    assert not capsys.readouterr().err
    assert len(chosen.judged(like=chosen.training())) == 17
    assert f"1 of 17 images of {root} that were compared are also in the training images" in capsys.readouterr().err


class _Given(ImageData):
    """Images in memory, as a user of Python may give them: no files."""

    def __init__(self, name: str, seeds: range) -> None:
        super().__init__(name, [f"{name}-{seed}" for seed in seeds])
        self.seeds = seeds

    def read(self, position: int, side: int | None = None) -> Image.Image:
        return Image.fromarray(pixels(self.seeds[position]))


def test_images_that_are_no_files_are_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = _Given("train", range(40))
    check_apart(train, _Given("apart", range(40, 80)))
    assert not capsys.readouterr().err
    check_apart(train, _Given("some", range(30, 70)))
    assert (
        capsys.readouterr().err
        == "10 of 40 images of some that were compared are also in the training images of train "
        "(such as some-30 and train-30)\n"
    )
    with pytest.raises(ValueError, match="40 of 40 images of same that were compared"):
        check_apart(train, _Given("same", range(40)))
    scenes, both = open_data("scenes", "train", size=16), open_data(["scenes", "scenes"], "train", size=16)
    check_apart(scenes, open_data("scenes", "val", size=16))
    for data in (scenes, both):  # of one set by their names, without drawing them
        with pytest.raises(ValueError, match="128 of 128 images of scenes that were compared"):
            check_apart(data, scenes)
    photos = open_data(str(write_hashed(tmp_path / "photos", [f"{i}.png" for i in range(4)])), "all")
    check_apart(photos, train)
    check_apart(train, photos)
    assert not capsys.readouterr().err


def _copied(source: Path, target: Path, change: str) -> None:
    """A photograph as somebody else has it."""
    picture = Image.open(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    if change == "smaller":
        picture = picture.resize((48, 40))
    suffix, options = {"jpeg": (".jpg", {"quality": 60}), "webp": (".webp", {"quality": 50})}.get(change, (".png", {}))
    picture.save(target.with_suffix(suffix), **options)


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("change", ["jpeg", "webp", "smaller"])
def test_judging_on_other_copies_of_the_training_images_is_refused(tmp_path: Path, change: str, renamed: bool) -> None:
    photos = tmp_path / "photos"
    for i in range(40):
        (photos / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        picture(96, 80, seed=i).save(photos / "ab"[i % 2] / f"{i}.png")
    for i, path in enumerate(sorted(photos.rglob("*.png"))):
        name = f"other{i}.png" if renamed else path.name
        _copied(path, tmp_path / "copies" / path.parent.name / name, change)
    chosen = ChosenData(str(photos), str(tmp_path / "copies"))
    with pytest.raises(ValueError, match=r"\d+ of 40 images of .*copies that were compared are also in the training"):
        chosen.judged(like=chosen.training())
    for i in range(40, 80):
        (tmp_path / "others").mkdir(exist_ok=True)
        picture(96, 80, seed=i).save(tmp_path / "others" / f"{i}.png")
    assert len(ChosenData(str(photos), str(tmp_path / "others")).judged(like=chosen.training())) == 40


def test_frames_that_are_trained_on_are_noticed_among_other_files(tmp_path: Path) -> None:
    """Images of dense data are files too, and are compared with files byte for byte."""
    for i in range(6):
        save_array(tmp_path / "train" / "rgb" / f"{i:04d}.png", colour(i))
        save_array(tmp_path / "train" / "depth" / f"{i:04d}.png", np.full((6, 8), i, np.uint8))
    with pytest.raises(ValueError, match=r"6 of 6 images .* are also in the training images"):
        check_apart(open_data(str(tmp_path / "train" / "rgb"), "all"), open_data(f"nyuv2:{tmp_path}", "all"))
    for i in range(6):
        save_array(tmp_path / "other" / f"{i}.png", colour(100 + i))
    check_apart(open_data(str(tmp_path / "other"), "all"), open_data(f"nyuv2:{tmp_path}", "all"))


def test_a_dense_probe_is_not_judged_on_what_it_was_trained_on(tmp_path: Path) -> None:
    for place in ("one", "copy"):
        for part in ("train", "test"):
            for i in range(6):
                frame = tmp_path / place / part
                number = i if place == "one" else 5 - i  # as another person may have named the same frames
                save_array(
                    frame / "rgb" / f"{number:04d}.png", colour(i if part == "train" or place == "copy" else 9 + i)
                )
                save_array(frame / "depth" / f"{number:04d}.png", np.full((6, 8), i, np.uint8))
    with pytest.raises(ValueError, match=r"6 of 6 images of nyuv2:.*copy that were compared are also in the training"):
        probe(
            "scenes",
            task="depth",
            data=f"nyuv2:{tmp_path}/one",
            val=f"nyuv2:{tmp_path}/copy",
            device="cpu",
            out=str(tmp_path / "out"),
        )


def test_pictures_of_one_outline_and_other_details_are_not_copies(tmp_path: Path, capsys) -> None:
    """As the X-rays of two people."""
    outline = np.asarray(picture(8, 8, seed=1).resize((64, 64), Image.Resampling.BICUBIC), dtype=np.int16)
    for place, first in (("one", 0), ("other", 100)):
        for i in range(12):
            noise = np.random.default_rng(first + i).integers(-40, 41, (64, 64, 3))
            save_array(tmp_path / place / f"{i}.png", np.clip(outline + noise, 0, 255).astype(np.uint8))
    check_apart(open_data(str(tmp_path / "one"), "all"), open_data(str(tmp_path / "other"), "all"))
    assert not capsys.readouterr().err
    with pytest.raises(ValueError, match="12 of 12 images"):
        check_apart(open_data(str(tmp_path / "one"), "all"), open_data(str(tmp_path / "one"), "all"))
