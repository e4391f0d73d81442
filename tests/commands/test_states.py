"""raptor states: the features are those of the model, row by row, in both formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_run import tiny_run

from raptor import iterate, open_data, open_vit
from raptor.cli import main
from raptor.commands import phases, probe, states
from raptor.commands.states import States, StatesFile
from raptor.vit.saved import save_vit
from raptor.vit.view import ViT
from raptor.vit.weights import fingerprint


@pytest.mark.parametrize("pool", [True, False])
def test_rows_are_the_states_of_the_images(pool: bool, tmp_path: Path) -> None:
    vit = open_vit("scenes")
    found = states(vit, layers=[0, 12], num_images=6, batch_size=4, pool=pool, out=str(tmp_path))
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
    assert len(repr(found)) < 420


def test_arrays_of_an_earlier_command_go_and_files_of_others_stay(tmp_path: Path) -> None:
    states("scenes", layers=[0, 3], num_images=4, out=str(tmp_path))
    (tmp_path / "layer9.cls.npy").write_bytes(b"mine")
    saved = json.loads((tmp_path / "states.json").read_text())
    outside = tmp_path.parent / "outside.npy"
    outside.write_bytes(b"mine")
    saved["arrays"]["layer1.cls"] = ["../outside.npy", [4, 8]]
    (tmp_path / "states.json").write_text(json.dumps(saved))
    found = states("scenes", layers=[12], num_images=4, out=str(tmp_path))
    files = {file for file, _ in found.saved.arrays.values()}
    assert {path.name for path in tmp_path.iterdir()} == {*files, "states.json", "layer9.cls.npy"}
    assert outside.read_bytes() == b"mine"
    (tmp_path / "states.json").write_text("{")
    states("scenes", layers=[11], num_images=4, out=str(tmp_path))
    assert (tmp_path / "layer11.cls.npy").exists() and (tmp_path / "layer12.cls.npy").exists()


def test_the_command_takes_a_module_of_your_own(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "import timm\n\ndef make_vit():\n    return timm.create_model('vit_tiny_patch16_224', img_size=32, depth=2)\n"
    )
    words = ["--module", "mine.py:make_vit", "--layers", "1", "2", "--data", "scenes", "--num_images", "4"]
    assert main(["states", *words, "--out", "features"]) == 0
    assert "features of 4 images" in capsys.readouterr().out
    saved = json.loads(Path("features/states.json").read_text())
    assert saved["arrays"]["layer2.cls"] == ["layer2.cls.npy", [4, 192]]
    for wrong in ("mine.py:other", "none.py:make_vit", "mine.py"):
        assert main(["states", "--module", wrong]) == 2


def test_a_surrogate_of_your_own_module_is_given_its_teacher(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    done = tiny_run(tmp_path / "run", budget="2steps")
    found = states(done, data="scenes", num_images=4, out="of-result")
    assert found.saved.model.phases == [2, 2]
    Path("mine.py").write_text("from tiny_run import tiny_teacher\n\ndef make():\n    return tiny_teacher().model\n")
    words = ["states", "run", "--data", "scenes", "--num_images", "4", "--out", "of-module"]
    assert main(words) == 2 and "--module FILE.py:FUNCTION" in capsys.readouterr().err
    assert main([*words, "--module", "mine.py:make"]) == 0
    name = next(iter(found.saved.arrays))
    assert np.array_equal(np.load(f"of-module/{name}.npy"), found.load(name))


@pytest.mark.parametrize("command", [states, phases, probe])
def test_an_untrained_model_is_the_same_in_every_run(command: Any, tmp_path: Path, monkeypatch) -> None:
    seen = []
    record = ViT.to
    monkeypatch.setattr(ViT, "to", lambda self, *to: (seen.append(fingerprint(self.model)), record(self, *to))[1])
    kwargs = dict(pretrained=False, data="scenes", size=32, device="cpu")
    kwargs |= {
        states: {"num_images": 4},
        phases: {"num_images": 4},
        probe: {"train_images": 40, "num_images": 8, "budget": "1epochs"},
    }[command]
    for number, seed in enumerate((1, 2)):
        torch.manual_seed(seed)
        drawn = torch.random.get_rng_state()
        command("timm/vit_tiny_patch16_224", **kwargs, out=str(tmp_path / str(number)))
        assert torch.equal(torch.random.get_rng_state(), drawn) or command is not states
    assert len(set(seen)) == 1


@pytest.mark.parametrize("pool", [True, False])
def test_parts_of_the_blocks(pool: bool, tmp_path: Path) -> None:
    vit = open_vit("scenes")
    parts = ["attn", "attn_out", "mlp_out", "resid_mid"]
    found = states(vit, layers=[0, 3], parts=parts, num_images=6, batch_size=4, pool=pool, out=str(tmp_path))
    batch = next(iter(iterate(open_data("scenes", "all", limit=6, size=48), vit.preprocess, 6)))
    with torch.no_grad():
        _, _, inside = vit.record(batch.images, parts)
    names = set(found.saved.arrays)
    assert len(names) == 3 * (2 + 4) and not any(name.startswith("layer0.attn") for name in names)
    for part in parts:
        for group, where in vit.groups.present():
            x = getattr(inside, part)[3][..., where, :]
            expected = (x.mean(-2) if pool else x).numpy()
            np.testing.assert_allclose(found.load(f"layer3.{part}.{group}"), expected, rtol=1e-3, atol=1e-4)
    assert found.load("layer3.attn.cls").shape == ((6, 4, 41) if pool else (6, 4, 1, 41))
    states(vit, layers=[12], num_images=4, out=str(tmp_path))
    assert not list(tmp_path.glob("*.attn.*"))  # parts of the earlier command went with it
    with pytest.raises(ValueError, match="layer 0 comes before the blocks and has no parts"):
        states(vit, layers=[0], parts=["attn"], out=str(tmp_path))


def test_layers_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--layers must be from 0 to 12"):
        states("scenes", layers=[13], out=str(tmp_path))


def test_states_that_are_not_finite_are_refused_by_image(tmp_path: Path) -> None:
    vit = open_vit("scenes")
    vit.blocks[10].register_forward_hook(lambda _block, _args, x_btd: x_btd.index_fill(0, torch.tensor(1), torch.inf))
    second = open_data("scenes", "all", limit=4, size=48).names[1]
    with pytest.raises(ValueError, match=f"the states of scenes are not finite at layer 12 for {second}: check"):
        states(vit, num_images=4, batch_size=4, out=str(tmp_path))
    assert not (tmp_path / "states.json").exists()


def test_a_checkpoint_is_named_by_its_file(tmp_path: Path) -> None:
    import timm
    from safetensors.torch import save_file

    model = timm.create_model("vit_tiny_patch16_224", depth=2)
    for name in ("first", "second"):
        save_file(model.state_dict(), tmp_path / f"{name}.safetensors")
    source = f"timm/vit_tiny_patch16_224@{tmp_path}/first.safetensors"
    vit = open_vit(source, depth=2)
    assert vit.name == "first" and vit.opened.weights.endswith("first.safetensors")
    assert open_vit(source, depth=2, name="mine").name == "mine"


def pictures(folder: Path, num: int) -> Path:
    folder.mkdir()
    for i in range(num):
        Image.new("RGB", (48, 48), (50 * i, 30, 90)).save(folder / f"{folder.name}{i}.png")
    return folder


def test_unreadable_images_are_left_out_and_named(tmp_path: Path, capsys) -> None:
    photos = pictures(tmp_path / "p", 5)
    (photos / "p1.png").write_text("no picture")
    words = ["scenes", "--data", str(photos), "--batch_size", "2", "--out", str(tmp_path / "out")]
    assert main(["states", *words]) == 2
    assert "p1.png" in capsys.readouterr().err
    assert main(["states", *words, "--skip_bad"]) == 0
    assert "features of 4 images" in (printed := capsys.readouterr().out) and "1 unreadable images" in printed
    saved = StatesFile.read(tmp_path / "out")
    assert saved.names == [f"p{i}.png" for i in (0, 2, 3, 4)] and saved.bad_images == ["p1.png"]
    found = States(saved, tmp_path / "out").load("layer12.cls")
    assert found.shape == (4, 128) and saved.arrays["layer12.cls"][1] == [4, 128]
    good = pictures(tmp_path / "q", 5)
    whole = states("scenes", data=str(good), out=str(tmp_path / "whole")).load("layer12.cls")
    np.testing.assert_allclose(found, whole[[0, 2, 3, 4]], rtol=1e-3, atol=1e-4)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted({"states.json", *files(saved)})


def files(saved: StatesFile) -> set[str]:
    return {file for file, _ in saved.arrays.values()}


def test_data_of_the_run_joined_sets_and_other_images(tmp_path: Path) -> None:
    a, b = pictures(tmp_path / "a", 3), pictures(tmp_path / "b", 2)
    run = tmp_path / "run"
    save_vit(open_vit("scenes"), run / "teacher")
    (run / "config.yaml").write_text(f"data: {a}\nval: {b}\n")

    def names(**options: Any) -> list[str]:
        found = states(run, out=str(tmp_path / "-".join(["out", *options])), **options).saved
        return [Path(name.split(": ")[-1]).name for name in found.names]

    assert names() == ["a0.png", "a1.png", "a2.png"] and names(split="val") == ["b0.png", "b1.png"]
    assert names(data=[str(a), str(b)]) == ["a0.png", "a1.png", "a2.png", "b0.png", "b1.png"]
    assert names(data=str(a), val=str(b)) == ["b0.png", "b1.png"]
