"""Names that no reader knows."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_images import write_tree

from raptor.data import open_data, open_dense


def test_a_set_that_is_given_twice_is_judged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By any spelling; to train on, it is drawn twice as often."""
    write_tree(tmp_path / "a", [f"{part}/x/{i}.png" for part in ("train", "val") for i in range(3)])
    write_tree(tmp_path / "b", [f"{part}/x/{i}.png" for part in ("train", "val") for i in range(2)])
    monkeypatch.chdir(tmp_path)
    names = ["a", "b", "./a/"]
    assert len(open_data(names, "train")) == 8
    judged = open_data(names, "val")
    assert (len(judged), judged.name) == (5, open_data(["a", "b"], "val").name)
    assert len(open_data(["a", "a"], "all")) == 6


def test_unknown_data_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    cases = {
        "cifar-10": "did you mean cifar10",
        "scene": "did you mean scenes",
        "hf:user/set": r"hf/NAME\[:SPLIT\]",
        str(tmp_path / "photo"): "did you mean .*photos",
        "": "give a folder",
        str(tmp_path / "photos"): "no images in folder",
        str(tmp_path / "no.zip"): "no file",
        f"wds/{tmp_path}/x-{{0..1}}.tar": "no file",
    }
    for spec, message in cases.items():
        with pytest.raises(ValueError, match=message) as caught:
            open_data(spec)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="unknown split"):
        open_data("scenes", "dev")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "task", "message"),
    [
        ("ade20", "segment", "give scenes, ade20k:PATH"),
        ("scenes", "sort", "unknown dense task"),
        ("nyuv2:/nowhere/labelled.mat", "depth", "no file"),
        ("ade20k:/nowhere", "segment", "no file"),
        ("something", "depth", "give scenes"),
    ],
)
def test_bad_specs_are_named(spec: str, task: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_dense(spec, "train", task)
