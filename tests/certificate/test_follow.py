"""One pass of both models: the classes they choose, and what one class for all images would get."""

from __future__ import annotations

import pytest
import torch
from tiny_certified import image_batches, tiny_vit

from raptor.certificate.follow import Followed, check_pair, follow
from raptor.certificate.heads import resolve_head
from raptor.surrogate.surrogate import make_surrogate


def chosen(columns: str, rows: list[list[int]]) -> Followed:
    found = Followed({}, (), (), columns.split())
    found.chosen.add(torch.tensor(rows))
    return found


def test_shares_and_floors_by_counting() -> None:
    """Five images: the teacher says 0 three times, four labels are 2; both are right where they say so."""
    found = chosen("teacher surrogate label", [[0, 0, 2], [0, 1, 2], [0, 0, 0], [2, 2, 2], [1, 2, 2]])
    shares = {name: estimate.value for name, estimate in found.predictions(50, 0).items()}
    assert shares == {"agreement": 0.6, "teacher_accuracy": 0.4, "surrogate_accuracy": 0.6}
    assert found.floors() == {"agreement": 0.6, "accuracy": 0.8}


def test_a_refitted_head_has_shares_of_its_own() -> None:
    found = chosen("teacher surrogate refitted label", [[0, 1, 0, 0], [1, 1, 1, 0], [2, 0, 1, 2], [2, 2, 2, 1]])
    shares = {name: estimate.value for name, estimate in found.predictions(0, 0).items()}
    assert shares == {
        "agreement": 0.5,
        "refitted_agreement": 0.75,
        "teacher_accuracy": 0.5,
        "surrogate_accuracy": 0.0,
        "refitted_accuracy": 0.25,
    }
    assert found.floors() == {"agreement": 0.5, "accuracy": 0.5}


def test_without_labels_there_is_only_agreement() -> None:
    found = chosen("teacher surrogate", [[0, 0], [1, 0], [1, 1], [2, 2]])
    assert list(found.predictions(0, 0)) == ["agreement"] and found.floors() == {"agreement": 0.5}
    assert found.predictions(0, 0)["agreement"].lower is None
    none = Followed({}, (), ())
    assert none.predictions(50, 0) == {} and none.floors() == {}


def test_the_pass_chooses_as_the_models_do() -> None:
    teacher = tiny_vit(num_classes=3)
    surrogate = make_surrogate(teacher, (2, 3), copy="last")
    head, _ = resolve_head(teacher)
    found = follow(surrogate, teacher, image_batches(1), head, "fp32").chosen.values()
    images = torch.cat([batch.images for batch in image_batches(1)])
    labels = torch.cat([batch.labels for batch in image_batches(1)])  # type: ignore[misc]
    expected = torch.stack([teacher(images).argmax(-1), surrogate(images).argmax(-1), labels], dim=1)
    assert torch.equal(found, expected)


def test_models_of_another_depth_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot be certified against .*: layers 5, not 4"):
        check_pair(tiny_vit(), tiny_vit(depth=4))
