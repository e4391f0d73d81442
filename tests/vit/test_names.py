"""Names that can be opened, and the models that a weight file fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from raptor.vit.names import list_models, models_for
from raptor.vit.open import open_vit

FEW = (
    "deit_tiny_distilled_patch16_224",
    "deit_tiny_patch16_224",
    "vit_small_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2",
    "vit_tiny_patch16_224",
    "vit_tiny_patch16_384",
)

TINY = ["deit_tiny_patch16_224", "vit_tiny_patch16_224"]


@pytest.fixture
def few_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six of timm's names, because trying all of them takes seconds."""
    monkeypatch.setattr("timm.list_models", lambda *_args, **_options: list(FEW))


def weights_of(name: str, path: Path, **options: int) -> Path:
    torch.save({"state_dict": timm.create_model(name, **options).state_dict()}, path)
    return path


@pytest.mark.parametrize(
    ("name", "options", "fitting"),
    [
        ("deit_tiny_distilled_patch16_224", {}, ["deit_tiny_distilled_patch16_224"]),
        ("vit_tiny_patch16_224", {}, TINY),
        ("vit_tiny_patch16_384", {"num_classes": 3}, ["vit_tiny_patch16_384"]),
        ("vit_tiny_patch16_224", {"img_size": 96}, [TINY[0], TINY[1], "vit_tiny_patch16_384"]),
        ("vit_small_patch14_reg4_dinov2", {}, ["vit_small_patch14_reg4_dinov2"]),
        ("vit_tiny_patch16_224", {"depth": 11}, []),
        ("vit_tiny_patch16_224", {"patch_size": 8}, []),
    ],
)
def test_models_that_a_file_fits(
    few_models: None, name: str, options: dict[str, int], fitting: list[str], tmp_path: Path
) -> None:
    assert models_for(weights_of(name, tmp_path / "w.pt", **options)) == [f"timm/{name}" for name in fitting]


def test_a_weight_file_is_opened_as_the_only_model_that_it_fits(few_models: None, tmp_path: Path, capsys) -> None:
    path = weights_of("deit_tiny_distilled_patch16_224", tmp_path / "w.pt")
    vit = open_vit(path)
    assert vit.origin.base.source == "timm/deit_tiny_distilled_patch16_224" and vit.name == "w"
    assert vit.opened.weights == str(path)
    assert "w.pt fits timm/deit_tiny_distilled_patch16_224 alone" in capsys.readouterr().err


def test_a_weight_file_after_a_name_is_of_that_model(tmp_path: Path) -> None:
    path = weights_of("vit_tiny_patch16_224", tmp_path / "w.pt", depth=2)
    vit = open_vit(f"timm/deit_tiny_patch16_224@{path}", depth=2)
    assert vit.origin.base.source == "timm/deit_tiny_patch16_224" and vit.opened.weights == str(path)
    for source in (f"scenes@{path}", f"vit_tiny_patch16_224@{path}"):
        with pytest.raises(
            ValueError, match=r"the model has width 128|unknown model 'vit_.*did you mean timm/vit_tiny"
        ):
            open_vit(source)


def test_a_weight_file_that_fits_several_models_or_none_is_not_guessed(few_models: None, tmp_path: Path) -> None:
    path = weights_of("vit_tiny_patch16_224", tmp_path / "w.pt")
    with pytest.raises(ValueError, match=rf"fits timm/{TINY[0]}, timm/{TINY[1]}, .*: write timm/{TINY[0]}@{path}"):
        open_vit(path)
    torch.save(nn.Linear(2, 2).state_dict(), path)
    with pytest.raises(ValueError, match=r"w\.pt fits no ViT of timm"):
        open_vit(str(path))


def test_list_models() -> None:
    names = list_models("dinov2")
    assert "timm/vit_base_patch14_reg4_dinov2.lvd142m" in names
    assert all("dinov2" in n for n in names)
    assert list_models("no such model") == []
    assert "scenes" in list_models()
    assert not [n for n in list_models() if n.startswith(("timm/resnet", "timm/swin", "timm/samvit"))]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm/vit_tiny_patch16_225", "did you mean timm/vit_tiny_patch16_224"),
        ("timm/vit_tiny_patch16_224.nope", "augreg_in21k"),
        ("vit_tiny_patch16_224", "did you mean timm/vit_tiny_patch16_224"),
        ("senes", "did you mean scenes"),
        ("nothing/like/it", "write timm/NAME"),
        ("dinov2s.pt", "weights file dinov2s.pt does not exist"),
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


def test_a_folder_of_transformers_says_how_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit", "architectures": ["ViTModel"]}')
    with pytest.raises(ValueError, match=f"write hf/{tmp_path} for a model of transformers"):
        open_vit(tmp_path)
