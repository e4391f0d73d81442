"""In what two subjects differ, in words."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from tiny_certified import tiny_vit

from raptor.data import open_data
from raptor.run import ResultFile, RunError
from raptor.subject import Subject, check_place, differences, other_models
from raptor.surrogate.surrogate import make_surrogate

PLAIN = Subject("vit", "1", 96, "photos", 8, "f")
PAIR = Subject("vit-k2", "2", 96, "photos", 8, "f", "vit", "1")


@pytest.mark.parametrize(
    ("own", "other", "words"),
    [
        (PLAIN, PLAIN, []),
        (PLAIN, PAIR, []),  # a surrogate's result beside one of its teacher
        (PAIR, PLAIN, []),
        (PAIR, Subject("vit-k2", "2", 96, "photos", 8, "f"), []),  # the surrogate by itself
        (Subject("vit-k2", "2", 96, "photos", 8, "f"), PAIR, []),
        (Subject("vit-k2", "3", 96, "photos", 8, "f"), PAIR, ["another model, vit"]),
        (PLAIN, Subject("vit", "9", 96, "photos", 8, "f"), ["other weights of vit"]),
        (PLAIN, Subject("other", "9", 96, "photos", 8, "f"), ["another model, other"]),
        (PLAIN, Subject("renamed", "1", 96, "photos", 8, "f"), []),  # the same weights by another name
        (PLAIN, Subject("vit", None, 96, "photos", 8, "f"), []),  # half precision: the name decides
        (PLAIN, Subject("other", None, 96, "photos", 8, "f"), ["another model, other"]),
        (PAIR, Subject("vit-k3", "3", 96, "photos", 8, "f", "vit", "1"), ["another model, vit-k3"]),
        (PAIR, Subject("vit-k2", "3", 96, "photos", 8, "f", "vit", "1"), ["other weights of vit-k2"]),
        (PAIR, Subject("vit-k2", "2", 96, "photos", 8, "f", "vit", "4"), ["other weights of vit"]),
        (PLAIN, Subject("vit", "1", 96, "drawings", 8, "g"), ["images of drawings"]),
        (PLAIN, Subject("vit", "1", 96, "photos", 8, "g"), ["other images of photos"]),
        (PLAIN, Subject("vit", "1", 96, "photos", 9, "g"), []),  # more of them
        (PLAIN, Subject("vit", "1", 96, "moved/photos", 8, "f"), []),  # the same images at another place
        (PLAIN, Subject("vit", "1", 96), []),  # images in memory
        (PLAIN, Subject("vit", "1", 224, "photos", 8, "f"), ["images of 224 px"]),
        (PLAIN, Subject("x", "9", 224, "y", 8, "g"), ["another model, x", "images of y", "images of 224 px"]),
    ],
)
def test_differences_are_told_in_words(own: Subject, other: Subject, words: list[str]) -> None:
    assert differences(own, other) == words
    assert other_models(own, other) == [word for word in words if not word.startswith(("images", "other images"))]


def test_a_subject_names_model_images_and_teacher() -> None:
    teacher, images = tiny_vit(), open_data("scenes", "val", limit=4)
    surrogate = make_surrogate(teacher, [2, 3])
    found = Subject.of(teacher, images, surrogate)
    assert (found.model, found.weights) == (surrogate.name, surrogate.fingerprint())
    assert (found.teacher, found.teacher_weights) == (teacher.name, teacher.fingerprint())
    assert (found.data, found.num_images, found.images) == ("scenes", 4, images.fingerprint())
    assert found.size == teacher.preprocess.size
    alone = Subject.of(teacher)
    assert alone.teacher is None and alone.data is None and not differences(found, alone)
    assert Subject.from_dict(found.to_dict()) == found


@dataclass
class Found(ResultFile):
    FILE: ClassVar[str] = "found.json"
    subject: Subject | None


def test_a_folder_takes_results_about_one_subject(tmp_path: Path) -> None:
    check_place(tmp_path / "nothing", PAIR, "found.json")
    Found(PAIR).write(tmp_path)
    assert next(iter(json.loads((tmp_path / "found.json").read_text()))) == "subject"
    check_place(tmp_path, replace(PAIR, num_images=4, images="g"), "found.json")  # fewer of the same data
    other_images = replace(PAIR, data="drawings", images="g")
    check_place(tmp_path, other_images, "beside.json")
    with pytest.raises(RunError, match=r"found.json is about images of photos: choose another --out"):
        check_place(tmp_path, other_images, "found.json")
    other_model = replace(PAIR, teacher_weights="9")
    for file in ("found.json", "beside.json"):
        with pytest.raises(RunError, match=r"found.json is about other weights of vit: choose another --out"):
            check_place(tmp_path, other_model, file)


@pytest.mark.parametrize("text", ["", "{", '{"subject": {', '{"subject": null}', '{"subject": {"model": 3}}', "[]"])
def test_other_files_do_not_count(tmp_path: Path, text: str) -> None:
    (tmp_path / "found.json").write_text(text)
    (tmp_path / "folder.json").mkdir()
    check_place(tmp_path, PLAIN, "found.json")
