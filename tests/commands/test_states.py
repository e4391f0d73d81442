"""raptor states: the features are those of the model, row by row, in both formats."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from raptor import iterate, open_data, open_vit
from raptor.cli import main
from raptor.commands import states


@pytest.mark.parametrize("format", ["npy", "safetensors"])
@pytest.mark.parametrize("pool", [True, False])
def test_rows_are_the_states_of_the_images(format: str, pool: bool, tmp_path: Path) -> None:
    vit = open_vit("scenes")
    found = states(vit, layers=[0, 12], limit=6, batch_size=4, format=format, pool=pool, out=str(tmp_path))
    images = open_data("scenes", "all", limit=6, size=48)
    batch = next(iter(iterate(images, vit.preprocess, 6)))
    with torch.no_grad():
        expected, _ = vit.record(batch.images)
    for layer in (0, 12):
        for group, where in vit.groups.present():
            x = expected[layer][:, where]
            array = found.load(f"layer{layer}.{group}")
            np.testing.assert_allclose(array, (x.mean(1) if pool else x).numpy(), rtol=1e-3, atol=1e-4)
    assert found.saved.names == images.names and found.saved.labels == images.labels
    assert len(found.to_dataframe()) == 2 * len(list(vit.groups.present()))


def test_the_command_takes_a_module_of_your_own(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "import timm\n\ndef make_vit():\n    return timm.create_model('vit_tiny_patch16_224', img_size=32, depth=2)\n"
    )
    words = ["--module", "mine.py:make_vit", "--layers", "1", "2", "--limit", "4", "--out", "features"]
    assert main(["states", *words]) == 0
    assert "features of 4 images" in capsys.readouterr().out
    saved = json.loads(Path("features/states.json").read_text())
    assert saved["arrays"]["layer2.cls"] == ["layer2.cls.npy", [4, 192]]
    for wrong in ("mine.py:other", "none.py:make_vit", "mine.py"):
        assert main(["states", "--module", wrong]) == 2


def test_layers_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--layers must be from 0 to 12"):
        states("scenes", layers=[13], out=str(tmp_path))


def test_a_checkpoint_is_named_by_its_file(tmp_path: Path) -> None:
    import timm
    from safetensors.torch import save_file

    model = timm.create_model("vit_tiny_patch16_224", depth=2)
    for name in ("first", "second"):
        save_file(model.state_dict(), tmp_path / f"{name}.safetensors")
    source = f"timm/vit_tiny_patch16_224@{tmp_path}/first.safetensors"
    vit = open_vit(source, depth=2)
    assert vit.name == "first" and vit.opened["weights"].endswith("first.safetensors")
    assert open_vit(source, depth=2, name="mine").name == "mine"
