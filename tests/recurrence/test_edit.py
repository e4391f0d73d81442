"""Edits of a linear model, where the smallest step is known, and of the built-in surrogate."""

from __future__ import annotations

import pytest
import torch
from tiny_models import noise_images, tiny_timm

from raptor import open_data, open_vit
from raptor.data import iterate
from raptor.data.stream import Batch
from raptor.recurrence.edit import class_means, measure_edit
from raptor.vit.view import ViT


def _scenes(vit: ViT, num: int) -> list[Batch]:
    return list(iterate(open_data("scenes", "val", limit=num), vit.preprocess, 32))


def test_class_means_are_of_the_classes_that_the_model_gives() -> None:
    vit = open_vit("scenes-k3")
    batches = _scenes(vit, 64)
    found = class_means(vit, batches, [6])[6]
    images = torch.cat([batch.images for batch in batches])
    with torch.no_grad():
        states, output = vit.record(images)
    for name in set(output.argmax(-1).tolist()):
        mine = states[6][output.argmax(-1) == name]
        assert torch.allclose(found[name, 0].float(), mine[:, 0].mean(0), atol=1e-4)
        assert torch.allclose(found[name, 2].float(), mine[:, vit.groups.slice("patches")].mean((0, 1)), atol=1e-4)


def test_the_smallest_step_is_the_one_a_linear_head_asks_for() -> None:
    """At the last layer, read by a linear map of cls, the step that flips an image can be computed."""
    vit = tiny_timm(depth=2)
    images = noise_images(vit, 6)
    with torch.no_grad():
        last = vit.record(images)[0][-1][:, 0]
    weight = torch.zeros(2, vit.dim)
    weight[0, 0], weight[1, 1] = 1.0, 1.0
    gaps = (last[:, 1] - last[:, 0]).sort().values
    bias = torch.tensor([float(gaps[2:4].mean()), 0.0])  # three of the six images are of class 0

    def logits(x_btd: torch.Tensor) -> torch.Tensor:
        return x_btd[:, 0] @ weight.T + bias

    mean_cgd = torch.zeros(2, 2, vit.dim, dtype=torch.float64)
    mean_cgd[1, 0, 1] = 2.0  # from class 0 to class 1: add 2 to the second coordinate of cls
    batches = [Batch(images, None, list(range(6)))]
    found = measure_edit(vit, batches, {2: mean_cgd}, to=1, phase=1, phases=[2], logits=logits)
    margins = last[:, 0] - last[:, 1] + bias[0]
    margins = margins[margins > 0]
    assert found.num_images == len(margins) == 3 and found.flipped == 1
    # Sixteen steps and six bisections tell steps apart by 4 / 16 / 64.
    assert found.step == pytest.approx(float((margins / 2).mean()), abs=4 / 16 / 64)
    assert found.at_the_end == 1
    # Two classes only: there are no others that could change.
    assert found.other_classes == 0


def test_an_edit_of_the_built_in_surrogate_beats_random_directions() -> None:
    vit = open_vit("scenes-k3")
    means = class_means(vit, _scenes(vit, 256), [6, 12])
    found = measure_edit(vit, _scenes(vit, 32), means, to=3, phase=2)
    assert found.flipped > 0.9 and found.step is not None and 0 < found.step < 2
    assert found.random is not None and found.random < 0.2
    assert found.stays is not None and 0 <= found.stays <= 1
    assert found.patches is not None and found.patches > 0 and found.other_classes is not None


def test_edits_that_make_no_sense_are_refused() -> None:
    vit = open_vit("scenes-k3")
    means = class_means(vit, [Batch(noise_images(vit, 2), None, [0, 1])], [6, 12])
    batches = _scenes(vit, 4)
    empty = next(c for c in range(vit.num_classes) if not means[6][c].isfinite().all())
    with pytest.raises(ValueError, match=f"no image is taken for class {empty}"):
        measure_edit(vit, batches, means, to=empty, phase=2)
    with pytest.raises(ValueError, match="there is no phase 4"):
        measure_edit(vit, batches, means, to=0, phase=4)
    with pytest.raises(ValueError, match="class means of layer 3 are missing"):
        measure_edit(vit, batches, means, to=0, phase=1)
    with pytest.raises(ValueError, match="no images to take class means from"):
        class_means(vit, [], [6])
