"""The zoo: every family opens with the right blocks and token groups, and looking at it changes nothing."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import timm
import torch
import torchvision
import transformers
from tiny_models import noise_images, same_tensors, shake, tiny_timm
from torch import Tensor, nn

from raptor.data.preprocess import Preprocess
from raptor.open import list_models, open_pair, open_vit, save_vit
from raptor.phases import Phases
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit import builders
from raptor.vit.structure import NotAViT
from raptor.vit.view import TokenGroups, ViT, pool

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
HALF = (0.5, 0.5, 0.5)
IMAGENET = (0.485, 0.456, 0.406)


@dataclasses.dataclass
class Family:
    build: Callable[[], ViT]
    groups: tuple[int, int, int]
    mean: tuple[float, ...]
    num_classes: int = 0


def timm_family(name: str, prefix: tuple[int, int], mean: tuple[float, ...], num_classes: int = 0, **kwargs) -> Family:
    return Family(lambda: tiny_timm(name, depth=3, **kwargs), (*prefix, 4), mean, num_classes)


SMALL = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=96)
AT_16 = SMALL | dict(image_size=32, patch_size=16)
AT_14 = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=3, image_size=28, patch_size=14)
HF_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int], tuple[float, ...], int]] = {
    "ViT": (lambda: transformers.ViTModel(transformers.ViTConfig(**AT_16)), (1, 0, 4), HALF, 0),
    "ViTForImageClassification": (
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**AT_16, num_labels=7)),
        (1, 0, 4),
        HALF,
        7,
    ),
    "Dinov2": (lambda: transformers.Dinov2Model(transformers.Dinov2Config(**AT_14)), (1, 0, 4), IMAGENET, 0),
    "Dinov2WithRegisters": (
        lambda: transformers.Dinov2WithRegistersModel(transformers.Dinov2WithRegistersConfig(**AT_14)),
        (1, 4, 4),
        IMAGENET,
        0,
    ),
    "DINOv3ViT": (
        lambda: transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**AT_16, num_register_tokens=3)),
        (1, 3, 4),
        IMAGENET,
        0,
    ),
    "CLIPVision": (
        lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**AT_16)),
        (1, 0, 4),
        CLIP_MEAN,
        0,
    ),
    "SiglipVision": (
        lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**AT_16)),
        (0, 0, 4),
        HALF,
        0,
    ),
    "ViTMAE": (
        lambda: transformers.ViTMAEModel(transformers.ViTMAEConfig(**AT_16, mask_ratio=0.0)),
        (1, 0, 4),
        IMAGENET,
        0,
    ),
    "DeiT": (lambda: transformers.DeiTModel(transformers.DeiTConfig(**AT_16)), (1, 1, 4), HALF, 0),
}


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=16, num_layers=3, num_heads=3, hidden_dim=48, mlp_dim=96, num_classes=6
    )


ZOO: dict[str, Family] = {
    "dinov2": timm_family("vit_small_patch14_dinov2", (1, 0), IMAGENET),
    "dinov2-registers": timm_family("vit_small_patch14_reg4_dinov2", (1, 4), IMAGENET),
    "dinov3": timm_family("vit_small_patch16_dinov3", (1, 4), IMAGENET),
    "eva02": timm_family("eva02_tiny_patch14_224", (1, 0), CLIP_MEAN),
    "clip": timm_family("vit_base_patch16_clip_224", (1, 0), CLIP_MEAN),
    "siglip": timm_family("vit_base_patch16_siglip_224", (0, 0), HALF),
    "deit": timm_family("deit_tiny_patch16_224", (1, 0), IMAGENET, 1000),
    "deit-distilled": timm_family("deit_tiny_distilled_patch16_224", (1, 1), IMAGENET, 1000),
    "deit3": timm_family("deit3_small_patch16_224", (1, 0), IMAGENET, 1000),
    "mae": timm_family("vit_base_patch16_224.mae", (1, 0), IMAGENET),
    "beit": timm_family("beit_base_patch16_224", (1, 0), HALF, 1000, img_size=32),
    "augreg": timm_family("vit_tiny_patch16_224", (1, 0), HALF, 1000),
    "swiglu-giant": timm_family("vit_giant_patch14_dinov2", (1, 0), IMAGENET),
    "rope-mixed": timm_family("vit_small_patch16_rope_mixed_224", (1, 0), IMAGENET, 1000),
    "registers-no-cls": timm_family("vit_little_patch16_reg4_gap_256", (0, 4), HALF, 1000),
    "torchvision": Family(lambda: open_vit(shake(torchvision_vit())), (1, 0, 4), IMAGENET, 6),
}
for hf_name, (hf_build, hf_groups, hf_mean, hf_classes) in HF_MODELS.items():
    ZOO[f"hf-{hf_name}"] = Family(lambda build=hf_build: open_vit(shake(build())), hf_groups, hf_mean, hf_classes)


@cache
def opened(family: str) -> ViT:
    return ZOO[family].build()


each_family = pytest.mark.parametrize("family", ZOO)


@each_family
def test_blocks_groups_and_preprocessing(family: str) -> None:
    vit, expected = opened(family), ZOO[family]
    assert vit.num_layers == len(vit.blocks) == 3
    assert (vit.groups.cls, vit.groups.registers, vit.groups.patches) == expected.groups
    assert vit.grid == (2, 2)
    assert vit.patch_size == vit.preprocess.size // 2
    assert vit.dim == 48
    assert vit.num_classes == expected.num_classes
    assert vit.preprocess.mean == pytest.approx(expected.mean)
    assert vit.depth_conditioned is (family == "rope-mixed")
    assert not vit.model.training


@each_family
@torch.no_grad()
def test_recording_changes_nothing(family: str, snapshot) -> None:
    vit = opened(family)
    images = noise_images(vit)
    weights = snapshot(vit.model)
    before = vit(images)
    states, recorded = vit.record(images)
    assert before.shape[0] == recorded.shape[0] == len(images)
    assert torch.equal(before, recorded)
    assert torch.equal(before, vit(images))
    assert same_tensors(weights, vit.model.state_dict())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in vit.model.modules())
    assert [tuple(s.shape) for s in states] == [(3, vit.groups.num_tokens, 48)] * 4
    assert all(not torch.equal(a, b) for a, b in pairwise(states))


@each_family
@torch.no_grad()
def test_last_state_finishes_as_the_model_does(family: str) -> None:
    vit = opened(family)
    states, output = vit.record(noise_images(vit))
    assert torch.equal(vit.finish(states[-1]), output)
    assert not torch.allclose(vit.finish(states[0]), output, atol=1e-3)


@each_family
@torch.no_grad()
def test_embed_and_unroll_equal_record(family: str) -> None:
    vit = opened(family)
    images = noise_images(vit)
    states, _ = vit.record(images)
    a_0, context = vit.embed(images)
    unrolled = vit.unroll(a_0, context)
    assert len(unrolled) == 4
    assert all(torch.equal(a, b) for a, b in zip(states, unrolled))
    assert torch.equal(vit.unroll(states[1], context, start=1)[-1], states[-1])
    middle = vit.unroll(states[1], context, start=1, stop=2)
    assert len(middle) == 2
    assert torch.equal(middle[1], states[2])


@each_family
@torch.no_grad()
def test_each_image_has_its_own_states(family: str) -> None:
    """A batch is its images: nothing leaks across rows, none is lost."""
    vit = opened(family)
    images = noise_images(vit)
    together, _ = vit.record(images)
    alone, _ = vit.record(images[1:2])
    for batch, single in zip(together, alone):
        assert torch.allclose(batch[1:2], single, atol=1e-4)
        assert not torch.allclose(batch[0], batch[1], atol=1e-3)


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

    def cached(repo: str, name: str, local_files_only: bool = False, **_quiet: bool) -> str | None:
        asked.append((repo, local_files_only))
        return str(tmp_path / name) if repo == "someone/dino" else None

    monkeypatch.setattr("transformers.utils.cached_file", cached)
    mean, std = builders.IMAGENET
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": mean, "image_std": std}))
    half = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    for repo, statistics in (("someone/dino", builders.IMAGENET), ("someone/vit", half), ("", half)):
        model = transformers.ViTModel(transformers.ViTConfig(**AT_16))
        model.config._name_or_path = repo
        preprocess = open_vit(model).preprocess
        assert (preprocess.mean, preprocess.std) == statistics
    assert asked == [("someone/dino", True), ("someone/vit", True)]  # what was fetched before, and nothing new


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


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("resnet18", r"not \(batch, tokens, dim\)"),
        ("swin_tiny_patch4_window7_224", r"not \(batch, tokens, dim\)"),
        ("samvit_base_patch16", r"not \(batch, tokens, dim\)"),
        ("cait_xxs24_224", "continues in another list, `blocks_token_only`"),
        ("xcit_nano_12_p16_224", "continues in another list"),
        ("hiera_tiny_224", "changes the state's shape"),
        ("pit_ti_224", "continues in another list"),
        ("levit_128s", "continues in another list"),
    ],
)
def test_refused(name: str, condition: str) -> None:
    kwargs = dict(depth=2, embed_dim=48, num_heads=2, img_size=224) if name.startswith("samvit") else {}
    kwargs |= dict(depth=2) if name.startswith(("cait", "xcit")) else {}
    with pytest.raises(NotAViT, match=condition) as error:
        open_vit(f"timm/{name}", pretrained=False, **kwargs)
    assert "\n" not in str(error.value)
    assert name in str(error.value)


def test_refused_modules() -> None:
    swin = transformers.SwinModel(
        transformers.SwinConfig(image_size=64, embed_dim=12, depths=[2, 2], num_heads=[2, 2], window_size=4)
    )
    for model in (torchvision.models.resnet18(), swin, nn.Conv2d(3, 8, 3)):
        with pytest.raises(NotAViT) as error:
            open_vit(model)
        assert "\n" not in str(error.value)


class Skipping(nn.Module):
    """A U-shaped stream: the output uses a middle state beside the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = timm.create_model(
            "vit_tiny_patch16_224", depth=3, embed_dim=48, num_heads=3, img_size=32, num_classes=0
        )
        shake(self.inner)
        self.image_size = 32

    def forward(self, images: Tensor) -> Tensor:
        x, middle = self.inner.forward_intermediates(images, indices=[1], output_fmt="NLC")
        return x.mean(1) + middle[0].mean(1)


