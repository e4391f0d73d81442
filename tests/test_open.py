"""open_vit, open_pair, save_vit and SharedViT: names, folders, saved models, the hub; nothing is unpickled."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from dataclasses import replace
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
from torch import nn

from raptor.data.preprocess import Preprocess
from raptor.open import OtherTeacher, SharedViT, open_pair, open_vit, save_vit
from raptor.phases import Phases
from raptor.run import RunError
from raptor.surrogate.surrogate import make_surrogate, shared_blocks, surrogate_spec
from raptor.vit.view import TokenGroups, ViT
from raptor.vit.weights import fingerprint, same_weights


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


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("view", dict(size=32), "size cannot be given for a model that is already opened"),
        ("view", dict(blocks="blocks", cls=1), "--blocks, --cls cannot be given"),
        ("scenes", dict(blocks="blocks"), "blocks cannot be given for scenes"),
        ("scenes", dict(registers=2, norm="norm"), "--norm, --registers cannot be given"),
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

    monkeypatch.setattr("raptor.open.snapshot_download", download)
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


def _run_of(teacher: ViT, folder: Path) -> Path:
    save_vit(make_surrogate(teacher, (2, 2)), folder / "surrogate")
    return folder


SHAPE = dict(pretrained=False, embed_dim=48, depth=4, num_heads=3)


def test_a_fingerprint_is_of_every_weight() -> None:
    vit = tiny_timm()
    before = fingerprint(vit.model)
    assert fingerprint(copy.deepcopy(vit.model)) == before and same_weights(vit.model, before)
    weight = vit.model.get_parameter("blocks.1.mlp.fc1.weight")
    with torch.no_grad():
        weight[weight.shape[0] // 2, 7] += 1e-3  # neither among the first nor the last values
    assert fingerprint(vit.model) != before and not same_weights(vit.model, before)
    assert same_weights(vit.model.half(), fingerprint(vit.model.float()))


def test_another_teacher_is_refused(tmp_path: Path) -> None:
    teacher = tiny_timm()
    save_vit(teacher, tmp_path / "mine")
    run = _run_of(open_vit(tmp_path / "mine"), tmp_path / "run")
    assert open_pair(run)[1].name == teacher.name
    for change in (dict(teacher=tiny_timm(shaken=False)), dict(teacher="timm/vit_tiny_patch16_224", **SHAPE)):
        with pytest.raises(OtherTeacher, match=r"was not made from .*--allow_other_teacher"):
            open_pair(run, teacher=open_vit(change.pop("teacher"), **change))  # type: ignore[arg-type]
    _, stranger = open_pair(run, teacher=tiny_timm(shaken=False), allow_other_teacher=True)
    assert stranger.name.endswith("(another teacher)")
    save_vit(tiny_timm(shaken=False), tmp_path / "mine")  # the same place, other weights
    with pytest.raises(OtherTeacher):
        open_pair(run)


def test_a_misspelt_option_is_told_of() -> None:
    with pytest.raises(ValueError, match="unknown option 'wieghts': did you mean 'weights'"):
        open_vit("scenes", wieghts="x")


def test_a_teacher_of_what_is_no_surrogate_is_refused() -> None:
    """It was left aside without a word, and what was named was measured instead of a --module."""
    with pytest.raises(
        ValueError,
        match=r"^scenes is no surrogate and has no teacher: name a run, or leave out --teacher",
    ):
        open_pair("scenes", teacher="scenes-k2")
    with pytest.raises(ValueError, match=r"^this model is no surrogate"):
        open_pair(open_vit("scenes"), teacher=tiny_timm().model)


def test_options_of_a_teacher_that_is_opened_already_are_refused(tmp_path: Path) -> None:
    teacher = open_vit("scenes")
    for options in (dict(weights="other.pth"), dict(registers=0), dict(size=96), dict(dtype="bf16"), dict(name="mine")):
        (name,) = options
        with pytest.raises(ValueError, match=f"^--{name} cannot be given for a teacher that is already opened"):
            open_pair("scenes-k2", teacher=teacher, **options)  # type: ignore[arg-type]
    assert open_pair("scenes-k2", teacher=teacher, size=48)[1] is teacher
    surrogate, larger = open_pair("scenes-k2", teacher=open_vit("scenes", size=96))
    assert surrogate is not None and surrogate.preprocess == larger.preprocess and surrogate.groups == larger.groups


def test_a_surrogate_without_its_teachers_fingerprint_is_checked_by_its_run(
    tmp_path: Path,
) -> None:
    teacher = tiny_timm()
    save_vit(teacher, tmp_path / "mine")
    run = _run_of(open_vit(tmp_path / "mine"), tmp_path / "run")
    path = run / "surrogate" / "config.json"
    config = json.loads(path.read_text())
    del config["teacher"]["fingerprint"]
    path.write_text(json.dumps(config))
    (run / "config.yaml").write_text(f"fingerprint: '{fingerprint(teacher.model)}'\n")
    open_pair(run)
    (run / "config.yaml").write_text("fingerprint: '0123456789abcdef'\n")
    with pytest.raises(OtherTeacher):
        open_pair(run)


def test_a_surrogate_is_not_its_own_teacher(tmp_path: Path) -> None:
    save_vit(tiny_timm(), tmp_path / "mine")
    _run_of(open_vit(tmp_path / "mine"), tmp_path / "mine")
    with pytest.raises(RunError, match="names itself as its teacher"):
        open_pair(tmp_path / "mine")


def test_a_run_folder_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "runs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    torch.save(tiny_timm().model.state_dict(), "weights.pth")
    shape = {key: value for key, value in SHAPE.items() if key != "pretrained"}
    teacher = open_vit("timm/vit_tiny_patch16_224", weights="weights.pth", size=32, **shape)
    _run_of(teacher, Path("runs/one"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert open_pair("b/runs/one")[1].name == teacher.name
    (tmp_path / "b" / "runs" / "one").rename(tmp_path / "one")
    with pytest.raises(RunError, match=r"weights.pth, which one was made from, is not there"):
        open_pair("one")
    assert open_pair("one", weights="b/weights.pth")[1].name == teacher.name


def test_a_surrogate_of_an_own_module_takes_a_teacher_by_name(tmp_path: Path) -> None:
    teacher = tiny_timm()
    save_vit(teacher, tmp_path / "mine")
    _run_of(open_vit(teacher.model, size=32), tmp_path / "run")
    with pytest.raises(ValueError, match=r"module of your own.*--teacher"):
        open_pair(tmp_path / "run")
    surrogate, found = open_pair(tmp_path / "run", teacher=str(tmp_path / "mine"))
    assert surrogate is not None and found.preprocess.size == 32


def test_an_own_module_is_opened_with_the_structure_of_its_surrogate(tmp_path: Path) -> None:
    """What `distill` was told about its tokens need not be told again."""
    options = dict(size=32, cls=1, registers=1, blocks="trunk.stack")
    module = Unheard(num_blocks=4)
    _run_of(open_vit(module, **options), tmp_path / "run")
    guessed = open_vit(module, size=32).groups
    surrogate, found = open_pair(tmp_path / "run", teacher=module)
    assert surrogate is not None
    assert found.groups == surrogate.groups == TokenGroups(cls=1, registers=1, patches=16) != guessed
    _, other = open_pair(tmp_path / "run", teacher=module, cls=0, registers=2)
    assert (other.groups.cls, other.groups.registers) == (0, 2)


def test_an_own_module_is_opened_with_the_preparation_and_classes_of_its_surrogate(tmp_path: Path) -> None:
    """Otherwise the pair would be measured on images normalised in another way, and without the module's head."""
    prepared = Preprocess(32, 40, interpolation="bilinear", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    module = Unheard(num_blocks=4)
    _run_of(open_vit(module, preprocess=prepared, head_classes=4), tmp_path / "run")
    surrogate, found = open_pair(tmp_path / "run", teacher=module)
    assert surrogate is not None and found.preprocess == surrogate.preprocess == prepared
    assert found.num_classes == surrogate.num_classes == 4
    assert open_pair(tmp_path / "run", teacher=module, head_classes=0)[1].num_classes == 0
    again, found = open_pair(surrogate, teacher=module)  # opened already
    assert again is surrogate and found.preprocess == prepared and found.num_classes == 4
    surrogate, found = open_pair(tmp_path / "run", teacher=module, size=48)
    assert surrogate is not None and found.preprocess == surrogate.preprocess == replace(prepared, size=48, resize=48)


def test_a_surrogate_of_a_surrogate_of_an_own_module(tmp_path: Path) -> None:
    module = Unheard(num_blocks=4)
    _run_of(open_vit(module, size=32), tmp_path / "inner")
    inner, _ = open_pair(tmp_path / "inner", teacher=module)
    assert inner is not None
    _run_of(inner, tmp_path / "outer")
    outer, found = open_pair(tmp_path / "outer", teacher=inner)
    assert outer is not None and found.model is inner.model
    save_vit(outer, tmp_path / "copy" / "surrogate")
    again, _ = open_pair(tmp_path / "copy", teacher=inner)
    images = torch.randn(2, 3, inner.preprocess.size, inner.preprocess.size)
    with torch.no_grad():
        assert again is not None and torch.equal(again(images), outer(images))


def _run_with_weights(folder: Path, weights: str) -> nn.Module:
    """Make a run of a module of one's own that got its weights from a file; the module with these weights."""
    trained = tiny_timm().model
    torch.save(trained.state_dict(), weights)
    _run_of(open_vit(tiny_timm().model, weights=weights, size=32), folder)
    return trained


def test_a_run_of_an_own_module_brings_its_weight_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    trained, plain = _run_with_weights(Path("run"), "weights.pth"), tiny_timm().model
    before = fingerprint(plain)
    surrogate, found = open_pair("run", teacher=plain)
    assert surrogate is not None and fingerprint(found.model) == fingerprint(trained)
    assert fingerprint(plain) == before  # the caller's module is not changed
    assert open_pair(surrogate, teacher=plain)[1].opened["weights"] == "weights.pth"
    assert open_pair("run", teacher=plain, weights="weights.pth")[0] is not None and fingerprint(plain) == before
    monkeypatch.chdir(tmp_path)  # found beside the run, wherever the command is started
    assert fingerprint(open_pair("a/run", teacher=plain)[1].model) == fingerprint(trained)
    _, other = open_pair("a/run", teacher=plain, allow_other_teacher=True)
    assert fingerprint(other.model) == before and other.name.endswith("(another teacher)")


def test_a_weight_file_of_an_own_module_that_is_gone_or_changed_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained, plain = _run_with_weights(Path("run"), "weights.pth"), tiny_timm().model
    Path("weights.pth").rename("moved.pth")
    with pytest.raises(RunError, match=r"^weights.pth, which run was made with, is not there: .* with --weights$"):
        open_pair("run", teacher=plain)
    assert open_pair("run", teacher=plain, weights="moved.pth")[0] is not None
    assert open_pair("run", teacher=trained)[0] is not None  # it holds these weights already
    torch.save(tiny_timm().model.state_dict(), "weights.pth")
    with pytest.raises(OtherTeacher, match="its weights differ"):
        open_pair("run", teacher=tiny_timm().model)


def test_the_weight_file_of_a_named_teacher_does_not_go_into_another_module(tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    torch.save(tiny_timm().model.state_dict(), file)
    _run_of(open_vit("timm/vit_tiny_patch16_224", weights=str(file), size=32, **SHAPE), tmp_path / "run")
    surrogate = open_vit(tmp_path / "run")
    for source in (tmp_path / "run", surrogate):
        with pytest.raises(OtherTeacher, match="its weights differ"):
            open_pair(source, teacher=tiny_timm().model)


def test_an_earlier_run_of_an_own_module_takes_the_weight_file_of_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _run_with_weights(Path("run"), "weights.pth")
    path = Path("run/surrogate/config.json")
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "teacher": {"fingerprint": config["teacher"]["fingerprint"]}}))
    Path("run/config.yaml").write_text("model: VisionTransformer\nweights: weights.pth\n")
    assert open_pair("run", teacher=tiny_timm().model)[0] is not None


