"""Weight files: what is in them is what the model gets, or one line that says why not."""

from __future__ import annotations

import argparse
import os
import pickle
from pathlib import Path

import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file
from tiny_models import noise_images, same_tensors, shake, tiny_timm
from torch import Tensor, nn

from raptor.vit.open import open_vit
from raptor.vit.saved import save_vit
from raptor.vit.view import ViT
from raptor.vit.weights import check_weights, classes_in_file, load_weights, read_weights

NAME = "vit_tiny_patch16_224"


def tiny(num_classes: int = 5, seed: int = 0, **kwargs) -> nn.Module:
    options = dict(depth=2, embed_dim=48, num_heads=3, img_size=32, num_classes=num_classes) | kwargs
    return shake(timm.create_model(NAME, **options), seed).eval()


def open_with(path: Path, **kwargs) -> ViT:
    options = dict(depth=2, embed_dim=48, num_heads=3, img_size=32) | kwargs
    return open_vit(f"timm/{NAME}", weights=str(path), **options)


def write(state: dict, path: Path) -> Path:
    if path.suffix == ".safetensors":
        save_file({k: v.contiguous() for k, v in state.items()}, path)
    else:
        torch.save(state, path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".bin"])
def test_weights_arrive_bit_for_bit(tmp_path: Path, suffix: str) -> None:
    model = tiny()
    vit = open_with(write(model.state_dict(), tmp_path / f"w{suffix}"))
    assert vit.num_classes == 5
    assert same_tensors(vit.model.state_dict(), model.state_dict())


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files(tmp_path: Path, suffix: str, dtype: torch.dtype) -> None:
    half = {k: v.to(dtype) for k, v in tiny().state_dict().items()}
    vit = open_with(write(half, tmp_path / f"w{suffix}"))
    loaded = vit.model.state_dict()
    assert all(v.dtype == torch.float32 for v in loaded.values())
    assert same_tensors(loaded, {k: v.float() for k, v in half.items()})


def prefixed(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + k: v for k, v in state.items()}


