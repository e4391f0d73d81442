"""One image, plain and perturbed: path, speed, deviation and prediction; files that are not images are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from raptor.data.scenes.render import draw_scenes
from raptor.report.perturbed_image import figure_perturbed, perturb_image, read_image
from raptor.vit.open import open_vit


@pytest.fixture(scope="module")
def vit():
    return open_vit("scenes")


@pytest.fixture(scope="module")
def image():
    drawn = draw_scenes(torch.tensor([7]), split="val")
    return Image.fromarray(drawn.images[0].permute(1, 2, 0).numpy()), int(drawn.labels[0])


def test_the_plain_path_ends_at_the_models_own_state(vit, image):
    found = perturb_image(vit, image[0], layer=6, group="cls", eps=0.1)
    with torch.no_grad():
        states, output = vit.record(vit.preprocess(image[0])[None])
    last = states[-1][0, 0] / states[-1][0, 0].norm()
    assert np.allclose(found.path[-1], last.numpy(), atol=1e-6)
    assert found.prediction[0] == int(output.argmax()) == image[1]
    assert found.path.shape == (13, 128) and found.speed.shape == (12,)


@pytest.mark.parametrize("layer", [0, 6, 12])
def test_deviation_is_zero_before_the_perturbation_and_its_size_at_it(vit, image, layer):
    found = perturb_image(vit, image[0], layer=layer, group="cls", eps=0.01)
    assert np.all(found.deviation[:layer] == 0)
    # A random direction is almost orthogonal to the state, so the angle is nearly eps.
    assert found.deviation[layer] == pytest.approx(0.01, rel=0.05)


def test_no_perturbation_changes_nothing(vit, image):
    found = perturb_image(vit, image[0], layer=3, group="all", eps=0.0)
    assert np.allclose(found.deviation, 0, atol=1e-6)
    assert found.prediction == pytest.approx(found.perturbed_prediction)


def test_speed_is_the_mean_of_the_tokens_own_angles(vit, image):
    found = perturb_image(vit, image[0], layer=3, group="patches", eps=0.1)
    with torch.no_grad():
        states, _ = vit.record(vit.preprocess(image[0])[None])
    x = np.stack([s[0, vit.groups.slice("patches")].double().numpy() for s in states])
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    expected = np.arccos((x[1:] * x[:-1]).sum(-1)).mean(1)
    np.testing.assert_allclose(found.speed, expected, rtol=1e-4)


def test_the_figure_has_three_panels_and_is_not_kept(vit, image):
    import matplotlib.pyplot as plt

    found = {"teacher": perturb_image(vit, image[0], layer=3, group="cls", eps=0.1)}
    before = plt.get_fignums()
    paths, speed, deviation = figure_perturbed(found, 3, "cls").axes
    assert plt.get_fignums() == before
    assert paths.get_title() == "Path of cls tokens through depth"
    assert speed.get_lines()[0].get_linewidth() == 1.6  # the project's look
    np.testing.assert_array_equal(deviation.get_lines()[0].get_xdata(), range(3, 13))


def test_files_that_are_not_images_are_refused(tmp_path):
    path = tmp_path / "notes.png"
    path.write_text("not an image")
    with pytest.raises(ValueError, match=r"notes\.png is not an image"):
        read_image(path)
    with pytest.raises(ValueError, match="choose an image"):
        read_image(None)
