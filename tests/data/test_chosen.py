"""The data of a command: by default its run's; --val; joined sets; classes by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT
from PIL import Image
from tiny_images import write_hashed, write_tree

from raptor.cli import main
from raptor.data import ChosenData, ImageData, InMemory, Preprocess, open_data
from raptor.data.apart import describe_images
from raptor.data.classes import for_head, labelled_like
from raptor.files import RunError

WNIDS = ("n01440764", "n01443537", "n02102040", "n03394916")  # classes 0, 1, 217 and 566


def test_imagenets_classes_whatever_folders_there_are(tmp_path: Path) -> None:
    """A shuffled or partial set of class folders has the same labels, and so the same accuracy."""
    root = write_hashed(tmp_path / "all", [f"val/{wnid}/{wnid}_{i}.png" for wnid in WNIDS for i in range(3)])
    whole = for_head(open_data(str(root), "val"), 1000)
    assert sorted(set(whole.labels or [])) == [0, 1, 217, 566] and len(whole.classes or []) == 1000
    by_name = dict(zip(whole.names, whole.labels or []))
    for kept in (WNIDS[2:], WNIDS[::-2], WNIDS[1:2]):
        shutil.rmtree(tmp_path / "some", ignore_errors=True)
        for wnid in kept:
            shutil.copytree(root / "val" / wnid, tmp_path / "some" / "val" / wnid)
        part = for_head(open_data(str(tmp_path / "some"), "val"), 1000)
        assert part.labels == [by_name[name] for name in part.names]
    assert for_head(open_data(str(root), "val"), 4).labels == open_data(str(root), "val").labels


def test_classes_from_a_file(tmp_path: Path) -> None:
    root = write_hashed(tmp_path / "pets", [f"val/{name}/{name}{i}.png" for name in ("cat", "dog") for i in range(3)])
    (tmp_path / "head.txt").write_text("bird\ndog\ncat\n")
    options = {"data": str(root), "classes": str(tmp_path / "head.txt")}
    chosen = ChosenData.of("x", options, num_classes=3)
    (tmp_path / "head.txt").unlink()  # it is read once
    assert chosen.judged().labels == [2, 2, 2, 1, 1, 1]
    (tmp_path / "head.txt").write_text("bird\ncat\n")
    with pytest.raises(ValueError, match="names 2 classes, the head has 4"):
        ChosenData.of("x", options, num_classes=4)
    with pytest.raises(ValueError, match=r"class dog of .* is not in --classes"):
        ChosenData.of("x", options, num_classes=2).judged()


def test_other_data_to_judge_on(tmp_path: Path) -> None:
    a = write_hashed(tmp_path / "a", [f"{c}/{c}{i}.png" for c in ("ant", "bee", "cat") for i in range(40)])
    b = write_hashed(tmp_path / "b", [f"{c}/{c}-{i}.png" for c in ("cat", "bee") for i in range(5)])
    chosen = ChosenData(str(a), str(b))
    train = chosen.training()
    judged = chosen.judged(like=train)
    assert len(judged) == 10 and judged.classes == train.classes == ["ant", "bee", "cat"]
    assert judged.labels == [1] * 5 + [2] * 5 and chosen.name == str(b)
    assert (
        ChosenData(str(a), str(a)).judged().names == ChosenData(str(a)).judged().names == open_data(str(a), "val").names
    )
    write_hashed(b, ["dog/dog-1.png"])
    assert chosen.judged(like=train).labels is None


def test_a_place_is_one_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judging on all of `photos/` what was trained on most of `photos` would be a leak."""
    photos = write_hashed(tmp_path / "photos", [f"{c}/{c}{i}.png" for c in "ab" for i in range(40)])
    (tmp_path / "link").symlink_to("photos")
    monkeypatch.chdir(tmp_path)
    held_out = [name.rsplit("/", 1)[-1] for name in ChosenData("photos").judged().names]
    other = write_hashed(tmp_path / "other", ["a/x.png", "b/y.png"])
    for val in ("photos/", "./photos", "other/../photos", "link", str(photos)):
        chosen = ChosenData("photos", val)
        assert [name.rsplit("/", 1)[-1] for name in chosen.judged(like=chosen.training()).names] == held_out
    joined = ChosenData([str(other), "photos"], "photos/")
    assert [name.rsplit("/", 1)[-1] for name in joined.judged(like=joined.training()).names] == held_out