WRAPPERS = {
    "state_dict": lambda s: {"state_dict": s, "epoch": 3},
    "model": lambda s: {"model": s, "optimizer": {"state": {}}},
    "teacher": lambda s: {"teacher": s},
    "model_ema": lambda s: {"model_ema": s},
    "module.": lambda s: prefixed("module.", s),
    "backbone.": lambda s: prefixed("backbone.", s),
    "module.backbone.": lambda s: prefixed("module.backbone.", s),
    "torch's AveragedModel": lambda s: prefixed("module.", s) | {"n_averaged": torch.tensor(3)},
    "nested": lambda s: {"model": {"state_dict": prefixed("module.", s)}},
    "teacher with a head of its own": lambda s: {
        "teacher": prefixed("backbone.", s) | {"dino_head.mlp.0.weight": torch.ones(3, 3)}
    },
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_files(tmp_path: Path, wrapper: str) -> None:
    model = tiny()
    vit = open_with(write(WRAPPERS[wrapper](model.state_dict()), tmp_path / "w.pth"))
    assert same_tensors(vit.model.state_dict(), model.state_dict())
    assert vit.num_classes == 5


def test_classifier_beside_a_backbone_is_kept(tmp_path: Path) -> None:
    state = tiny().state_dict()
    beside = {k if k.startswith("head.") else f"backbone.{k}": v for k, v in state.items()}
    vit = open_with(write(beside, tmp_path / "w.pth"))
    assert vit.num_classes == 5
    assert same_tensors(vit.model.state_dict(), state)


@pytest.mark.parametrize("num_classes", [0, 1, 7, 1000])
def test_class_count_comes_from_the_head(tmp_path: Path, num_classes: int) -> None:
    model = tiny(num_classes)
    vit = open_with(write(model.state_dict(), tmp_path / "w.safetensors"))
    assert vit.num_classes == num_classes
    assert classes_in_file(model.state_dict()) == num_classes
    assert torch.equal(vit(noise_images(vit)), model(noise_images(vit)))


def test_explicit_class_count_against_the_file_is_an_error(tmp_path: Path) -> None:
    path = write(tiny(5).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"head\.weight.*\(5, 48\).*\(9, 48\)"):
        open_with(path, num_classes=9)
    headless = write(tiny(0).state_dict(), tmp_path / "h.safetensors")
    with pytest.raises(ValueError, match=r"missing: head\.bias, head\.weight"):
        open_with(headless, num_classes=9)


def test_mismatch_lists_missing_and_unexpected_keys(tmp_path: Path) -> None:
    state = tiny().state_dict()
    state["blocks.0.attn.extra"] = torch.ones(1)
    del state["norm.bias"], state["blocks.1.mlp.fc1.weight"]
    with pytest.raises(ValueError) as error:
        open_with(write(state, tmp_path / "w.pth"))
    text = str(error.value)
    assert "\n" not in text
    missing, unexpected = text.split("missing:")[1].split("unexpected:")
    assert "norm.bias" in missing and "blocks.1.mlp.fc1.weight" in missing
    assert "blocks.0.attn.extra" in unexpected


def test_too_many_layers_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unexpected: blocks\.2\."):
        open_with(write(tiny(depth=3).state_dict(), tmp_path / "w.pth"))


def test_a_failed_load_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    model = tiny(seed=1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    broken = tiny(seed=2).state_dict()
    del broken["norm.weight"]
    with pytest.raises(ValueError, match=r"missing: norm\.weight"):
        open_vit(model, weights=str(write(broken, tmp_path / "w.pth")))
    assert same_tensors(before, model.state_dict())


class Trap:
    def __reduce__(self):
        return os.system, ("touch " + os.environ["RAPTOR_TRAP"],)


@pytest.mark.parametrize("protocol", ["torch", "pickle"])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, protocol: str, monkeypatch) -> None:
    sprung = tmp_path / "sprung"
    monkeypatch.setenv("RAPTOR_TRAP", str(sprung))
    content = {"state_dict": tiny().state_dict(), "trap": Trap()}
    path = tmp_path / "w.pth"
    torch.save(content, path) if protocol == "torch" else path.write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match="weights-only") as error:
        open_with(path)
    assert "\n" not in str(error.value)
    assert not sprung.exists()


def test_the_object_beside_the_tensors_is_named(tmp_path: Path) -> None:
    """As in the checkpoints of DeiT's and MAE's code, which keep their arguments."""
    torch.save({"model": tiny().state_dict(), "args": argparse.Namespace(lr=1)}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"it holds argparse\.Namespace.*save only its tensors") as error:
        open_with(tmp_path / "w.pth")
    assert "torch.save(model.state_dict(), FILE)" in str(error.value) and "fetch" not in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        open_with(tmp_path / "nope.safetensors")
    with pytest.raises(ValueError, match="is not a file"):
        open_with(tmp_path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("keep", [0, 5, 0.5, -1])
def test_truncated_file(tmp_path: Path, suffix: str, keep: float) -> None:
    path = write(tiny().state_dict(), tmp_path / f"w{suffix}")
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(ValueError, match=str(path)) as error:
        open_with(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("as_archive", [True, False])
def test_an_incomplete_file_of_torch_is_called_so(tmp_path: Path, as_archive: bool) -> None:
    path = tmp_path / "w.pt"
    torch.save(tiny().state_dict(), path, _use_new_zipfile_serialization=as_archive)
    content = path.read_bytes()
    for share in (0.1, 0.5, 0.99) if as_archive else (0.5, 0.99):
        path.write_bytes(content[: int(share * len(content))])
        with pytest.raises(ValueError, match=r"it is damaged or not complete: fetch it again$"):
            open_with(path)


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, {}, torch.ones(3)])
def test_files_without_weights(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"w\.pth holds"):
        read_weights(tmp_path / "w.pth")


