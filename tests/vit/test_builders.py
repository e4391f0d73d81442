"""Models by name: transformers folders, torch.hub entries, image sizes and statistics."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from families import (
    AT_16,
    HF_MODELS,
)
from safetensors.torch import load_file, save_file
from tiny_models import noise_images, shake, tiny_timm
from torch import Tensor, nn

from raptor.vit import stated
from raptor.vit.groups import TokenGroups
from raptor.vit.open import open_vit
from raptor.vit.saved import save_vit


@pytest.mark.parametrize("name", HF_MODELS)
@torch.no_grad()
def test_transformers_folder(name: str, tmp_path: Path) -> None:
    build, groups, mean, num_classes = HF_MODELS[name]
    model = shake(build()).eval()
    model.save_pretrained(tmp_path / "model")
    from_folder = open_vit(f"hf/{tmp_path}/model")
    as_module = open_vit(model)
    assert (from_folder.groups.cls, from_folder.groups.registers, from_folder.groups.patches) == groups
    assert from_folder.preprocess.mean == pytest.approx(mean)
    assert from_folder.num_classes == num_classes
    assert from_folder.preprocess == as_module.preprocess
    images = noise_images(from_folder)
    states, output = from_folder.record(images)
    assert torch.equal(output, as_module(images))
    assert torch.equal(from_folder.finish(states[-1]), output)


@torch.no_grad()
def test_statistics_of_a_hub_model_are_its_processors_not_its_familys(tmp_path: Path, monkeypatch) -> None:
    """DINO's ViTs are of the family `vit`, but were trained with ImageNet's mean and deviation."""
    asked = []

    def cached(repo: str, name: str, local_files_only: bool = False, **_options: object) -> str | None:
        asked.append((repo, local_files_only))
        return str(tmp_path / name) if repo == "someone/dino" and (tmp_path / name).exists() else None

    monkeypatch.setattr("transformers.utils.cached_file", cached)
    mean, std = stated.IMAGENET
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": mean, "image_std": std}))
    half = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    for repo, statistics in (("someone/dino", stated.IMAGENET), ("someone/vit", half), ("", half)):
        model = transformers.ViTModel(transformers.ViTConfig(**AT_16))
        model.config._name_or_path = repo
        preprocess = open_vit(model).preprocess
        assert (preprocess.mean, preprocess.std) == statistics
    assert asked == 2 * [("someone/dino", True)] + 2 * [("someone/vit", True)]  # nothing new is fetched


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]},
        {"do_normalize": False},
        {"rescale_factor": 1 / 127.5, "image_mean": [1.0, 1.0, 1.0], "image_std": [1.0, 1.0, 1.0]},
        {"do_rescale": False, "image_mean": [127.5, 120.0, 100.0], "image_std": [50.0, 60.0, 70.0]},
        {"image_mean": 0.4, "image_std": 0.2},
    ],
)
@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
def test_images_are_prepared_as_by_the_processor_of_a_folder(
    tmp_path: Path, settings: dict[str, Any], file: str
) -> None:
    """transformers 5 writes one entry of `processor_config.json`, and reads it before the older file."""
    transformers.ViTModel(transformers.ViTConfig(**AT_16)).save_pretrained(tmp_path)
    entries = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}, **settings}
    if file == "processor_config.json":
        older = {**entries, "image_mean": [0.9, 0.9, 0.9]}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(older))
        entries = {"image_processor": entries}
    (tmp_path / file).write_text(json.dumps(entries))
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    expected = transformers.ViTImageProcessor.from_pretrained(tmp_path)(pixels, return_tensors="pt")["pixel_values"][0]
    preprocess = open_vit(f"hf/{tmp_path}").preprocess
    ours = preprocess.normalise(torch.from_numpy(pixels).permute(2, 0, 1)[None])[0]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("weights", r"the weights of hf/.* could not be fetched"),
        ("mean", r"preprocessor_config\.json has image_mean='half', not one number or three"),
        ("config", r"the weights of hf/.* are quantised"),
        ("int8", r"the weights of hf/.* are quantised"),
        ("nan", r"has image_std=\[nan, 1, 1\], not one number or three"),
        ("zero", r"has a rescale_factor or an image_std that is not above 0"),
        ("scale", r"has rescale_factor='x', not one number or three"),
        ("index", r"could not be fetched \('weight_map'\)"),
        ("fewer", r"hold layers\.2\..* for which its config\.json has no block"),
        ("typed", r"could not be fetched \(Validation error for field 'num_hidden_layers'"),
        ("kind", r"could not be fetched \(The repository .* contains custom code"),
        ("pickle", r"could not be fetched \(Weights only load failed"),
    ],
)
def test_a_damaged_transformers_folder_gets_one_line(tmp_path: Path, damage: str, message: str) -> None:
    transformers.ViTModel(transformers.ViTConfig(**AT_16)).save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    if damage == "weights":
        weights.write_bytes(weights.read_bytes()[:1000])
    if damage == "mean":
        (tmp_path / "preprocessor_config.json").write_text('{"image_mean": "half"}')
    settings = {"nan": '{"image_std": [NaN, 1, 1]}', "zero": '{"image_std": 0}', "scale": '{"rescale_factor": "x"}'}
    if damage in settings:
        (tmp_path / "preprocessor_config.json").write_text(settings[damage])
    entries: dict[str, dict[str, Any]] = {
        "config": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        "fewer": {"num_hidden_layers": 2},
        "typed": {"num_hidden_layers": "3"},
        "kind": {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.Own"}},
    }
    config.write_text(json.dumps(json.loads(config.read_text()) | entries.get(damage, {})))
    if damage == "index":
        weights.unlink()
        (tmp_path / "model.safetensors.index.json").write_text("{}")
    if damage == "int8":  # and no quantization_config, which would say so
        tensors = load_file(weights)
        matrix = next(name for name in tensors if "query.weight" in name or "q_proj.weight" in name)
        save_file(tensors | {matrix: tensors[matrix].to(torch.int8)}, weights, metadata={"format": "pt"})
    if damage == "pickle":
        weights.unlink()
        torch.save({"weight": os.getcwd}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=message) as error:
        open_vit(f"hf/{tmp_path}")
    assert "\n" not in str(error.value)


def publish(cache: Path, repository: str, revisions: dict[str, Callable[[Path], None]]) -> None:
    """Write a hub cache in which each revision of a repository holds what its function writes into a folder."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    for number, (name, write) in enumerate(revisions.items()):
        commit = f"{number:040x}"
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / name).write_text(commit)
        (folder / "snapshots" / commit).mkdir(parents=True)
        write(folder / "snapshots" / commit)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hugging Face hub, which cannot be reached."""
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


@torch.no_grad()
def test_a_revision_of_the_hub_is_opened_and_recorded(hub_cache: Path, tmp_path: Path) -> None:
    config = transformers.ViTConfig(**AT_16)
    models = {name: shake(transformers.ViTModel(config), seed) for seed, name in enumerate(("main", "v1"))}

    def writer(name: str, mean: float) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            models[name].save_pretrained(folder)
            (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [mean] * 3}))

        return write

    publish(hub_cache, "me/vit", {"main": writer("main", 0.1), "v1": writer("v1", 0.2)})
    for source, name, mean in (("hf/me/vit", "main", 0.1), ("hf/me/vit@v1", "v1", 0.2)):
        vit = open_vit(source)
        assert torch.equal(vit.model.embeddings.cls_token, models[name].embeddings.cls_token)
        assert vit.preprocess.mean == pytest.approx((mean,) * 3)
        assert vit.origin.base.source == vit.opened.model == vit.name == source
        again = open_vit(save_vit(vit, tmp_path / name))
        assert torch.equal(again.model.embeddings.cls_token, models[name].embeddings.cls_token)


@torch.no_grad()
def test_a_revision_of_timms_weights_is_opened(hub_cache: Path) -> None:
    models = {name: shake(timm.create_model("test_vit"), seed) for seed, name in enumerate(("main", "v1"))}
    repository = timm.get_pretrained_cfg("test_vit").hf_hub_id

    def writer(name: str) -> Callable[[Path], None]:
        return lambda folder: save_file(models[name].state_dict(), folder / "model.safetensors")

    publish(hub_cache, repository, {name: writer(name) for name in models})
    vit = open_vit("timm/test_vit@v1")
    assert torch.equal(vit.model.cls_token, models["v1"].cls_token) and vit.origin.base.source == "timm/test_vit@v1"
    assert torch.equal(open_vit("timm/test_vit").model.cls_token, models["main"].cls_token)
    with pytest.raises(ValueError, match="names a revision of published weights"):
        open_vit("timm/test_vit@v1", pretrained=False)


def test_masked_transformers_folder_sees_every_patch(tmp_path: Path) -> None:
    config = transformers.ViTMAEConfig(**AT_16, mask_ratio=0.75)
    shake(transformers.ViTMAEModel(config)).save_pretrained(tmp_path)
    vit = open_vit(f"hf/{tmp_path}")
    assert vit.groups == TokenGroups(1, 0, 4)
    images = noise_images(vit)
    assert torch.equal(vit(images), vit(images))
    states, output = vit.record(images)
    assert states[0].shape == (3, 5, 48)
    assert torch.equal(vit.finish(states[-1]), output)
    # patches stand in their own order: moving one patch of the picture moves the token of the same place
    moved = images.clone()
    moved[:, :, 16:, :16] += 1
    changed = (vit.record(moved)[0][0] - states[0]).abs().amax((0, 2)) > 1e-6
    assert changed.tolist() == [False, False, False, True, False]


@torch.no_grad()
def test_a_module_that_hides_patches_is_refused() -> None:
    model = transformers.ViTMAEModel(transformers.ViTMAEConfig(**AT_16, mask_ratio=0.75))
    with pytest.raises(ValueError, match=r"ViTMAEModel hides 75% of the patches: set its config\.mask_ratio to 0"):
        open_vit(model)
    model.config.mask_ratio = 0.0
    assert open_vit(model).groups == TokenGroups(1, 0, 4)


def test_statistics_of_a_timm_model_inside_transformers() -> None:
    """transformers opens timm's repositories by a wrapper; their config.json has timm's mean, deviation and size."""
    options = dict(architecture="test_vit", model_args=dict(depth=2, dynamic_img_size=True))
    own = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "input_size": [3, 96, 96]}
    config = transformers.TimmWrapperConfig(**options, pretrained_cfg=own)
    preprocess = open_vit(transformers.TimmWrapperModel(config)).preprocess
    assert (preprocess.mean, preprocess.std, preprocess.size) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 96)
    plain = open_vit(transformers.TimmWrapperModel(transformers.TimmWrapperConfig(**options))).preprocess
    assert plain == open_vit("timm/test_vit", pretrained=False).preprocess and plain.mean == (0.5, 0.5, 0.5)


def test_transformers_position_interpolation(tmp_path: Path) -> None:
    transformers.ViTModel(transformers.ViTConfig(**AT_16)).save_pretrained(tmp_path)
    for source in (f"hf/{tmp_path}", transformers.ViTModel(transformers.ViTConfig(**AT_16))):
        vit = open_vit(source, size=64)
        assert vit.groups.patches == 16
        assert vit(noise_images(vit)).shape[0] == 3


@torch.no_grad()
def test_transformers_weights_that_lack_the_pooler_are_not_made_up(tmp_path: Path) -> None:
    """A pooler with random weights must not silently become the model's output."""
    shake(transformers.ViTModel(transformers.ViTConfig(**AT_16), add_pooling_layer=False)).save_pretrained(tmp_path)
    first, second = open_vit(f"hf/{tmp_path}"), open_vit(f"hf/{tmp_path}")
    assert torch.equal(first(noise_images(first)), second(noise_images(first)))
    again = open_vit(save_vit(first, tmp_path / "saved"))
    assert torch.equal(again(noise_images(first)), first(noise_images(first)))


