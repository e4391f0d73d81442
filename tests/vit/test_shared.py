"""SharedViT: a folder for the hub; nothing in it is unpickled."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import tiny_teacher

from raptor.surrogate.surrogate import make_surrogate, shared_blocks
from raptor.vit.open import open_vit
from raptor.vit.shared import SharedViT
from raptor.vit.view import ViT


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

    monkeypatch.setattr("raptor.vit.shared.snapshot_download", download)
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