def test_timms_own_filter_is_applied(tmp_path: Path) -> None:
    """DINOv2's published names (`mask_token`, one position more) load as timm's own loader would."""
    model = tiny_timm("vit_small_patch14_dinov2", depth=2).model
    state = dict(model.state_dict())
    state["mask_token"] = torch.zeros(1, 48)
    options = dict(depth=2, embed_dim=48, num_heads=3, size=28, pretrained=False)
    vit = open_vit("timm/vit_small_patch14_dinov2", weights=str(write(state, tmp_path / "w.pth")), **options)
    assert same_tensors(vit.model.state_dict(), model.state_dict())


def test_position_embedding_of_another_size_is_resampled(tmp_path: Path) -> None:
    state = tiny(img_size=64).state_dict()
    vit = open_with(write(state, tmp_path / "w.pth"))
    assert vit.model.pos_embed.shape == (1, 5, 48)
    assert torch.equal(vit.model.pos_embed[:, 0], state["pos_embed"][:, 0])
    assert torch.equal(vit.model.norm.weight, state["norm.weight"])


def test_position_embedding_keeps_its_values_where_no_size_is_asked_for(tmp_path: Path) -> None:
    """The model is built for the file's size, so that images of that size need no interpolation."""
    model = tiny(img_size=64)
    path = write(model.state_dict(), tmp_path / "w.pth")
    vit = open_vit(f"timm/{NAME}", weights=str(path), depth=2, embed_dim=48, num_heads=3)
    assert vit.preprocess.size == 64
    assert same_tensors(vit.model.state_dict(), model.state_dict())
    assert torch.equal(vit(noise_images(vit)), model(noise_images(vit)))
    again = open_vit(save_vit(vit, tmp_path / "saved"))
    assert torch.equal(again(noise_images(vit)), vit(noise_images(vit)))


def test_position_embedding_of_dinov2s_own_file_keeps_its_values(tmp_path: Path) -> None:
    name, options = "vit_small_patch14_reg4_dinov2", dict(depth=2, embed_dim=48, num_heads=3)
    state = dict(timm.create_model(name, img_size=42, **options).state_dict())
    state["register_tokens"] = state.pop("reg_token")
    table = torch.randn(1, 10, 48)
    state |= {"pos_embed": table, "mask_token": torch.zeros(1, 48)}
    vit = open_vit(f"timm/{name}", weights=str(write(state, tmp_path / "w.pth")), **options)
    assert torch.equal(vit.model.pos_embed, table[:, 1:])


def test_patches_of_another_size_are_refused(tmp_path: Path) -> None:
    path = write(tiny(patch_size=8, embed_dim=24).state_dict(), tmp_path / "w.pth")
    with pytest.raises(
        ValueError,
        match=r"w.pth has width 24, patches of 8 x 8 px, .*; the model has width 48, .* of 16 x 16 px",
    ):
        open_with(path)