def test_default_size_is_224_whatever_the_native_one() -> None:
    vit = tiny_timm("vit_small_patch14_reg4_dinov2", depth=2, size=None)
    assert (vit.preprocess.size, vit.preprocess.resize) == (224, 256)
    assert vit.groups == TokenGroups(1, 4, 256)
    assert vit.groups.num_tokens == 261


def test_smaller_native_size_is_kept() -> None:
    vit = tiny_timm(depth=2, size=None, img_size=48)
    assert (vit.preprocess.size, vit.groups.patches) == (48, 9)


class Around(nn.Module):
    """A module of a user's own around a model of a library."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone(images)


@pytest.mark.parametrize("wrap", [Around, nn.DataParallel])
def test_a_module_around_a_model_is_given_images_as_that_model_is(wrap: type[nn.Module]) -> None:
    shape = dict(depth=2, embed_dim=48, num_heads=3, img_size=32)
    for inner in (
        timm.create_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k", **shape),
        timm.create_model("vit_base_patch16_clip_224.openai", **shape),
        HF_MODELS["ViT"][0](),
        HF_MODELS["SiglipVision"][0](),
    ):
        assert stated.model_preprocess(wrap(inner)) == stated.model_preprocess(inner)
        assert open_vit(Around(inner)).preprocess.size == 32


class Beside(nn.Module):
    """A ViT of CLIP's images beside another model, which comes first."""

    def __init__(self, other: nn.Module, vit: nn.Module) -> None:
        super().__init__()
        self.other, self.vit = other, vit

    def forward(self, images: Tensor) -> Tensor:
        return self.vit(images)