@pytest.mark.parametrize("damage", [{"cls": "x"}, {"blocks": 7}, {"another": 1}])
def test_a_damaged_structure_of_an_own_module_is_named(damage: dict, tmp_path: Path) -> None:
    module = Unheard(num_blocks=4)
    path = _run_of(open_vit(module, size=32), tmp_path / "run") / "surrogate" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "structure": {**config["structure"], **damage}}))
    with pytest.raises(ValueError, match=r"config\.json") as error:
        open_pair(tmp_path / "run", teacher=module)
    assert "\n" not in str(error.value)


def hostile_folder(folder: Path, marker: Path, **changes) -> Path:
    """A saved surrogate whose config.json is changed, and a hubconf.py in it that leaves a mark when it is run."""
    vit = tiny_timm()
    vit.opened = {"model": "scenes", "weights": None, "size": None}
    save_vit(make_surrogate(vit, (2, 2)), folder)
    (folder / "hubconf.py").write_text(f"open({str(marker)!r}, 'w').close()\ndef entry(**_): return None\n")
    config = json.loads((folder / "config.json").read_text())
    for path, value in changes.items():
        outer, inner = path.split("__")
        config[outer][inner] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(base__source="hub/FOLDER:entry"), "runs code: add --trust_hub"),
        (dict(teacher__model="hub/FOLDER:entry"), "runs code: add --trust_hub"),
        (dict(base__kwargs={"trust_remote_code": True}), "argument trust_remote_code, which is not allowed"),
        (dict(base__source="hf/x/y", base__kwargs={"trust_remote_code": True}), "argument trust_remote_code"),
        (dict(teacher__model="hf/x/y", teacher__trust_remote_code=True), "argument trust_remote_code"),
        (dict(teacher__model="timm/vit_tiny_patch16_224", teacher__checkpoint_path="x"), "argument checkpoint_path"),
        (dict(teacher__trust_hub=True), "argument trust_hub"),
        (dict(base__kwargs={"embed_dim": 10**12}), "more than"),
        (dict(base__source="what/ever"), "unknown model 'what/ever'"),
        (dict(base__source=3), "does not say which model"),
        (dict(preprocess__size=10**6, preprocess__resize=10**6), "size must be a whole number"),
    ],
)
def test_a_model_folder_never_runs_code(tmp_path: Path, changes: dict, message: str) -> None:
    marker = tmp_path / "marker"
    folder = tmp_path / "hostile"
    changes = {k: v.replace("FOLDER", str(folder)) if isinstance(v, str) else v for k, v in changes.items()}
    hostile_folder(folder, marker, **changes)
    with pytest.raises(ValueError, match=message) as error:
        open_pair(folder)
    assert "\n" not in str(error.value) and not marker.exists()


def test_absurd_image_sizes_are_refused() -> None:
    for size in (0, -1, 100_000):
        with pytest.raises(ValueError, match=r"give a --size of 1\.\.4096"):
            open_vit("scenes", size=size)


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch) -> None:
    vit, other = tiny_timm(), tiny_timm(depth=2)
    save_vit(vit, tmp_path / "saved")
    (tmp_path / "saved" / "notes.txt").write_text("mine")

    def full(*_args, **_options) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("raptor.open.save_file", full)
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


def test_integer_weights_are_refused_by_name(tmp_path: Path) -> None:
    vit = tiny_timm()
    state = dict(vit.model.state_dict())
    state["norm.weight"] = state["norm.weight"].to(torch.int8)
    save_file(state, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=r"norm\.weight holds int8 numbers"):
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


def test_options_that_an_opened_model_would_ignore_are_refused() -> None:
    vit = open_vit("scenes")
    for option, value in {"dtype": "bf16", "name": "mine"}.items():
        with pytest.raises(ValueError, match=f"{option} cannot be given for a model that is already opened"):
            open_vit(vit, **{option: value})