@pytest.mark.parametrize("kind", ["copy", "renamed", "zip", "joined"])
def test_judging_on_the_training_images_is_refused(tmp_path: Path, kind: str) -> None:
    photos = write_hashed(tmp_path / "photos", [f"{c}/{c}{i}.png" for c in "ab" for i in range(20)])
    other = tmp_path / ("other.zip" if kind == "zip" else "other")
    if kind == "zip":
        shutil.make_archive(str(tmp_path / "other"), "zip", photos)
    for i, path in enumerate(sorted(photos.rglob("*.png")) if kind != "zip" else []):
        place = other / path.parent.name / (path.name if kind == "copy" else f"new{i}.png")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    data: Any = str(photos)
    if kind == "joined":
        data = [data, str(write_hashed(tmp_path / "more", ["a/more.png", "b/more.png"]))]
    chosen = ChosenData(data, str(other))
    with pytest.raises(ValueError, match=r"\d+ of 40 images of .*other.* are also in the training images of") as error:
        chosen.judged(like=chosen.training())
    assert "\n" not in str(error.value) and "--val" in str(error.value)
    assert len(chosen.judged()) == 40  # where nothing is fitted
    assert len(ChosenData(data, str(other), split="all").judged(like=chosen.training())) == 40  # where it is asked for


def test_copies_within_one_folder_are_named_with_what_to_do(tmp_path: Path) -> None:
    root = write_hashed(tmp_path / "mess", [f"{i}.png" for i in range(6)])
    chosen = ChosenData(str(root))
    held_out = chosen.judged().names[0]
    shutil.copy(root / held_out, root / "copy.png")
    with pytest.raises(ValueError, match=r"1 of 1 images of .* are also in the training images of") as error:
        chosen.judged(like=chosen.training())
    pair = f"(such as {held_out} and copy.png)"
    assert str(error.value).endswith(f"{pair}: remove the copies, or judge on others with --val")


@pytest.mark.parametrize("kind", ["zip", "wds", "hub"])
def test_an_archive_is_one_place_however_it_is_written(tmp_path: Path, kind: str) -> None:
    """Two spellings of one set: its held-out part is judged, not all of it."""
    photos = write_hashed(tmp_path / "photos", [f"{c}/{c}{i}.png" for c in "ab" for i in range(40)])
    (tmp_path / "x").mkdir()
    if kind == "zip":
        shutil.make_archive(str(tmp_path / "p"), "zip", photos)
        one, other = f"{tmp_path}/p.zip", f"{tmp_path}/x/../p.zip"
    elif kind == "wds":
        shutil.make_archive(str(tmp_path / "p"), "tar", photos)
        one, other = f"wds/{tmp_path}/p.tar", f"{tmp_path}/x/../p.tar"
    else:
        datasets = pytest.importorskip("datasets")
        rows = [Image.open(path) for path in sorted(photos.rglob("*.png"))]
        table = datasets.Dataset.from_dict({"image": rows}, features=datasets.Features({"image": datasets.Image()}))
        table.save_to_disk(str(tmp_path / "hub"))
        one, other = f"hf/{tmp_path}/hub", f"hf/{tmp_path}/x/../hub"
    chosen = ChosenData(one, other)
    judged = chosen.judged(like=chosen.training())
    assert len(judged) + len(chosen.training()) == 80 and judged.keys == open_data(one, "val").keys


@pytest.mark.parametrize("model", ["scenes-k2", "raptor k=3 of scenes", "timm/vit_tiny_patch16_224 trained on scenes"])
def test_a_model_of_the_drawn_images_is_measured_on_them(model: str) -> None:
    assert ChosenData.of(model, {}).data == "scenes"


def test_any_other_model_needs_to_be_told_its_images() -> None:
    with pytest.raises(ValueError, match="say which images timm/vit_tiny_patch16_224 works on: --data photos/"):
        ChosenData.of("timm/vit_tiny_patch16_224", {})
    assert ChosenData.of("timm/vit_tiny_patch16_224", {"data": "scenes"}).data == "scenes"
    assert ChosenData.of("timm/vit_tiny_patch16_224", {"val": "photos"}).judged_spec == "photos"


def test_heads_are_fitted_on_the_training_part_of_the_judged_set_where_only_that_has_labels(tmp_path: Path) -> None:
    plain = write_hashed(tmp_path / "plain", [f"{i}.png" for i in range(30)])
    own = write_hashed(tmp_path / "own", [f"train/{c}/{c}{i}.png" for c in "ab" for i in range(6)] + ["val/b/b9.png"])
    chosen = ChosenData([str(plain), str(own)], str(own))
    train, judged = chosen.training(), chosen.judged()
    fitted = chosen.labelled(train, judged)
    assert train.labels is None and judged.labels == [1] and fitted.labels == [0] * 6 + [1] * 6
    assert all("train" in name for name in fitted.names)
    whole = write_hashed(tmp_path / "whole", [f"{c}/{c}{i}.png" for c in "ab" for i in range(4)])
    chosen = ChosenData(str(plain), str(whole))  # all of it is judged on: nothing is left to fit a head on
    assert len(chosen.judged()) == 8 and chosen.labelled(train, chosen.judged()) is train
    parts = write_hashed(tmp_path / "parts", [f"train/{c}/{c}{i}.png" for c in "ab" for i in range(4)])  # nor is here
    chosen = ChosenData(str(plain), str(parts))
    assert len(chosen.judged()) == 8 and chosen.labelled(train, chosen.judged()) is train
    labelled = ChosenData(str(own))
    assert labelled.labelled(labelled.training(), labelled.judged()).names == labelled.training().names


