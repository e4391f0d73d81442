"""raptor explore: the text and the page; the models it opens."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raptor.commands.explore import _own_hosts_only, build_page, describe, example_image, explore
from raptor.report.perturbed_image import PerturbedImage, read_image
from raptor.train import Distilled
from raptor.vit.open import open_vit
from raptor.vit.pair import open_pair
from raptor.vit.view import ViT


@pytest.fixture(scope="module")
def vit() -> ViT:
    return open_vit("scenes")


def perturbed(prediction: tuple[int, float] | None) -> PerturbedImage:
    path = np.zeros((2, 3))
    return PerturbedImage(path, path, np.zeros(1), np.array([0.0, 0.25]), prediction, prediction)


def test_predictions_are_named_where_the_classes_are_known(vit: ViT) -> None:
    text = describe({"teacher": perturbed((1, 0.5)), "surrogate": perturbed(None)}, vit.classes)
    assert f"**teacher** sees {vit.classes[1]} (50%)" in text and "final deviation 2.50e-01 rad" in text
    assert "**surrogate** has no head" in text
    assert "sees 1 (50%)" in describe({"teacher": perturbed((1, 0.5))}, [])


def test_the_page_builds_where_gradio_is_installed(vit: ViT) -> None:
    pytest.importorskip("gradio")
    page = build_page({"teacher": vit}, vit.classes)
    (upload,) = [block for block in page.blocks.values() if type(block).__name__ == "Image"]
    path = upload.value["path"]
    assert upload.preprocess(SimpleNamespace(path="torn.png")) == "torn.png"  # not decoded before `show` sees it
    (show,) = [fn for fn in page.fns.values() if fn.api_name == "show"]
    figure, text = show.fn(path, 3, "all", -1.0)
    assert len(figure.axes) == 3 and text.startswith("**teacher** sees")
    with pytest.raises(sys.modules["gradio"].Error, match="choose an image first"):
        show.fn(None, 3, "all", -1.0)


def test_options_reach_the_model_and_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: dict[str, Any] = {}
    launched: dict[str, Any] = {}

    class Page:
        def launch(self, **options: Any) -> None:
            launched.update(options)

    def open_two(source: str, **options: Any) -> Any:
        opened.update(options)
        return open_pair("scenes-k3")

    module = sys.modules["raptor.commands.explore"]
    monkeypatch.setattr(module, "open_pair", open_two)
    monkeypatch.setattr(module, "build_page", lambda views, _classes: Page() if len(views) == 2 else None)
    explore("tests", port=1234, size=48, teacher="scenes", device="cpu")
    assert launched["server_name"] == "127.0.0.1" and launched["server_port"] == 1234 and not launched["share"]
    assert [opened[k] for k in ("size", "teacher", "pretrained")] == [48, "scenes", True]


def test_a_distillation_is_explored_as_it_is(vit: ViT, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its teacher may live only in memory, so its folder is not opened again."""
    shown: dict[str, ViT] = {}

    class Page:
        def launch(self, **_options: Any) -> None: ...

    def build(views: dict[str, ViT], _classes: list[str]) -> Page:
        shown.update(views)
        return Page()

    surrogate = open_vit("scenes-k3")
    monkeypatch.setattr(sys.modules["raptor.commands.explore"], "build_page", build)
    explore(Distilled(surrogate, vit, Path("nowhere"), None))  # type: ignore[arg-type]
    assert shown == {"teacher": vit, "surrogate": surrogate}


def test_there_is_an_image_to_try() -> None:
    assert read_image(example_image()).size == (224, 224)


def test_a_foreign_host_is_refused() -> None:
    pytest.importorskip("gradio")
    from gradio.routes import App
    from starlette.testclient import TestClient

    with _own_hosts_only():
        app = App.create_app(build_page({"teacher": open_vit("scenes")}, []))
    client = TestClient(app)
    where = "/gradio_api/info"
    assert client.get(where, headers={"host": "elsewhere.example"}).status_code == 400
    assert client.get(where, headers={"host": "127.0.0.1:7860"}).status_code == 200
