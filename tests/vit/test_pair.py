"""open_pair: a surrogate and the teacher that it was made from; a folder of a model never runs code."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import (
    Unheard,
)
from tiny_models import noise_images, tiny_timm
from torch import nn

from raptor.data.preprocess import Preprocess
from raptor.files import RunError
from raptor.phases.cut import Phases
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.groups import TokenGroups
from raptor.vit.open import open_vit
from raptor.vit.origin import Opened
from raptor.vit.pair import OtherTeacher, open_pair
from raptor.vit.saved import save_vit
from raptor.vit.view import ViT
from raptor.vit.weights import fingerprint

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


def _run_of(teacher: ViT, folder: Path) -> Path:
    save_vit(make_surrogate(teacher, (2, 2)), folder / "surrogate")
    return folder


SHAPE = dict(pretrained=False, embed_dim=48, depth=4, num_heads=3)


def test_a_fingerprint_is_of_every_weight() -> None:
    vit = tiny_timm()
    before = fingerprint(vit.model)
    assert fingerprint(copy.deepcopy(vit.model)) == before
    weight = vit.model.get_parameter("blocks.1.mlp.fc1.weight")
    with torch.no_grad():
        weight[weight.shape[0] // 2, 7] += 1e-3  # neither among the first nor the last values
    assert fingerprint(vit.model) != before
    half = copy.deepcopy(vit.model).half()
    assert fingerprint(half) == fingerprint(copy.deepcopy(half).float())


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
        match=r"^scenes is not a surrogate and has no teacher: name a run, or leave out --teacher",
    ):
        open_pair("scenes", teacher="scenes-k2")
    with pytest.raises(ValueError, match=r"^this model is not a surrogate"):
        open_pair(open_vit("scenes"), teacher=tiny_timm().model)


def test_options_of_a_teacher_that_is_opened_already_are_refused(tmp_path: Path) -> None:
    teacher = open_vit("scenes")
    for options in (dict(weights="other.pth"), dict(registers=0), dict(size=96), dict(dtype="bf16"), dict(name="mine")):
        (name,) = options
        with pytest.raises(ValueError, match=f"^(--)?{name} cannot be given for a teacher that is already opened"):
            open_pair("scenes-k2", teacher=teacher, **options)  # type: ignore[arg-type]
    assert open_pair("scenes-k2", teacher=teacher, size=48)[1] is teacher
    surrogate, larger = open_pair("scenes-k2", teacher=open_vit("scenes", size=96))
    assert surrogate is not None and surrogate.preprocess == larger.preprocess and surrogate.groups == larger.groups


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
    assert open_pair(surrogate, teacher=plain)[1].opened.weights == "weights.pth"
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
    vit.opened = Opened(model="scenes")
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
        (dict(teacher__model="hf/x/y", teacher__kwargs={"trust_remote_code": True}), "argument trust_remote_code"),
        (
            dict(teacher__model="timm/vit_tiny_patch16_224", teacher__kwargs={"checkpoint_path": "x"}),
            "argument checkpoint_path",
        ),
        (dict(teacher__kwargs={"trust_hub": True}), "argument trust_hub"),
        (dict(teacher__trust_hub=True), r"teacher\.trust_hub: Unexpected keyword argument"),
        (dict(base__kwargs={"embed_dim": 10**12}), "more than"),
        (dict(base__source="what/ever"), "unknown model 'what/ever'"),
        (dict(base__source=3), r"base\.source: Input should be a valid string"),
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


def test_a_folder_that_is_here_wins_over_a_built_in_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_in = open_vit("scenes")
    own = open_vit("timm/vit_tiny_patch16_224", pretrained=False, **TINY)
    monkeypatch.chdir(tmp_path)
    save_vit(own, Path("scenes"))
    assert fingerprint(open_vit("scenes").model) == fingerprint(own.model)
    _, teacher = open_pair("scenes-k2")  # the built-in surrogate keeps its own teacher
    assert fingerprint(teacher.model) == fingerprint(built_in.model)
    save_vit(make_surrogate(own, [1, 2]), Path("scenes-k2/surrogate"))
    surrogate, teacher = open_pair("scenes-k2", teacher="scenes")
    assert surrogate is not None and surrogate.dim == own.dim
    assert fingerprint(teacher.model) == fingerprint(own.model)


def test_a_run_without_a_model_yet_is_not_taken_for_the_built_in_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scenes-k3").mkdir()
    Path("scenes-k3/config.yaml").write_text("model: scenes\n")
    with pytest.raises(ValueError, match="scenes-k3 is not finished"):
        open_pair("scenes-k3")


def test_a_moved_weight_file_is_named_as_the_teacher(tmp_path: Path) -> None:
    made = open_vit("timm/vit_tiny_patch16_224", pretrained=False, num_classes=5, **TINY)
    torch.save(made.model.state_dict(), tmp_path / "old.pth")
    teacher = open_vit("timm/vit_tiny_patch16_224", weights=str(tmp_path / "old.pth"), **TINY)
    save_vit(make_surrogate(teacher, (1, 2)), tmp_path / "elsewhere" / "run")
    moved = (tmp_path / "old.pth").rename(tmp_path / "new.pth")
    with pytest.raises(RunError, match="is not there: give its new place with --teacher"):
        open_pair(tmp_path / "elsewhere" / "run")
    # The file by itself would not say which model it is of.
    _, again = open_pair(tmp_path / "elsewhere" / "run", teacher=moved)
    assert fingerprint(again.model) == fingerprint(teacher.model) and again.preprocess == teacher.preprocess
    torch.save(open_vit("timm/vit_tiny_patch16_224", pretrained=False, num_classes=5, **TINY).model.state_dict(), moved)
    with pytest.raises(OtherTeacher, match="was not made from new"):
        open_pair(tmp_path / "elsewhere" / "run", teacher=moved)


def test_a_model_of_another_kind_is_not_taken_for_the_built_in_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scenes").mkdir()
    Path("scenes/config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ValueError, match="write hf/scenes for a model of transformers"):
        open_pair("scenes")