@pytest.mark.parametrize("other", ["resnet18", "bert"])
def test_the_model_around_the_blocks_says_how_images_are_normalised(other: str) -> None:
    shape = dict(depth=2, embed_dim=48, num_heads=3, img_size=32, num_classes=0)
    vit = timm.create_model("vit_base_patch16_clip_224.openai", **shape)
    small = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    beside = transformers.BertModel(transformers.BertConfig(**small)) if other == "bert" else timm.create_model(other)
    found = open_vit(Beside(beside, vit), size=32).preprocess
    assert (found.mean, found.std) == (tuple(vit.pretrained_cfg["mean"]), tuple(vit.pretrained_cfg["std"]))
    assert found.mean == pytest.approx((0.481, 0.458, 0.408), abs=1e-3)


def test_a_model_that_does_not_take_224_says_so() -> None:
    with pytest.raises(ValueError, match="give another --size") as error:
        open_vit(timm.create_model("vit_tiny_patch16_224", depth=2, img_size=240, embed_dim=48, num_heads=3))
    assert "\n" not in str(error.value)


@torch.no_grad()
def test_local_hub_entry(tmp_path: Path) -> None:
    (tmp_path / "hubconf.py").write_text(
        "dependencies = ['torch', 'timm']\n"
        "def small(pretrained=True, width=48):\n"
        "    import timm\n"
        "    assert not pretrained\n"
        "    return timm.create_model('vit_tiny_patch16_224', depth=2, embed_dim=width, num_heads=2, img_size=32)\n"
    )
    with pytest.raises(ValueError, match=r"runs the code of .*: add --trust_hub"):
        open_vit(f"hub/{tmp_path}:small", pretrained=False, width=32)
    vit = open_vit(f"hub/{tmp_path}:small", pretrained=False, width=32, trust_hub=True)
    assert (vit.num_layers, vit.dim, vit.groups) == (2, 32, TokenGroups(1, 0, 4))