def test_output_of_more_than_the_last_state_is_refused() -> None:
    with pytest.raises(NotAViT, match="depends on more than the last state"):
        open_vit(Skipping())


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.normed = nn.LayerNorm(dim)
        self.mix = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(self.normed(x)).mean(1, keepdim=True))


class Unheard(nn.Module):
    """A model nobody has heard of: patches by unfolding, two extra tokens under odd names, an odd block list."""

    def __init__(self, dim: int = 24, num_blocks: int = 5) -> None:
        super().__init__()
        self.lift = nn.Linear(3 * 8 * 8, dim)
        self.summary = nn.Parameter(torch.randn(1, 1, dim))
        self.scratch = nn.Parameter(torch.randn(1, 1, dim))
        self.trunk = nn.Module()
        self.trunk.stack = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.last = nn.LayerNorm(dim)
        self.answer = nn.Linear(dim, 4)

    def forward(self, images: Tensor) -> Tensor:
        patches = nn.functional.unfold(images, 8, stride=8).transpose(1, 2)
        extra = torch.cat([self.summary, self.scratch], 1).expand(len(images), -1, -1)
        x = torch.cat([extra, self.lift(patches)], 1)
        for block in self.trunk.stack:
            x = block(x)
        return self.answer(self.last(x)[:, 0])


