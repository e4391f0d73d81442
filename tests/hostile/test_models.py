"""Damaged model folders, weight files and heads: one line that names the file, whatever it holds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_world import check_refusal, copied, edit_json, noise, run_words
from safetensors.torch import load_file, save_file

Change = Callable[[dict[str, Any]], Any]


def put(*keys: str, value: Any) -> Change:
    """Set an entry of the config, which may lie deeper."""

    def change(config: dict[str, Any]) -> None:
        for key in keys[:-1]:
            config = config[key]
        config[keys[-1]] = value

    return change


def drop(key: str) -> Change:
    return lambda config: config.pop(key) and None


def states(model: str, out: Path, *more: str) -> list[str]:
    return ["states", model, "--data", "images", "--num_images", "2", "--out", str(out), *more]


CONFIGS: dict[str, tuple[Change, str]] = {
    **{f"no {key}": (drop(key), key) for key in ("name", "base", "preprocess", "structure", "num_classes")},
    **{
        f"{key} of another kind": (put(key, value=7 if key != "num_classes" else "7"), key)
        for key in ("name", "base", "preprocess", "structure", "num_classes", "surrogate", "teacher")
    },
    "a list": (lambda config: [config], "not an object"),
    "true for a number": (put("num_classes", value=True), "num_classes"),
    "classes without end": (put("num_classes", value=10**15), "10000000000"),
    "names of no classes": (put("classes", value=7), "damaged (classes:"),
    "names of other classes": (put("classes", value=["a"]), "classes in classes"),
    "negative classes": (put("num_classes", value=-1), "-1 classes"),
    "another format": (put("format", value="raptor-vit/99"), "raptor-vit/99"),
    "no source": (put("base", value={}), "base.source"),
    "a source of another kind": (put("base", "source", value=[1]), "base.source"),
    "an unknown source": (put("base", "source", value="timm/nope"), "'nope'"),
    "a source that is no ViT": (put("base", "source", value="timm/resnet18"), "resnet18"),
    "a source of another library": (put("base", "source", value="keras/vit"), "keras/vit"),
    "arguments of another kind": (put("base", "kwargs", value=[1]), "base.kwargs"),
    "an unknown argument": (put("base", "kwargs", "nope", value=1), "nope"),
    "an argument that is a list of dicts": (put("base", "kwargs", "img_size", value=[{}]), "img_size"),
    "an argument of another type": (put("base", "kwargs", "embed_dim", value="wide"), "config.json"),
    "a width without end": (put("base", "kwargs", "embed_dim", value=10**12), "embed_dim"),
    "a depth without end": (put("base", "kwargs", "depth", value=10**6), "beyond any model"),
    "an image without end": (put("base", "kwargs", "img_size", value=2**20), "memory"),
    "layers without end": (put("base", "kwargs", "mlp_ratio", value=1e30), "beyond any model"),
    "classes of the base without end": (put("base", "num_classes", value=10**12), "beyond any model"),
    "a width that does not divide": (put("base", "kwargs", "embed_dim", value=33), "divisible"),
    "no width": (put("base", "kwargs", "embed_dim", value=0), "timm/vit_tiny"),
    "a negative depth": (put("base", "kwargs", "depth", value=-1), "timm/vit_tiny"),
    "another depth": (put("base", "kwargs", "depth", value=3), "does not fit"),
    "a size of another kind": (put("preprocess", "size", value="big"), "config.json"),
    "no size": (put("preprocess", "size", value=0), "size (0)"),
    "a size without end": (put("preprocess", value={"size": 10**9, "resize": 10**9}), "size"),
    "an enlargement without end": (put("preprocess", "resize", value=10**9), "at most 16384"),
    "unknown preprocessing": (put("preprocess", "nope", value=1), "nope"),
    "an unknown interpolation": (put("preprocess", "interpolation", value="x"), "interpolation"),
    "a mean of one number": (put("preprocess", "mean", value=[1]), "preprocess.mean"),
    "a mean of words": (put("preprocess", "mean", value=["a", "b", "c"]), "config.json"),
    "a deviation of 0": (put("preprocess", "std", value=[0, 0, 0]), "above 0"),
    "a NaN deviation": (put("preprocess", "std", value=[float("nan")] * 3), "config.json is damaged"),
    "unknown structure": (put("structure", "nope", value=1), "nope"),
    "blocks that are not there": (put("structure", "blocks", value="nope"), "nope"),
    "blocks of another kind": (put("structure", "blocks", value=7), "config.json"),
    "cls without end": (put("structure", "cls", value=10**9), "cls"),
    "registers without end": (put("structure", "registers", value=10**9), "registers"),
    "a surrogate without phases": (put("surrogate", value={}), "config.json"),
    "a surrogate with other entries": (put("surrogate", value={"phases": [4], "nope": 1}), "nope"),
    "phases of words": (put("surrogate", value={"phases": ["a"]}), "config.json"),
    "phases without end": (put("surrogate", value={"phases": [10**9]}), "1000000000"),
    "phases that are negative": (put("surrogate", value={"phases": [-1, 5]}), "phase"),
    "an unknown block": (put("surrogate", value={"phases": [4], "block": "nope"}), "nope"),
    "inner surrogates of another kind": (put("inner_surrogates", value=[1]), "inner_surrogates"),
    "code in an argument": (put("base", "kwargs", "trust_remote_code", value=True), "trust_remote_code"),
    "a checkpoint in an argument": (put("base", "kwargs", "checkpoint_path", value="/etc/passwd"), "checkpoint_path"),
    "code of a hub": (put("base", "source", value="hub/evil/repo:entry"), "--trust_hub"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_damaged_configs(name: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    change, thing = CONFIGS[name]
    folder = copied(world, "teacher", "model")
    edit_json(folder / "config.json", change)
    check_refusal(run_words(states(str(folder), tmp_path / "out"), capsys), thing, "")


FILES: dict[str, tuple[str, bytes, str]] = {
    "an empty config": ("config.json", b"", "holds no raptor model"),
    "a config of noise": ("config.json", noise(), "holds no raptor model"),
    "half a config": ("config.json", b'{"format": "raptor-vit/1", "name": ', "config.json"),
    "a config that is not UTF-8": ("config.json", b'{"format": "raptor-vit/1", "name": "\xff"}', "config.json"),
    "a deep config": ("config.json", b'{"format": "raptor-vit/1", "name": ' + b"[" * 100000, "config.json"),
    "empty weights": ("model.safetensors", b"", "model.safetensors"),
    "weights of noise": ("model.safetensors", noise(), "model.safetensors"),
    "a header without end": ("model.safetensors", b"\xff" * 8 + noise(), "model.safetensors"),
    "a header of a gigabyte": ("model.safetensors", (1 << 30).to_bytes(8, "little") + b"{}", "model.safetensors"),
    "a lying header": (
        "model.safetensors",
        (74).to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": [1000000], "data_offsets": [0, 4000000]}} ',
        "model.safetensors",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_damaged_files(name: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    file, content, thing = FILES[name]
    folder = copied(world, "teacher", "model")
    (folder / file).write_bytes(content)
    check_refusal(run_words(states(str(folder), tmp_path / "out"), capsys), thing, "")


def test_a_folder_without_weights(world: Path, tmp_path: Path, capsys: Any) -> None:
    folder = copied(world, "teacher", "model")
    (folder / "model.safetensors").unlink()
    check_refusal(run_words(states(str(folder), tmp_path / "out"), capsys), "model.safetensors", "give a .safetensors")


def test_a_config_that_is_a_pipe(world: Path, tmp_path: Path, capsys: Any) -> None:
    folder = copied(world, "teacher", "model")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    check_refusal(run_words(states(str(folder), tmp_path / "out"), capsys), "model", "name the --out")


def test_a_surrogate_that_names_itself(world: Path, tmp_path: Path, capsys: Any) -> None:
    folder = copied(world, "run", "run")
    edit_json(folder / "surrogate" / "config.json", put("teacher", value={"model": str(folder), "weights": None}))
    found = run_words(["evaluate", str(folder), "--data", "images", "--out", str(tmp_path / "out")], capsys)
    check_refusal(found, "names itself", "--teacher")


TEACHERS: dict[str, tuple[Any, str]] = {
    "no teacher": (None, "--teacher"),
    "an empty teacher": ({}, "--teacher"),
    "a teacher that is gone": ({"model": "gone/teacher"}, "gone/teacher"),
    "a teacher of another kind": ({"model": [1]}, "teacher.model"),
    "a teacher with code": ({"model": "hub/evil:entry"}, "--trust_hub"),
    "a teacher with an unknown argument": ({"model": "teacher", "trust_remote_code": True}, "trust_remote_code"),
    "a teacher with weights that are gone": ({"model": "teacher", "weights": "gone/x.pth"}, "gone/x.pth"),
    "a teacher with a size without end": ({"model": "teacher", "size": 10**9}, "1000000000"),
    "a teacher with a size of another kind": ({"model": "teacher", "size": "big"}, "size"),
    "a teacher that is another": ({"model": "scenes", "fingerprint": "0" * 32}, "was not made from"),
}


@pytest.mark.parametrize("name", TEACHERS)
def test_damaged_teachers(name: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    value, thing = TEACHERS[name]
    folder = copied(world, "run", "run")
    edit_json(folder / "surrogate" / "config.json", put("teacher", value=value))
    found = run_words(["evaluate", str(folder), "--data", "images", "--out", str(tmp_path / "out")], capsys)
    check_refusal(found, thing, "")


# Weight files.


def state(world: Path) -> dict[str, torch.Tensor]:
    return load_file(world / "weights.safetensors")


def changed(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        return tensors | {name: f(tensors[name]) for name, f in ((n.replace("__", "."), g) for n, g in changes.items())}

    return change


def holding(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


def circular(tensors: dict[str, Any]) -> Any:
    outer: dict[str, Any] = {}
    outer["model"] = outer
    return outer


WEIGHTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str]] = {
    "NaN": (changed(norm__weight=holding(float("nan"))), "norm.weight", "whole"),
    "infinity": (changed(norm__weight=holding(float("inf"))), "norm.weight", "whole"),
    "a NaN head": (changed(head__weight=holding(float("nan"))), "head.weight", "whole"),
    "integers": (changed(norm__weight=lambda t: t.to(torch.int8)), "norm.weight", "fp32"),
    "a wrong shape": (changed(norm__weight=lambda t: t[:-1]), "norm.weight", "name the model"),
    "a wrong depth": (lambda t: {k: v for k, v in t.items() if "blocks.3" not in k}, "blocks.3", "name the model"),
    "one more": (lambda t: t | {"nope": torch.zeros(1)}, "nope", "name the model"),
    "nothing": (lambda t: {}, "no tensors", "save a state dict"),
    "no tensors": (lambda t: {"model": {"a": 1}}, "no tensors", "save a state dict"),
    "a list": (lambda t: [1, 2], "holds a list", "save a state dict"),
    "one tensor": (lambda t: torch.zeros(3), "holds a Tensor", "save a state dict"),
    "a circle": (circular, "no tensors", "save a state dict"),
    "an expanded tensor": (
        changed(norm__weight=lambda t: torch.zeros(1).expand(10**12)),
        "norm.weight",
        "save it contiguous",
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_bad_weights(name: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    change, thing, remedy = WEIGHTS[name]
    torch.save(change(state(world)), tmp_path / "bad.pth")
    words = states("teacher", tmp_path / "out", "--weights", str(tmp_path / "bad.pth"))
    check_refusal(run_words(words, capsys), thing, remedy)


@pytest.mark.parametrize("command", ["phases", "dynamics", "probe", "states", "explore"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_no_command_takes_bad_weights(command: str, value: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    folder = copied(world, "teacher", "model")
    tensors = state(world)
    tensors["blocks.1.attn.qkv.weight"].view(-1)[3] = float(value)
    save_file(tensors, folder / "model.safetensors")
    data = [] if command == "explore" else ["--data", "images", "--out", str(tmp_path / "out")]
    check_refusal(run_words([command, str(folder), *data], capsys), "blocks.1.attn.qkv.weight", "whole")


def test_evaluate_takes_no_bad_surrogate(world: Path, tmp_path: Path, capsys: Any) -> None:
    folder = copied(world, "run", "run")
    tensors = load_file(folder / "surrogate" / "model.safetensors")
    name = next(n for n in tensors if n.startswith("shared_blocks.0"))
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, folder / "surrogate" / "model.safetensors")
    check_refusal(run_words(["evaluate", str(folder), "--out", str(tmp_path / "out")], capsys), name, "whole")


BYTES: dict[str, tuple[str, bytes]] = {
    "empty.pth": ("empty.pth", b""),
    "noise.pth": ("noise.pth", noise()),
    "text.pth": ("text.pth", b"hello"),
    "html.pth": ("html.pth", b"<!DOCTYPE html><html>"),
    "zip.pth": ("zip.pth", b"PK\x03\x04" + noise()),
    "lfs.safetensors": ("lfs.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    "json.safetensors": ("json.safetensors", json.dumps({"a": 1}).encode()),
    "empty.safetensors": ("empty.safetensors", b""),
    "noise.bin": ("noise.bin", noise()),
}


@pytest.mark.parametrize("option", ["--weights", "--head_file", "--init_head"])
@pytest.mark.parametrize("name", BYTES)
def test_files_that_hold_no_tensors(name: str, option: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    file, content = BYTES[name]
    (tmp_path / file).write_bytes(content)
    command = {"--weights": "phases", "--head_file": "dynamics", "--init_head": "probe"}[option]
    words = [command, "teacher", "--data", "images", option, str(tmp_path / file), "--out", str(tmp_path / "out")]
    check_refusal(run_words(words, capsys), file, "")


def test_an_interrupted_download(world: Path, tmp_path: Path, capsys: Any) -> None:
    for file in ("weights.pth", "weights.safetensors"):
        content = (world / file).read_bytes()
        (tmp_path / file).write_bytes(content[: len(content) // 2])
        words = states("teacher", tmp_path / "out", "--weights", str(tmp_path / file))
        found = run_words(words, capsys)
        check_refusal(found, file, "fetch it again")
        if file.endswith(".pth"):
            assert found.lines()[0].endswith("it is damaged or not complete: fetch it again")


# Heads.

HEADS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "no classes": ({"weight": torch.zeros(0, 64), "bias": torch.zeros(0)}, "no classes"),
    "no features": ({"weight": torch.zeros(3, 0), "bias": torch.zeros(3)}, "no classes"),
    "NaN": ({"weight": torch.full((3, 64), float("nan")), "bias": torch.zeros(3)}, "NaN"),
    "an infinite bias": ({"weight": torch.zeros(3, 64), "bias": torch.full((3,), float("inf"))}, "infinite"),
    "integers": ({"weight": torch.zeros(3, 64, dtype=torch.int8), "bias": torch.zeros(3)}, "int8"),
    "other features": ({"weight": torch.zeros(3, 48), "bias": torch.zeros(3)}, "48 features"),
    "one dimension": ({"weight": torch.zeros(3), "bias": torch.zeros(3)}, "weight (C, F)"),
    "three dimensions": ({"weight": torch.zeros(3, 64, 1), "bias": torch.zeros(3)}, "weight (C, F)"),
    "a bias of another size": ({"weight": torch.zeros(3, 64), "bias": torch.zeros(2)}, "bias (C,)"),
    "only a bias": ({"bias": torch.zeros(3)}, "not weight and bias"),
    "two heads": ({"a.weight": torch.zeros(3, 64), "b.weight": torch.zeros(3, 64), "b.bias": torch.zeros(3)}, "weight"),
}


@pytest.mark.parametrize("command", ["evaluate run", "dynamics teacher", "distill teacher"])
@pytest.mark.parametrize("name", HEADS)
def test_bad_heads(name: str, command: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    tensors, thing = HEADS[name]
    save_file(tensors, tmp_path / "head.safetensors")
    words = [*command.split(), "--data", "images", "--head_file", str(tmp_path / "head.safetensors")]
    check_refusal(run_words([*words, "--out", str(tmp_path / "out")], capsys), thing, "")
    assert not (tmp_path / "out").exists()
