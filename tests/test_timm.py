"""Surrogates in timm: the checkpoint gives the model back, its blocks tied, whatever its precision."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from tiny_models import noise_images
from tiny_surrogates import conditioned

import raptor.timm
from raptor.export.weights import with_rounded_values
from raptor.surrogate.surrogate import make_surrogate
from raptor.timm import model_arguments, tensors_for_timm, timm_config
from raptor.vit.open import open_vit
from raptor.vit.view import ViT

SHAPE = dict(embed_dim=48, depth=4, num_heads=3)
FAMILIES = {
    "dinov3": ("vit_small_patch16_dinov3", dict(SHAPE, img_size=32)),
    "siglip": ("vit_base_patch16_siglip_224", dict(SHAPE, img_size=32)),
    "dinov2": ("vit_small_patch14_reg4_dinov2", dict(SHAPE, img_size=42)),
}


def surrogate_of(family: str) -> ViT:
    name, shape = FAMILIES[family]
    size = 28 if family == "dinov2" else 32  # positions of another size than the images
    return conditioned(open_vit(f"timm/{name}", pretrained=False, size=size, **shape), (3, 1))


@pytest.mark.parametrize(("family", "weights"), [("dinov3", "int8"), ("siglip", "int4"), ("dinov2", "fp16")])
@torch.no_grad()
def test_round_trip(family: str, weights: str, tmp_path: Path) -> None:
    surrogate = surrogate_of(family)
    path = tmp_path / "model.safetensors"
    save_file(tensors_for_timm(surrogate, weights), path)
    name, arguments = model_arguments(surrogate)
    assert name == f"raptor_{FAMILIES[family][0]}"
    model = timm.create_model(name, checkpoint_path=path, **arguments).eval()
    images = noise_images(surrogate)
    expected = with_rounded_values(surrogate, weights)(images)
    torch.testing.assert_close(model(images), expected)
    # As a folder, which says by itself which model it is of.
    (tmp_path / "config.json").write_text(json.dumps(timm_config(surrogate)))
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    torch.testing.assert_close(again(images), expected)
    assert tuple(again.pretrained_cfg["mean"]) == surrogate.preprocess.mean
    # The blocks are tied, and the model is one of timm.
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in surrogate.model.parameters())
    assert model.forward_features(images).shape[-1] == 48
    model.load_state_dict(tensors_for_timm(surrogate, "fp32"))
    torch.testing.assert_close(model(images), surrogate(images))


def test_other_weights_are_refused(tmp_path: Path) -> None:
    name, shape = FAMILIES["siglip"]
    plain = timm.create_model(name, **shape)
    torch.save(plain.state_dict(), tmp_path / "plain.pth")
    with pytest.raises(ValueError, match="of no surrogate for timm: write them with raptor export"):
        timm.create_model(f"raptor_{name}", checkpoint_path=tmp_path / "plain.pth", **shape)


def test_a_model_does_not_take_the_weights_of_other_phases() -> None:
    name, shape = FAMILIES["siglip"]
    teacher = open_vit(f"timm/{name}", pretrained=False, size=32, **shape)
    first, other = (make_surrogate(teacher, phases, conditioning="none") for phases in ((3, 1), (2, 2)))
    name, arguments = model_arguments(first)
    model = timm.create_model(name, **arguments)
    model.load_state_dict(tensors_for_timm(first, "fp32"))
    model.load_state_dict(tensors_for_timm(first, "fp16"))
    with pytest.raises(ValueError, match="of another surrogate than the model's: create a new model for them"):
        model.load_state_dict(tensors_for_timm(other, "fp32"))


def test_a_damaged_description_is_one_line() -> None:
    name, shape = FAMILIES["siglip"]
    surrogate = surrogate_of("siglip")
    tensors = tensors_for_timm(surrogate, "fp32")
    key = next(name for name, tensor in tensors.items() if tensor.dtype == torch.uint8)
    text = bytes(tensors[key].tolist()).decode()
    model = timm.create_model(f"raptor_{name}", **shape)
    for wrong in (text[:20], "{}", text.replace('"structure": {', '"structure": {"weights": "FILE", ')):
        tensors[key] = torch.tensor(list(wrong.encode()), dtype=torch.uint8)
        with pytest.raises(ValueError, match=r"raptor_surrogate in these weights is damaged .*: export them again"):
            model.load_state_dict(tensors)


def test_a_surrogate_of_another_library_is_refused() -> None:
    vit = surrogate_of("siglip")
    vit.origin = type(vit.origin)(surrogates=vit.origin.surrogates)
    with pytest.raises(ValueError, match="was not made from a model of timm: take --to pt2, onnx or folder"):
        model_arguments(vit)


def test_timm_lists_the_names() -> None:
    assert "raptor_vit_base_patch16_224" in timm.list_models("raptor_*")
    assert raptor.timm.PREFIX == "raptor_"
