"""Scores on held-out images while a surrogate is trained and at the end."""

from __future__ import annotations

import pytest
import torch
from tiny_run import tiny_run, tiny_teacher, write_recipe

from raptor.data import iterate, open_data
from raptor.train import Validator, distill
from raptor.vit.open import open_vit
from raptor.vit.trajectory import NonFiniteStates


def test_labels_of_the_judged_images_give_accuracy_where_the_training_images_have_none(tmp_path):
    train = open_data("scenes", "train", limit=32, size=24).with_labels(None, None)
    val = open_data("scenes", "val", limit=12, size=24)
    recipe = write_recipe(tmp_path, budget="2steps")
    teacher = tiny_teacher(num_classes=len(val.classes))
    done = distill(teacher, (train, val), phases=[2, 2], recipe=recipe, out=str(tmp_path / "run"), device="cpu")
    (batch,) = iterate(val, teacher.preprocess, len(val))
    with torch.no_grad():
        right = [
            float((vit(batch.images).argmax(-1) == batch.labels).float().mean()) for vit in (teacher, done.surrogate)
        ]
    scores = done.summary.validation
    assert [scores.teacher_accuracy, scores.accuracy] == pytest.approx(right)
    assert scores.probe is None  # a ridge probe would need labels to fit on


def test_a_validation_under_autocast_is_of_the_weights_at_its_step(tmp_path):
    """The last one has the scores that the finished surrogate has, and none measures the weights of an earlier one."""
    val = open_data("scenes", "val", limit=8, size=24)
    done = tiny_run(tmp_path / "run", tiny_teacher(), budget="12steps", lr=0.02, precision="bf16")
    again = Validator(done.teacher, val, val, precision="bf16").validate(done.surrogate)
    assert done.summary.validation.r2 == pytest.approx(again.r2, abs=1e-6)


def test_a_head_of_0_classes_is_no_classifier(tmp_path):
    """The user's word: what the head gives are no class scores, so a ridge head stands in for it."""
    module = tiny_teacher().model
    done = tiny_run(tmp_path / "run", open_vit(module, size=24, head_classes=0), budget="2steps")
    assert done.teacher.num_classes == 0 and "ridge" in str(done.summary.validation.head)
    own = tiny_run(tmp_path / "own", module, size=24, budget="2steps")
    assert own.teacher.num_classes == 6 and "ridge" not in str(own.summary.validation.head)


@pytest.mark.parametrize("side", ["teacher", "surrogate"])
def test_states_of_held_out_images_that_are_not_finite_are_never_predictions(side: str) -> None:
    """Their class would be 0; a teacher of such states is refused, a surrogate has no accuracy."""
    pair = {"teacher": tiny_teacher(), "surrogate": tiny_teacher()}
    pair[side].blocks[1].register_forward_hook(lambda _block, _args, x: x.index_fill(0, torch.tensor(3), torch.nan))
    images = open_data("scenes", "val", limit=8, size=pair["teacher"].preprocess.size)
    validator = Validator(pair["teacher"], images, images)
    if side == "teacher":
        with pytest.raises(NonFiniteStates, match="from layer 2 on, for one held-out image or more"):
            validator.validate(pair["surrogate"])
    else:
        scores = validator.validate(pair["surrogate"])
        assert scores.accuracy is None and scores.agreement is None and scores.r2[0] is not None
