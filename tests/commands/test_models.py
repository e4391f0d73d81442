"""raptor models: names as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
from safetensors.torch import save_file

from raptor.cli import main
from raptor.commands.models import models


def test_models_as_text_and_as_json(capsys):
    assert main(["models", "scenes"]) == 0
    text = capsys.readouterr().out
    assert main(["models", "scenes", "--json"]) == 0
    names = json.loads(capsys.readouterr().out)["models"]
    assert names == ["scenes", "scenes-k2", "scenes-k3"] == text.splitlines()[:3]
    assert "3 names" in text


def test_a_filter_without_a_match_says_what_to_try() -> None:
    with pytest.raises(ValueError, match="no model matches 'no-such-model'"):
        models("no-such-model")


def test_models_that_a_weight_file_fits(tmp_path: Path, capsys, monkeypatch) -> None:
    known = ["deit_tiny_distilled_patch16_224", "vit_tiny_patch16_224", "deit_tiny_patch16_224"]
    monkeypatch.setattr("timm.list_models", lambda *_args, **_options: known)
    file = tmp_path / "w.safetensors"
    save_file(timm.create_model(known[1]).state_dict(), file)
    assert main(["models", "--for", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"] == [f"timm/{name}" for name in known[1:]]
    assert models("deit", for_=str(file)).names == ["timm/deit_tiny_patch16_224"]
    assert main(["models", f"--for={file}"]) == 0
    told = capsys.readouterr().out
    assert f"open it as timm/{known[1]}@{file}" in told and "they may prepare images differently" in told
    with pytest.raises(ValueError, match="fits no timm model that contains 'siglip'"):
        models("siglip", for_=str(file))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--for"], "--for has no value: give one"),
        (["--for", "nowhere.pth"], "--for: there is no file nowhere.pth"),
    ],
)
def test_a_weight_file_that_is_not_given(words: list[str], message: str, capsys) -> None:
    assert main(["models", *words]) == 2
    assert message in capsys.readouterr().err
