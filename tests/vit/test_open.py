"""open_vit: names, folders and modules, and the options that each takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import timm
import torch
from families import (
    Unheard,
)
from safetensors.torch import save_file
from tiny_models import same_tensors, tiny_timm
from tiny_surrogates import torchvision_vit
from torch import nn

from raptor.surrogate.surrogate import check_trainable, make_surrogate
from raptor.vit.open import open_vit
from raptor.vit.pair import open_pair
from raptor.vit.view import ViT


def test_a_size_that_the_model_cannot_take_is_not_blamed_on_its_file() -> None:
    with pytest.raises(ValueError, match=r"^scenes does not run on 50 px images: give another --size"):
        open_vit("scenes", size=50)


def test_opening_leaves_random_state_and_gradients_alone() -> None:
    model = torchvision_vit()
    model.encoder.layers[0].requires_grad_(False)
    wanted = [p.requires_grad for p in model.parameters()]
    state = torch.random.get_rng_state()
    open_vit(model)
    assert torch.equal(state, torch.random.get_rng_state())
    assert [p.requires_grad for p in model.parameters()] == wanted


def test_a_module_and_an_opened_model_stay_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_timm(depth=2).model
    moved: list[object] = []
    monkeypatch.setattr(type(model), "to", lambda self, device: moved.append(device))
    monkeypatch.setattr(ViT, "device", property(lambda self: "where it is"))
    vit = open_vit(model)
    assert moved == ["where it is"]
    open_vit(vit)
    assert open_pair(vit) == (None, vit)
    assert moved == ["where it is"]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("view", dict(size=32), "size cannot be given for a model that is already opened"),
        ("view", dict(dtype="bf16", name="mine"), "name, dtype cannot be given for a model that is already opened"),
        ("view", dict(blocks="blocks", cls=1), "blocks, cls cannot be given"),
        ("scenes", dict(blocks="blocks"), "blocks cannot be given for scenes"),
        ("scenes", dict(registers=2, norm="norm"), "norm, registers cannot be given"),
        ("scenes", dict(pretrained=False), "pretrained cannot be given"),
        ("scenes", dict(num_classes=3, depth=4), "num_classes, depth cannot be given"),
        ("module", dict(num_classes=3), "num_classes cannot be given for a module of your own"),
    ],
)
def test_options_that_cannot_be_used_are_refused(source: str, options: dict, message: str) -> None:
    sources = {"view": open_vit("scenes"), "module": Unheard(), "scenes": "scenes"}
    with pytest.raises(ValueError, match=message):
        open_vit(sources[source], **options)


def test_a_norm_that_is_not_there_and_weights_of_another_shape_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no module 'lnn'"):
        open_vit(tiny_timm().model, norm="lnn")
    with_registers = timm.create_model("vit_small_patch14_reg4_dinov2", embed_dim=48, depth=2, num_heads=3, img_size=28)
    torch.save(with_registers.state_dict(), tmp_path / "registers.pt")
    with pytest.raises(ValueError) as error:
        open_vit("timm/vit_small_patch14_dinov2", weights=tmp_path / "registers.pt", embed_dim=48, depth=2, num_heads=3)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_weights_of_8_bits_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    vit = tiny_timm()
    state = dict(vit.model.state_dict())
    state["norm.weight"] = state["norm.weight"].to(getattr(torch, kind))
    save_file(state, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=rf"norm\.weight holds {kind} numbers"):
        open_vit(vit.model, weights=str(tmp_path / "weights.safetensors"))


def test_layer_scale_of_an_untrained_model_is_set_and_of_others_refused() -> None:
    options = dict(pretrained=False, size=28, img_size=28, depth=2)
    vit = open_vit("timm/vit_small_patch14_reg4_dinov2", layer_scale=0.5, **options)
    found = [p for name, p in vit.model.named_parameters() if name.endswith((".ls1.gamma", ".ls2.gamma"))]
    assert len(found) == 4 and all(bool((p == 0.5).all()) for p in found)
    with pytest.raises(ValueError, match="has no LayerScale"):
        open_vit("timm/vit_tiny_patch16_224", layer_scale=1.0, pretrained=False, depth=1)
    with pytest.raises(ValueError, match="layer_scale cannot be given"):
        open_vit("scenes", layer_scale=1.0)


def test_random_weights_are_in_the_name() -> None:
    """A result of an untrained model never reads as one of the published weights."""
    name = "timm/vit_tiny_patch16_224"
    assert open_vit(name, pretrained=False).name == f"{name} (untrained)"
    assert open_vit(name, pretrained=False, name="mine").name == "mine"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SETTINGS = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("kind", ["folder", "library", "made"])
def test_what_is_opened_or_made_does_not_depend_on_the_callers_settings(kind: str, settings) -> None:
    def opened() -> ViT:
        if kind == "folder":
            return open_vit("scenes-k2")
        torch.manual_seed(0)
        vit = tiny_timm(shaken=False)
        if kind == "library":
            return vit
        return make_surrogate(vit, [2, 2], adapters=2)

    expected = opened()
    surroundings: AbstractContextManager[None] = settings()
    with surroundings:
        found = opened()
    assert same_tensors(found.model.state_dict(), expected.model.state_dict())
    if kind != "library":
        check_trainable(found)


def test_a_module_that_was_made_for_inference_is_copied() -> None:
    with torch.inference_mode():
        model = Unheard()
    vit = open_vit(model, size=32)
    assert vit.model is not model and not any(p.is_inference() for p in vit.model.parameters())
    assert same_tensors(vit.model.state_dict(), model.state_dict())


def test_a_function_or_a_class_is_no_model() -> None:
    with pytest.raises(ValueError, match=r"^Unheard makes a model but is none: call it, as in open_vit\(Unheard\(\)\)"):
        open_vit(Unheard)  # type: ignore[arg-type]


def test_weights_that_the_first_call_makes_are_asked_for() -> None:
    model = Unheard()
    model.answer = nn.LazyLinear(4)
    with pytest.raises(ValueError, match=r"^Unheard has weights that its first call makes: call it once with images"):
        open_vit(model, size=32)


def test_a_misspelt_option_is_not_one_of_the_models() -> None:
    """It once reached the constructor, and the message was that weights could not be fetched."""
    with pytest.raises(ValueError, match="unknown option 'weigths': did you mean 'weights'"):
        open_vit("timm/vit_tiny_patch16_224", weigths="w.pth")