@torch.no_grad()
def test_unheard_of_module_with_everything_given() -> None:
    model, images = Unheard(), Preprocess(size=32, resize=32)
    vit = open_vit(model, blocks="trunk.stack", norm="last", head="answer", cls=1, registers=1, preprocess=images)
    assert vit.groups == TokenGroups(1, 1, 16)
    assert (vit.num_layers, vit.blocks_path, vit.num_classes, vit.dim) == (5, "trunk.stack", 4, 24)
    assert vit.norm is model.last
    x = noise_images(vit)
    states, output = vit.record(x)
    assert torch.equal(vit.finish(states[-1]), output)
    normed = model.last(states[-1])
    assert torch.equal(vit.features(states[-1]), torch.cat([normed[:, 0], normed[:, 2:].mean(1)], -1))


def test_unheard_of_module_found_by_its_structure() -> None:
    vit = open_vit(Unheard(), preprocess=Preprocess(size=32, resize=32))
    assert (vit.blocks_path, vit.num_layers, vit.groups.num_tokens, vit.num_classes) == ("trunk.stack", 5, 18, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(blocks="trunk.nope"), "has no `trunk.nope`"),
        (dict(blocks="last"), "not a list of blocks"),
        (dict(cls=2), "do not fit"),
        (dict(cls=1, registers=99), "do not fit"),
    ],
)
def test_wrong_structure_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_vit(Unheard(), preprocess=Preprocess(size=32, resize=32), **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm/vit_tiny_patch16_225", "did you mean timm/vit_tiny_patch16_224"),
        ("timm/vit_tiny_patch16_224.nope", "augreg_in21k"),
        ("vit_tiny_patch16_224", "did you mean 'timm/vit_tiny_patch16_224'"),
        ("senes", "did you mean 'scenes'"),
        ("nothing/like/it", "write timm/NAME"),
        ("hub/owner-and-repo-only", "hub/REPO:ENTRY"),
        ("hf/no-such-folder/no-such-model", "could not be built"),
    ],
)
def test_unknown_names_get_one_line(name: str, message: str, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=message) as error:
        open_vit(name, pretrained=False)
    assert "\n" not in str(error.value)


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no raptor model"):
        open_vit(tmp_path)