def test_the_data_of_a_run_is_the_default(tmp_path: Path) -> None:
    photos = write_hashed(tmp_path / "photos", ["1.png", "2.png"])
    run = tmp_path / "run"
    (run / "surrogate").mkdir(parents=True)
    (run / "config.yaml").write_text(f"data: {photos}\n")
    for model in (run, str(run), run / "surrogate"):
        assert ChosenData.of(model, {"data": None}).name == str(photos)
        assert ChosenData.of(model, {"data": "scenes", "split": "train"}) == ChosenData("scenes", split="train")
    photos.rename(tmp_path / "moved")
    with pytest.raises(RunError, match=r"photos, the data of .*run, is not there: give its new place with --data"):
        ChosenData.of(run, {})
    (run / "config.yaml").write_text("data: photos\n")  # distilled in the folder that holds it
    with pytest.raises(RunError, match=r"photos, the data of .*run, is not there"):
        ChosenData.of(run, {})
    (run / "config.yaml").write_text("data: [scenes, cifar10, 'cifar100:x', hf/x, 'a.zip,b.zip', 'x-*.zip']\n")
    assert len(ChosenData.of(run, {}).data) == 6


def _run(folder: Path, train: ImageData, judged: ImageData, **config: Any) -> str:
    """A run folder with a surrogate of the built-in teacher, as if it had been distilled on these images."""
    shutil.copytree(ROOT / "raptor/assets/scenes-k3", folder / "surrogate")
    shutil.copy(ROOT / "docs/results/phases-scenes.json", folder / "phases.json")
    images = {"images": describe_images(train, judged)}
    (folder / "config.yaml").write_text(json.dumps({"data": "photos", **images, **config}))  # JSON is YAML
    return str(folder)


@pytest.fixture
def two_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders `here` and `there`, each with its own `photos`; the current one is `here`."""
    for place in ("here", "there"):
        write_hashed(tmp_path / place / "photos", [f"{c}/{place}-{c}{i}.png" for c in "ab" for i in range(30)])
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


_LATER = ["evaluate", "dynamics", "phases", "states", "probe", "report"]


@pytest.mark.parametrize("command", _LATER)
def test_a_run_in_another_folder_does_not_read_images_of_the_same_name(
    command: str, two_places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ChosenData("photos")
    run = _run(two_places / "run", chosen.training(), chosen.judged(2))
    monkeypatch.chdir(two_places / "there")
    out = [] if command == "report" else ["--out", str(two_places / "out"), "--batch_size", "4"]
    assert main([command, run, "--device", "cpu", *out]) == 2
    said = f"raptor: photos holds other images than those {run} was made with: give --data, or run this in the folder "
    assert capsys.readouterr().err.endswith(f"{said}where the run was made\n")


@pytest.mark.parametrize("command", ["evaluate", "probe"])
def test_a_surrogate_is_not_judged_on_what_its_run_was_trained_on(
    command: str, two_places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though the heads, or the null models, are fitted on other images."""
    chosen = ChosenData("photos")
    run = _run(two_places / "run", chosen.training(), chosen.judged(2))
    words = ["--data", str(two_places / "there/photos"), "--val", str(two_places / "here/photos")]
    assert main([command, run, *words, "--device", "cpu", "--out", str(two_places / "out")]) == 2
    assert "that were compared are also in the training images of photos" in capsys.readouterr().err