def in_clips_names(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a timm ViT without a head as CLIP's authors name them."""
    renamed = {"patch_embed.proj": "conv1", "blocks.": "transformer.resblocks.", "attn.qkv.": "attn.in_proj_"}
    renamed |= {"attn.proj": "attn.out_proj", "norm1": "ln_1", "norm2": "ln_2", "mlp.fc1": "mlp.c_fc"}
    renamed |= {"mlp.fc2": "mlp.c_proj", "norm_pre": "ln_pre", "norm.": "ln_post.", "pos_embed": "positional_embedding"}
    state = {}
    for key, value in model.state_dict().items():
        for old, new in renamed.items():
            key = key.replace(old, new)
        value = value[0, 0] if key == "cls_token" else value[0] if key == "positional_embedding" else value
        state[f"visual.{key.replace('cls_token', 'class_embedding')}"] = value
    return state


def test_files_with_clips_names_are_held_to_the_same_rules(tmp_path: Path) -> None:
    name, shape = "vit_base_patch16_clip_224", dict(embed_dim=48, depth=2, num_heads=4, num_classes=0)
    model = timm.create_model(name, img_size=96, **shape)
    path = write(in_clips_names(model), tmp_path / "w.pth")
    vit = open_vit(f"timm/{name}", weights=str(path), **shape)
    assert torch.equal(vit.model.pos_embed, model.pos_embed)  # not interpolated to 224 px and back
    path = write(in_clips_names(timm.create_model(name, patch_size=32, **shape)), tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"patches of 32 x 32 px, .* the model has patches of 16 x 16 px"):
        open_vit(f"timm/{name}", weights=str(path), **shape)


def test_what_is_taken_of_several_is_said(tmp_path: Path, capsys) -> None:
    model, averaged = tiny(), tiny(seed=1)
    path = write({"model": model.state_dict(), "model_ema": averaged.state_dict()}, tmp_path / "w.pth")
    vit = open_with(path)
    assert same_tensors(vit.model.state_dict(), model.state_dict())
    assert "holds model_ema beside model: model is taken" in capsys.readouterr().err


class Wrapped(nn.Module):
    """A user's module whose own names start with what elsewhere is a wrapper's prefix."""

    def __init__(self, attribute: str, headed: bool) -> None:
        super().__init__()
        self.attribute = attribute
        setattr(self, attribute, tiny(0))
        self.answer = nn.Linear(48, 3) if headed else nn.Identity()
        self.image_size = 32

    def forward(self, images: Tensor) -> Tensor:
        return self.answer(getattr(self, self.attribute)(images))


@pytest.mark.parametrize("attribute", ["backbone", "model", "encoder", "module"])
@pytest.mark.parametrize("headed", [True, False])
@torch.no_grad()
def test_a_module_with_such_a_prefix_of_its_own(tmp_path: Path, attribute: str, headed: bool) -> None:
    source, target = shake(Wrapped(attribute, headed), 3), Wrapped(attribute, headed)
    vit = open_vit(target, weights=str(write(source.state_dict(), tmp_path / "w.safetensors")))
    assert same_tensors(target.state_dict(), source.state_dict())
    save_vit(vit, tmp_path / "saved")
    again = open_vit(tmp_path / "saved", teacher=Wrapped(attribute, headed))
    assert torch.equal(again(noise_images(vit)), vit(noise_images(vit)))


@torch.no_grad()
def test_transformers_with_a_local_file(tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96, image_size=32, patch_size=16
    )
    config.num_labels = 6
    model = shake(transformers.ViTForImageClassification(config)).eval()
    model.save_pretrained(tmp_path / "hub")
    other = shake(model, seed=9)
    path = write(other.state_dict(), tmp_path / "w.safetensors")
    vit = open_vit(f"hf/{tmp_path}/hub", weights=str(path))
    assert vit.num_classes == 6
    images = noise_images(vit)
    assert torch.equal(vit(images), other(images).logits)


def test_a_buffer_of_integers_stays_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].num_batches_tracked.fill_(7)
    state = read_weights(write(model.state_dict(), tmp_path / "w.safetensors"))
    assert state["1.num_batches_tracked"].dtype == torch.int64
    load_weights(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), state, "w")


def test_a_bound_may_be_infinite() -> None:
    check_weights({"q_proj.input_min": torch.tensor(-torch.inf), "q_proj.input_max": torch.tensor([torch.inf])}, "m")
    for name, value in (("input_min", torch.nan), ("weight", torch.inf)):
        with pytest.raises(ValueError, match=f"m: 1 of 1 values of {name} are NaN or infinite"):
            check_weights({name: torch.tensor(value)}, "m")


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="m: weight is on the meta device and has no values: load its weights first"):
        check_weights(nn.Linear(2, 2, device="meta").state_dict(), "m")