def test_a_model_that_does_not_take_224_says_so() -> None:
    with pytest.raises(ValueError, match="give size=") as error:
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
    vit = open_vit(f"hub/{tmp_path}:small", pretrained=False, width=32)
    assert (vit.num_layers, vit.dim, vit.groups) == (2, 32, TokenGroups(1, 0, 4))


def test_final_norm_and_pooled_features() -> None:
    vit = tiny_timm("vit_small_patch14_reg4_dinov2")
    assert vit.norm is vit.model.norm
    assert opened("siglip").norm is opened("siglip").model.norm
    x = torch.randn(2, 9, 48)
    normed = vit.model.norm(x)
    assert torch.equal(vit.features(x), torch.cat([normed[:, 0], normed[:, 5:].mean(1)], -1))
    assert torch.equal(pool(x, TokenGroups(0, 4, 5)), x[:, 4:].mean(1))
    assert torch.equal(pool(x, TokenGroups(1, 8, 0)), x[:, 0])


def test_token_groups() -> None:
    groups = TokenGroups(cls=1, registers=4, patches=256)
    assert groups.num_tokens == 261
    assert groups.slice("cls") == slice(0, 1)
    assert groups.slice("registers") == slice(1, 5)
    assert groups.slice("patches") == slice(5, 261)
    assert groups.slice("all") == slice(0, 261)
    assert dict(TokenGroups(0, 0, 9).present()) == {"patches": slice(0, 9)}
    assert [name for name, _ in TokenGroups(1, 0, 9).present()] == ["cls", "patches"]
    with pytest.raises(ValueError, match="choose from"):
        groups.slice("heads")


def test_opening_leaves_random_state_and_gradients_alone() -> None:
    model = torchvision_vit()
    model.encoder.layers[0].requires_grad_(False)
    wanted = [p.requires_grad for p in model.parameters()]
    state = torch.random.get_rng_state()
    open_vit(model)
    assert torch.equal(state, torch.random.get_rng_state())
    assert [p.requires_grad for p in model.parameters()] == wanted


