"""One image inside a model: rollout, components, lens and turns against what they are by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import tiny_timm

from raptor.report.inside_image import (
    class_names,
    draw_attention,
    draw_lens,
    draw_pca,
    draw_turn,
    foreground,
    look_inside,
    object_colours,
    rollout,
)
from raptor.vit.view import ViT


@pytest.fixture(scope="module")
def image() -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
    return Image.fromarray(noise)


def test_rollout_follows_every_path_through_the_blocks() -> None:
    """The share of token j in token i is the sum over all paths of the products of their steps."""
    patterns = torch.rand(3, 4, 4, dtype=torch.float64)
    patterns /= patterns.sum(-1, keepdim=True)
    steps = [0.5 * pattern + 0.5 * torch.eye(4) for pattern in patterns]
    found = rollout(list(patterns))
    for i in range(4):
        for j in range(4):
            paths = 0.0
            for a in range(4):
                for b in range(4):
                    paths += float(steps[2][i, a] * steps[1][a, b] * steps[0][b, j])
            assert float(found[2][i, j]) == pytest.approx(paths)
    assert torch.allclose(found[0], steps[0])
    assert torch.allclose(found[2].sum(-1), torch.ones(4, dtype=torch.float64))


def test_numbers_of_an_image(teacher: ViT, image: Image.Image) -> None:
    with torch.no_grad():
        states, output, inside = teacher.record(image, ("attn",))
        early = teacher.model.head(teacher.model.norm(states[1])[:, 0]).softmax(-1)[0]
    found = look_inside(teacher, image)
    assert found.layers == [1, 2, 3, 4] and found.query == "cls"
    assert found.attention.shape == (4, 3, 4) and found.rollout.shape == (4, 4)
    assert torch.allclose(found.attention[1], inside.attn[2][0, :, 0, 3:], atol=1e-6)
    before, after = states[2][0, 3:], states[3][0, 3:]
    turned = torch.rad2deg(torch.cosine_similarity(before, after, dim=-1).acos())
    assert torch.allclose(found.turns[2], turned, atol=1e-2)
    assert torch.allclose(found.patches[4], teacher.model.norm(states[4][0, 3:]), atol=1e-5)
    assert torch.allclose(found.probabilities[-1], output[0].softmax(-1), atol=1e-5)
    assert torch.allclose(found.probabilities[1], early, atol=1e-5)
    layer, name, share = found.top()[1]
    assert (layer, name) == (1, f"class {int(early.argmax())}") and share == pytest.approx(float(early.max()), abs=1e-5)


def test_only_what_is_asked_for_is_measured(teacher: ViT, image: Image.Image) -> None:
    found = look_inside(teacher, image, ["pca"], [3, 1])
    assert found.attention is None and found.probabilities is None and found.top() == []
    assert found.layers == [1, 3]


def test_refusals(teacher: ViT, rotary: ViT, image: Image.Image) -> None:
    for layers in ([0], [5], []):
        with pytest.raises(ValueError, match="--layers must be from 1 to 4"):
            look_inside(teacher, image, ["pca"], layers)
    with pytest.raises(ValueError, match="has no classifier for a logit lens: leave lens out of --what"):
        look_inside(tiny_timm("vit_small_patch14_dinov2"), image, ["lens"])


def test_attention_without_a_cls_token_is_the_mean_over_patches(image: Image.Image) -> None:
    vit = tiny_timm("vit_base_patch16_siglip_224")
    with torch.no_grad():
        _, _, inside = vit.record(image, ("attn",))
    found = look_inside(vit, image, ["attention"])
    assert found.query == "patches"
    assert torch.allclose(found.attention[0], inside.attn[1][0].mean(1), atol=1e-6)


def test_the_object_is_the_side_that_touches_the_border_less() -> None:
    """A square of one direction in the middle of a field of the other, whatever the component's sign."""
    is_object = torch.zeros(6, 6, dtype=torch.bool)
    is_object[2:4, 1:4] = True
    direction = torch.randn(16, dtype=torch.float64)
    noise = 0.01 * torch.randn(36, 16, dtype=torch.float64)
    for sign in (1, -1):
        patches = sign * torch.where(is_object.flatten()[:, None], direction, -direction) + noise
        assert torch.equal(foreground(patches, (6, 6)), is_object.flatten())


def test_colours_of_the_object_are_its_own_components() -> None:
    patches = torch.randn(30, 8, dtype=torch.float64)
    is_object = torch.arange(30) < 20
    (colours,) = object_colours([patches], is_object)
    assert (colours[20:] == 0).all()
    chosen = (patches[:20] - patches[:20].mean(0)).numpy()
    scores = chosen @ np.linalg.svd(chosen, full_matrices=False)[2][:3].T
    for channel in range(3):
        inner = (colours[:20, channel] > 0) & (colours[:20, channel] < 1)  # the ends are clamped
        seen = colours[:20, channel][inner].numpy()
        assert abs(np.corrcoef(scores[inner.numpy(), channel], seen)[0, 1]) == pytest.approx(1)
    (none,) = object_colours([patches], torch.arange(30) < 2)  # too few to fit
    assert (none == 0).all()


def test_classes_have_names_where_there_are_any(teacher: ViT) -> None:
    assert class_names(teacher) == [f"class {i}" for i in range(5)]
    teacher.classes = list("abcde")
    assert class_names(teacher) == list("abcde")
    names = class_names(tiny_timm(depth=2))
    assert len(names) == 1000 and names[0].startswith("tench")


def test_pictures_have_a_cell_for_every_layer_and_head(teacher: ViT, image: Image.Image) -> None:
    found = look_inside(teacher, image, layers=[2, 4])
    shapes = {draw_attention: 2 * 5, draw_pca: 2 * 3, draw_turn: 3 + 1, draw_lens: 3}
    for draw, num_axes in shapes.items():
        figure = draw(found)
        assert len(figure.axes) == num_axes
        figure.clear()
    weights = draw_attention(found).axes[5 + 2].images[0].get_array()  # second row, second head
    assert np.allclose(np.asarray(weights).ravel(), found.attention[3, 1].numpy(), atol=1e-6)
