"""save_vit and SharedViT: saved models, the hub; nothing is unpickled."""

from __future__ import annotations

import json
import pickle
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
from tiny_run import tiny_teacher
from tiny_surrogates import AT_16, conditioned, every_kind, torchvision_vit

from raptor.phases.cut import Phases
from raptor.surrogate.surrogate import make_surrogate, shared_blocks, surrogate_spec
from raptor.vit.open import open_vit
from raptor.vit.saved import SharedViT, save_vit
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


def named_teacher() -> ViT:
    """A teacher that can be rebuilt from only a folder."""
    kwargs = dict(embed_dim=48, num_heads=3, depth=4, reg_tokens=2)
    return open_vit("timm/vit_small_patch14_reg4_dinov2", pretrained=False, size=28, num_classes=5, **kwargs)


def surrogate_of(teacher: ViT) -> ViT:
    surrogate = make_surrogate(teacher, (3, 1))
    with torch.no_grad():
        for parameter in shared_blocks(surrogate).parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.05)
    return surrogate


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("something was unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)


def same_output(a: ViT, b: ViT) -> bool:
    images = torch.randn(2, 3, a.preprocess.size, a.preprocess.size)
    with torch.no_grad():
        return torch.equal(a(images), b(images))


@pytest.mark.parametrize("make", [named_teacher, lambda: surrogate_of(named_teacher())])
def test_a_saved_model_comes_back_bit_for_bit(tmp_path, no_pickle, make):
    vit = make()
    SharedViT(vit).save_pretrained(tmp_path / "shared")
    shared = SharedViT.from_pretrained(tmp_path / "shared")
    assert shared.vit.phases == vit.phases
    assert shared.vit.groups == vit.groups
    assert shared.vit.preprocess == vit.preprocess
    assert same_output(shared.vit, vit)
    assert torch.equal(shared(torch.ones(1, 3, 28, 28)), vit(torch.ones(1, 3, 28, 28)))
    assert same_output(open_vit(tmp_path / "shared"), vit)


def test_only_safetensors_json_and_the_card_are_written(tmp_path):
    SharedViT(surrogate_of(named_teacher())).save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    names = load_file(tmp_path / "model.safetensors").keys()
    assert sum(name.startswith("shared_blocks.") for name in names) > 0
    assert not any(name.startswith("blocks.") for name in names)


def test_what_was_loaded_can_be_saved_again(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    SharedViT(surrogate_of(named_teacher())).save_pretrained(first)
    SharedViT.from_pretrained(first).save_pretrained(second)
    assert (first / "config.json").read_text() == (second / "config.json").read_text()
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


def test_a_surrogate_of_an_own_module_asks_for_that_module(tmp_path, no_pickle):
    teacher = tiny_teacher()
    vit = surrogate_of(teacher)
    SharedViT(vit).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="open it with teacher=that module"):
        SharedViT.from_pretrained(tmp_path)
    assert same_output(SharedViT.from_pretrained(tmp_path, teacher=teacher).vit, vit)


def test_a_hub_name_goes_through_the_download(tmp_path, monkeypatch, no_pickle):
    vit = surrogate_of(named_teacher())
    SharedViT(vit).save_pretrained(tmp_path / "remote")
    asked = {}

    def download(repo: str, **options: object) -> str:
        asked.update(options, repo=repo)
        return shutil.copytree(tmp_path / "remote", tmp_path / "cache")

    def config_file(**options: object) -> str:
        return str(tmp_path / "remote" / "config.json")

    monkeypatch.setattr("raptor.vit.saved.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", config_file)
    shared = SharedViT.from_pretrained("someone/surrogate", revision="abc")
    assert (asked["repo"], asked["revision"]) == ("someone/surrogate", "abc")
    assert asked["allow_patterns"] == ["config.json", "model.safetensors"]
    assert same_output(shared.vit, vit)


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no raptor model"):
        SharedViT.from_pretrained(tmp_path / "empty")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="holds no raptor model") as error:
        SharedViT.from_pretrained(Path(tmp_path))
    assert "\n" not in str(error.value)


def test_a_pickle_in_place_of_the_weights_is_never_read(tmp_path, no_pickle):
    SharedViT(named_teacher()).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="does not exist"):
        SharedViT.from_pretrained(tmp_path)


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


def test_a_shared_model_shows_what_it_is() -> None:
    vit = open_vit("scenes")
    assert repr(SharedViT(vit)) == f"SharedViT({vit!r})"