@torch.no_grad()
def test_save_and_open_again(tmp_path: Path) -> None:
    vit = tiny_timm("vit_small_patch14_reg4_dinov2", reg_tokens=2, num_classes=5)
    save_vit(vit, tmp_path / "saved")
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["config.json", "model.safetensors"]
    again = open_vit(tmp_path / "saved")
    assert (again.groups, again.preprocess, again.num_classes) == (vit.groups, vit.preprocess, 5)
    assert torch.equal(again(noise_images(vit)), vit(noise_images(vit)))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["base"]["source"].startswith("timm/")


@torch.no_grad()
def test_saved_transformers_model_needs_its_first_folder_no_more(tmp_path: Path) -> None:
    shake(transformers.Dinov2Model(transformers.Dinov2Config(**AT_14))).save_pretrained(tmp_path / "hub")
    vit = open_vit(f"hf/{tmp_path}/hub")
    save_vit(vit, tmp_path / "saved")
    shutil.rmtree(tmp_path / "hub")
    again = open_vit(tmp_path / "saved")
    assert torch.equal(again(noise_images(vit)), vit(noise_images(vit)))


def test_list_models() -> None:
    names = list_models("dinov2")
    assert "timm/vit_base_patch14_reg4_dinov2.lvd142m" in names
    assert all("dinov2" in n for n in names)
    assert list_models("no such model") == []
    assert "scenes" in list_models()
    assert not [n for n in list_models() if n.startswith(("timm/resnet", "timm/swin", "timm/samvit"))]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("view", dict(size=32), "size cannot be given for a model that is already opened"),
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


TINY = dict(patch_size=8, embed_dim=24, depth=3, num_heads=2, img_size=32)


@torch.no_grad()
def test_a_pair_reopens_the_teacher_as_it_was_opened(tmp_path: Path) -> None:
    prepared = Preprocess(size=32, resize=40, interpolation="bilinear", mean=(0.1, 0.2, 0.3))
    name = "timm/vit_tiny_patch16_224"
    kwargs = dict(num_classes=5, blocks="blocks", norm="norm", cls=0, registers=1, preprocess=prepared, **TINY)
    first = open_vit(name, pretrained=False, **kwargs)
    torch.save(first.model.state_dict(), tmp_path / "weights.pth")
    teacher = open_vit(name, weights=str(tmp_path / "weights.pth"), **kwargs)
    save_vit(make_surrogate(teacher, (1, 2)), tmp_path / "run")
    surrogate, again = open_pair(tmp_path / "run")
    assert surrogate is not None and surrogate.phases == Phases((1, 2))
    assert again.groups == teacher.groups == TokenGroups(0, 1, 16)
    assert (again.preprocess, again.num_classes) == (prepared, 5)
    assert torch.equal(again(noise_images(teacher)), teacher(noise_images(teacher)))
    # What is said now wins over what was said then.
    _, other = open_pair(tmp_path / "run", cls=1, registers=0)
    assert other.groups == TokenGroups(1, 0, 16)


def test_structure_options_of_a_plain_model_and_of_a_named_teacher(tmp_path: Path) -> None:
    none, vit = open_pair("timm/vit_tiny_patch16_224", pretrained=False, cls=0, registers=1)
    assert none is None and (vit.groups.cls, vit.groups.registers) == (0, 1)
    save_vit(make_surrogate(open_vit(vit.model), (6, 6)), tmp_path / "own")
    with pytest.raises(ValueError, match="teacher=that module"):
        open_pair(tmp_path / "own")
    _, named = open_pair(tmp_path / "own", teacher=vit.model, cls=0, registers=1)
    assert (named.groups.cls, named.groups.registers) == (0, 1)


def test_a_norm_that_is_not_there_and_weights_of_another_shape_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no module 'lnn'"):
        open_vit(tiny_timm().model, norm="lnn")
    with_registers = timm.create_model("vit_small_patch14_reg4_dinov2", embed_dim=48, depth=2, num_heads=3, img_size=28)
    torch.save(with_registers.state_dict(), tmp_path / "registers.pt")
    with pytest.raises(ValueError) as error:
        open_vit("timm/vit_small_patch14_dinov2", weights=tmp_path / "registers.pt", embed_dim=48, depth=2, num_heads=3)
    assert "\n" not in str(error.value)
