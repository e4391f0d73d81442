"""save_vit: a saved model is the model, or is refused with the name of its file."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import timm
import torch
import transformers
from families import (
    AT_14,
    Unheard,
)
from safetensors.torch import load_file, save_file
from tiny_models import noise_images, same_tensors, shake, tiny_timm
from tiny_surrogates import AT_16, conditioned, every_kind, torchvision_vit

from raptor.phases.cut import Phases
from raptor.surrogate.surrogate import make_surrogate, surrogate_spec
from raptor.vit.open import open_vit
from raptor.vit.saved import save_vit
from raptor.vit.view import ViT


@torch.no_grad()
def test_save_and_open_again(tmp_path: Path) -> None:
    vit = tiny_timm("vit_small_patch14_reg4_dinov2", reg_tokens=2, num_classes=5)
    vit.classes = list("edcba")
    save_vit(vit, tmp_path / "saved")
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["config.json", "model.safetensors"]
    again = open_vit(tmp_path / "saved")
    assert (again.groups, again.preprocess, again.num_classes) == (vit.groups, vit.preprocess, 5)
    assert torch.equal(again(noise_images(vit)), vit(noise_images(vit)))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["base"]["source"].startswith("timm/")
    assert again.classes == make_surrogate(again, (2, 2)).classes == list("edcba")
    (tmp_path / "saved" / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "classes"}))
    assert open_vit(tmp_path / "saved").classes is None  # written by an earlier version


@torch.no_grad()
def test_saved_transformers_model_needs_its_first_folder_no_more(tmp_path: Path) -> None:
    shake(transformers.Dinov2Model(transformers.Dinov2Config(**AT_14))).save_pretrained(tmp_path / "hub")
    vit = open_vit(f"hf/{tmp_path}/hub")
    save_vit(vit, tmp_path / "saved")
    shutil.rmtree(tmp_path / "hub")
    again = open_vit(tmp_path / "saved")
    assert torch.equal(again(noise_images(vit)), vit(noise_images(vit)))


@every_kind
@torch.no_grad()
def test_round_trip(teacher: ViT, block: str, conditioning: str, tmp_path: Path) -> None:
    surrogate = conditioned(teacher, (3, 1), block=block, conditioning=conditioning, copy="last")
    images = noise_images(surrogate)
    save_vit(surrogate, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    again = open_vit(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.record(images)[0], surrogate.record(images)[0]))
    assert torch.equal(again(images), surrogate(images))
    assert (again.phases, again.groups, again.preprocess) == (Phases((3, 1)), surrogate.groups, surrogate.preprocess)
    assert (again.name, again.num_classes) == (surrogate.name, 5)
    assert surrogate_spec(again) == surrogate_spec(surrogate)
    names = [n for n, p in again.model.named_parameters() if p.requires_grad]
    assert names == [n for n, p in surrogate.model.named_parameters() if p.requires_grad]
    save_vit(again, tmp_path / "twice")
    assert (tmp_path / "twice/config.json").read_bytes() == (tmp_path / "config.json").read_bytes()
    assert (tmp_path / "twice/model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        "vit_giantopt_patch16_siglip_gap_256",  # GELU by tanh
        "vit_dlittle_patch16_reg1_gap_256",  # differential attention
        "vit_relpos_base_patch16_plus_240",  # a position bias, which is 0 in a new model
    ],
)
@torch.no_grad()
def test_round_trip_of_blocks_that_are_plain_only_before_their_weights_are_loaded(name: str, tmp_path: Path) -> None:
    surrogate = conditioned(tiny_timm(name, img_size=32), (3, 1))
    again = open_vit(save_vit(surrogate, tmp_path))
    images = noise_images(surrogate)
    assert all(torch.equal(a, b) for a, b in zip(again.record(images)[0], surrogate.record(images)[0]))


@torch.no_grad()
def test_round_trip_of_a_rotary_and_of_a_transformers_surrogate(rotary: ViT, tmp_path: Path) -> None:
    shake(transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**AT_16))).save_pretrained(tmp_path / "hub")
    for i, teacher in enumerate((rotary, open_vit(f"hf/{tmp_path}/hub"))):
        surrogate = conditioned(teacher, (3, 1))
        again = open_vit(save_vit(surrogate, tmp_path / str(i)))
        assert torch.equal(again(noise_images(teacher)), surrogate(noise_images(teacher)))


@torch.no_grad()
def test_round_trip_of_a_users_own_module(tmp_path: Path, snapshot) -> None:
    teacher = open_vit(shake(torchvision_vit()))
    surrogate = conditioned(teacher, (3, 1))
    save_vit(surrogate, tmp_path)
    images = noise_images(teacher)
    with pytest.raises(ValueError, match="teacher=") as error:
        open_vit(tmp_path)
    assert "\n" not in str(error.value)
    for module in (torchvision_vit(), open_vit(torchvision_vit()), teacher):
        model = module.model if isinstance(module, ViT) else module
        before = snapshot(model)
        again = open_vit(tmp_path, teacher=module)
        assert torch.equal(again(images), surrogate(images))
        assert again.phases == Phases((3, 1))
        assert same_tensors(before, model.state_dict())
    wrong = timm.create_model("vit_tiny_patch16_224", depth=4, img_size=32, embed_dim=48, num_heads=3)
    with pytest.raises(ValueError):
        open_vit(tmp_path, teacher=wrong)


def test_broken_folders(teacher: ViT, tmp_path: Path) -> None:
    save_vit(make_surrogate(teacher, [2, 2]), tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    text, content = config.read_text(), weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="as a safetensors file"):
        open_vit(tmp_path)
    weights.write_bytes(content)
    config.write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match=r"config\.json"):
        open_vit(tmp_path)
    config.write_text(json.dumps(json.loads(text) | {"surrogate": dict(phases=[4])}))
    with pytest.raises(ValueError, match=r"unexpected: shared_blocks\.1"):
        open_vit(tmp_path)
    config.write_text(json.dumps(json.loads(text) | {"format": "raptor-vit/99"}))
    with pytest.raises(ValueError, match="raptor-vit/99"):
        open_vit(tmp_path)
    config.write_text(text)
    weights.unlink()
    with pytest.raises(ValueError, match="does not exist"):
        open_vit(tmp_path)


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch) -> None:
    vit, other = tiny_timm(), tiny_timm(depth=2)
    save_vit(vit, tmp_path / "saved")
    (tmp_path / "saved" / "notes.txt").write_text("mine")

    def full(*_args, **_options) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("raptor.vit.saved.save_file", full)
        for folder in ("saved", "new"):
            with pytest.raises(OSError, match="No space"):
                save_vit(other, tmp_path / folder)
    assert [p.name for p in tmp_path.iterdir()] == ["saved"] and open_vit(tmp_path / "saved").num_layers == 4
    save_vit(other, tmp_path / "saved")
    assert open_vit(tmp_path / "saved").num_layers == 2 and (tmp_path / "saved" / "notes.txt").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, value: float) -> None:
    vit = tiny_timm()
    save_vit(vit, tmp_path / "saved")
    with torch.no_grad():
        vit.model.blocks[1].attn.qkv.weight[0, 0] = value
    message = "values of blocks.1.attn.qkv.weight are NaN or infinite"
    with pytest.raises(ValueError, match=message):
        save_vit(vit, tmp_path / "broken")
    assert not (tmp_path / "broken").exists()
    with pytest.raises(ValueError, match=message):
        open_vit(vit.model)
    save_file(vit.model.state_dict(), tmp_path / "saved" / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        open_vit(tmp_path / "saved")
    with pytest.raises(ValueError, match=message):
        open_vit(tiny_timm().model, weights=str(tmp_path / "saved" / "model.safetensors"))


class Alias(Unheard):
    """Its classifier has two names, as of a user who wants it at hand."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4)
        self.classifier = self.answer


@torch.no_grad()
def test_a_module_with_two_names_for_one_weight_is_saved(tmp_path: Path) -> None:
    """Such a model used to train to its end, and could not be saved then."""
    vit = make_surrogate(open_vit(shake(Alias()), size=32), (2, 2))
    save_vit(vit, tmp_path)
    assert {"answer.weight", "classifier.weight"} <= load_file(tmp_path / "model.safetensors").keys()
    again = open_vit(tmp_path, teacher=Alias())
    assert torch.equal(again(noise_images(vit)), vit(noise_images(vit)))
    assert again.model.classifier.weight is again.model.answer.weight


def test_others_may_read_a_saved_model_where_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        folder = save_vit(tiny_timm(), tmp_path / "saved")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
