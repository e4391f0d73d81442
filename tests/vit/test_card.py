"""The model card: what is known of a surrogate, and plainly what is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import yaml
from tiny_models import tiny_timm

from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.card import licence_of, model_card
from raptor.vit.open import open_vit
from raptor.vit.origin import Opened


def test_the_card_of_a_run(tmp_path: Path) -> None:
    config = {"data": ["photos", "more"], "images": {"train": {"num_images": 200}}, "recipe": {"budget": "120s"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "certificate.json").write_text(
        json.dumps({"lines": ["Definition 1 holds at eps .3", "all: R2 .8 | ahead"]}),
    )
    vit = open_vit("scenes-k3")
    card = model_card(vit, tmp_path)
    for words in (
        "| phases | 3 \\| 3 \\| 6 |",
        "| teacher | scenes |",
        "| trained on | 200 images of photos, more |",
        "| budget | 120s |",
        "- Definition 1 holds at eps .3\n- all: R2 .8 \\| ahead",
        'open_vit("FOLDER")',
    ):
        assert words in card, words
    head = yaml.safe_load(card.split("---")[1])
    assert head["library_name"] == "raptor-vit" and "raptor" in head["tags"]


def test_what_is_not_known_is_said() -> None:
    vit = make_surrogate(tiny_timm(), (3, 1))
    card = model_card(vit, use="run it")
    assert "None was measured: `raptor evaluate RUN` writes one." in card and "run it" in card
    assert "licence | not known" in card
    own = make_surrogate(open_vit(tiny_timm().model), (3, 1))
    assert "| teacher | a module of its user's own |" in model_card(own)
    assert "phases" not in model_card(tiny_timm())


def test_the_licence_is_that_of_published_weights() -> None:
    vit = tiny_timm()
    vit.opened = Opened(model="timm/vit_small_patch14_reg4_dinov2.lvd142m")
    assert licence_of(make_surrogate(vit, (3, 1))) == "apache-2.0"
    for other in (replace(vit.opened, weights="own.pt"), replace(vit.opened, pretrained=False), Opened(model="scenes")):
        vit.opened = other
        assert licence_of(vit) is None
