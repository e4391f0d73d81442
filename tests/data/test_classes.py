"""Labels in the order of a head's classes, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from raptor.data.classes import for_head, head_names, imagenet_ids, number_labels, renumbered
from raptor.data.images import ImageData


def data_of(labels: list[int], classes: list[str]) -> ImageData:
    return ImageData("x", [str(i) for i in range(len(labels))], labels, classes)


def test_labels_follow_the_order_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "classes.txt"
    file.write_text("dog\n\nbird\n cat \n")
    assert head_names(str(file), 3) == ["dog", "bird", "cat"]
    found = for_head(data_of([0, 1, 1], ["cat", "dog"]), 3, head_names(str(file), 3))
    assert found.labels == [2, 0, 0] and found.classes == ["dog", "bird", "cat"]
    with pytest.raises(ValueError, match="class fish of x is not in"):
        for_head(data_of([0], ["fish"]), 3, head_names(str(file), 3))
    with pytest.raises(ValueError, match="names 3 classes, the head has 4"):
        for_head(data_of([0], ["cat"]), 4, head_names(str(file), 4))


def test_a_name_that_stands_twice_is_refused_where_images_have_it(tmp_path: Path) -> None:
    """As in ImageNet's lists of words: `crane` is a bird and a machine."""
    file = tmp_path / "classes.txt"
    file.write_text("crane\ndog\ncrane\n")
    assert for_head(data_of([0], ["dog"]), 3, head_names(str(file), 3)).labels == [1]
    with pytest.raises(ValueError, match="class crane of x stands twice in"):
        for_head(data_of([0, 1], ["crane", "dog"]), 3, head_names(str(file), 3))


def test_classes_without_images_need_no_place() -> None:
    assert renumbered(data_of([1], ["fish", "cat"]), ["dog", "cat"]) is not None
    assert renumbered(data_of([0], ["fish", "cat"]), ["dog", "cat"]) is None
    assert renumbered(data_of([0], ["crane", "dog"]), ["crane", "dog", "crane"]) is None


def test_names_that_the_model_keeps(tmp_path: Path) -> None:
    found = for_head(data_of([0, 1, 1], ["cat", "dog"]), 3, names=["dog", "bird", "cat"])
    assert found.labels == [2, 0, 0] and found.classes == ["dog", "bird", "cat"]
    strange = data_of([0, 1], ["cat", "fish"])  # they are not of the head, but a probe can learn them
    assert for_head(strange, 3, names=["dog", "bird", "cat"]) is strange
    (tmp_path / "classes.txt").write_text("fish\ncat")
    assert for_head(strange, 2, head_names(str(tmp_path / "classes.txt"), 2), names=["dog", "bird"]).labels == [1, 0]


def test_wordnet_ids_get_imagenets_numbers() -> None:
    ids = imagenet_ids(1000)
    assert len(ids) == 1000 and ids == sorted(ids) and ids[0] == "n01440764"
    assert for_head(data_of([0, 1], ["n01443537", "n01440764"]), 1000).labels == [1, 0]
    assert for_head(data_of([0, 1], ["n01443537", "n01440764"]), 7).labels == [0, 1]


@pytest.mark.parametrize(
    ("values", "labels", "classes"),
    [
        ([2, 0, 10], [2, 0, 10], [str(i) for i in range(11)]),
        (["2", " 10 ", 1], [2, 10, 1], [str(i) for i in range(11)]),
        ([2.0, 0], [2, 0], ["0", "1", "2"]),
        (["cat", "ant", None], [1, 0, -1], ["ant", "cat"]),
        ([True, False, True], [1, 0, 1], ["false", "true"]),
        ([None, None], None, None),
        ([1.5, [0, 1]], [-1, -1], []),
    ],
)
def test_what_files_and_programs_give_as_a_class(
    values: list[object], labels: list[int] | None, classes: list[str] | None
) -> None:
    """Numbers stay as they are; names are numbered in sorted order; what is neither has no class."""
    assert number_labels(values, "x") == (labels, classes)
