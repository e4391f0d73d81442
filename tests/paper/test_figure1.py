"""Figure 1's models exist under the names given, and the experiment runs on models that are available."""

from __future__ import annotations

import timm
from figure1 import MODELS, run


def test_every_name_has_published_weights():
    for name in MODELS:
        assert timm.is_model_pretrained(name.removeprefix("timm/")), name


def test_several_models_side_by_side(tmp_path):
    found = run(
        data="scenes",
        models=["scenes", "scenes-k3"],
        k=[2],
        num_images=16,
        out=str(tmp_path),
        device="cpu",
        num_workers=0,
    )
    assert [entry.model.num_layers for entry in found.models] == [12, 12]
    assert (tmp_path / "figures" / "phases.png").exists()