def test_the_images_of_a_run_are_known_however_they_are_read(two_places: Path) -> None:
    """Its limits, its split, joined sets, images in memory, labels: all of them open again; so does an older run."""
    more = write_hashed(two_places / "here/more", [f"train/{i}.png" for i in range(5)] + ["val/x.png"])
    small = Preprocess(size=16, resize=16)
    photos, both = ChosenData("photos"), ChosenData(["photos", "more"], "more", "all")
    train, val = photos.training(20), photos.judged(2)
    runs = [
        _run(two_places / "limited", train, val),
        _run(two_places / "kept", InMemory(train, small), InMemory(val, small)),
        _run(two_places / "plain", train.with_labels(None, None), val.with_labels([0] * len(val), ["c"])),
        _run(two_places / "joined", both.training(), both.judged(), data=["photos", "more"], val="more", split="all"),
        _run(two_places / "older", train, val, images=None),
    ]
    for run in runs:
        for split in ("val", "train", "all"):
            chosen = ChosenData.of(run, {"split": split})
            assert len(chosen.training(3)) == 3 and len(chosen.judged())
    (more / "val/x.png").unlink()
    write_hashed(more, ["val/y.png"])
    assert len(ChosenData.of(runs[3], {}).training(3)) == 3
    with pytest.raises(RunError, match=r"^more holds other images .* give --val, or run"):
        ChosenData.of(runs[3], {}).judged()
    assert len(ChosenData.of(runs[3], {"val": "more"}).judged()) == 1


def test_images_of_a_run_that_changed_on_purpose(two_places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ChosenData("photos")
    run = _run(two_places / "run", chosen.training(), chosen.judged())
    other = ChosenData("scenes")
    capsys.readouterr()
    assert other.trained_on(run) is not None and not capsys.readouterr().err
    write_hashed(two_places / "here/photos", [f"a/new{i}.png" for i in range(9)])
    with pytest.raises(RunError, match="photos holds other images than those"):
        ChosenData.of(run, {}).training()
    with pytest.raises(RunError, match="photos holds other images than those"):
        ChosenData.of(run, {"val": str(two_places / "there/photos")}).training()
    assert len(ChosenData.of(run, {"val": str(two_places / "there/photos")}).judged()) == 60
    given = ChosenData.of(run, {"data": "photos"})
    assert len(given.training()) + len(given.judged()) == 69
    said = f"what {run} was trained on is not compared with: photos"
    capsys.readouterr()
    assert other.trained_on(run) is None
    assert capsys.readouterr().err == f"{said} holds other images than those {run} was made with\n"
    (two_places / "here/photos").rename(two_places / "moved")
    assert other.trained_on(run) is None
    assert capsys.readouterr().err == f"{said}, the data of {run}, is not there\n"


def test_frames_of_a_run_are_its_own(two_places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ChosenData("photos")
    run = _run(two_places / "run", chosen.training(), chosen.judged(), data="scenes")
    assert main(["probe", run, "--task", "segment", "--device", "cpu", "--out", str(two_places / "out")]) == 2
    assert "raptor: scenes holds other images than those" in capsys.readouterr().err


def test_opened_images_are_matched_by_the_names_of_their_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those are that are given by name: the number of a class is its place among its own set's classes."""
    write_tree(tmp_path / "train", [f"{name}/{i}.png" for name in "abc" for i in range(2)])
    write_tree(tmp_path / "val", [f"{name}/{i}.png" for name in "bc" for i in range(2)])
    write_tree(tmp_path / "other", [f"{name}/{i}.png" for name in "cd" for i in range(2)])
    train, val, other = (open_data(str(tmp_path / name), "all") for name in ("train", "val", "other"))
    matched = labelled_like(val, train)
    assert matched.labels == [1, 1, 2, 2] and matched.classes == ["a", "b", "c"]
    assert labelled_like(other, train).labels is None and "are not used" in capsys.readouterr().err


def test_what_is_left_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = str(write_hashed(tmp_path / "photos", [f"{i}.png" for i in range(200)]))
    assert len(ChosenData(photos, split="own").judged()) == 200 and capsys.readouterr().err == ""
    ChosenData(photos, split="own").judged(40)
    assert capsys.readouterr().err.startswith(
        f"40 of the 200 images of {photos} are measured; the others are beyond --num_im"
    )
    held_out = len(ChosenData(photos).judged())
    outside = f"outside the part `val` ({200 - held_out})"
    assert (
        capsys.readouterr().err == f"{held_out} of the 200 images of {photos} are measured; the others are {outside}\n"
    )
    ChosenData(photos).judged(held_out)  # as many as there are: --num_images would not give more
    assert capsys.readouterr().err == ""  # the same line is said once
    ChosenData(photos).judged(held_out - 1)
    assert f"the others are beyond --num_images (1), {outside}\n" in capsys.readouterr().err
    # The part of a set's own is named as it is there, not by the word that asks for it.
    write_tree(tmp_path / "parts", [f"{part}/{i}.png" for part in ("train", "val") for i in range(3)])
    ChosenData(str(tmp_path / "parts"), split="own").judged()
    assert capsys.readouterr().err.endswith("the others are outside the part `val` (3)\n")
