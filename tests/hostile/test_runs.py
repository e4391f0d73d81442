"""Damaged run folders, checkpoints, sweeps and YAML files: one line that names the file and the way out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_world import DISTIL, Outcome, check_refusal, copied, edit_json, noise, run_words
from safetensors.torch import load_file, save_file

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)
OBJECT = 'k: !!python/object/apply:os.system ["touch canary"]\n'
YAMLS: dict[str, bytes] = {
    "an alias bomb": BOMB.encode(),
    "a python object": OBJECT.encode(),
    "a python name": b"k: !!python/name:os.system\n",
    "a list": b"- a\n- b\n",
    "a word": b"hello\n",
    "not UTF-8": b"data: caf\xe9\n",
    "noise": noise(),
    "an open bracket": b"lr: [1\nblock: }",
    "a tab": b"\tk: 2\n",
    "a number as a name": b"1: 2\n",
    "deep": b"a: " + b"[" * 50000,
    "deep mappings": b"".join(b" " * i + b"a:\n" for i in range(400)),
    "two documents": b"a: 1\n---\nb: 2\n",
    "a circle": b"a: &a [*a]\n",
    "an unknown tag": b"a: !nope 3\n",
    "huge": b"a: " + b"x" * 2_000_000,
}


@pytest.mark.parametrize("name", YAMLS)
@pytest.mark.parametrize("reader", ["--config", "--recipe", "report", "resume", "remembered data"])
def test_every_yaml_reader(reader: str, name: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    folder = copied(world, "run", "run") if not reader.startswith("--") else tmp_path
    path = tmp_path / "bad.yaml" if reader.startswith("--") else folder / "config.yaml"
    path.write_bytes(YAMLS[name])
    words = {
        "--config": ["phases", "teacher", "--data", "images", "--config", str(path)],
        "--recipe": ["distill", "teacher", "--data", "images", "--recipe", str(path)],
        "report": ["report", str(folder), "--out", str(tmp_path / "page.html")],
        "resume": ["distill", "teacher", "--data", "images", *DISTIL.split(), "--out", str(folder)],
        "remembered data": ["evaluate", str(folder)],
    }[reader]
    if reader not in ("report", "resume"):
        words += ["--out", str(tmp_path / "out")]
    check_refusal(run_words(words, capsys), path.name, "")
    assert not (world / "canary").exists()


RECIPES = {
    "learning_rate: 3": ("learning_rate", "choose from"),
    "stage1_shar: 3": ("stage1_shar", "did you mean stage1_share"),
    "lr: fast": ("lr", "a number"),
    "lr: .nan": ("lr", "a number"),
    "lr: .inf": ("lr", "a number"),
    "lr: true": ("lr", "a number"),
    "lr: [1]": ("lr", "a number"),
    "batch_size: 1.5": ("batch_size", "a whole number"),
    "batch_size: 0": ("batch_size", "at least 1"),
    "block: 7": ("block", "one of teacher, paper, got 7"),
    "block: [paper]": ("block", "one of teacher"),
    "stage2_weights: [1, 2]": ("stage2_weights", "token group"),
    "stage2_weights: {cls: x}": ("stage2_weights", "token group"),
    "crop_scale: 3": ("crop_scale", "2 numbers"),
    "crop_scale: [2, 3]": ("crop_scale", "within 0..1"),
    "crop_scale: [a, b]": ("crop_scale", "2 numbers"),
    "budget: [1]": ("budget", "a word"),
    "budget: 0": ("budget", "write 120s"),
    "warmup: 5": ("warmup", "less than 1"),
    "lam: -1": ("lam", "at least 0"),
    "clip: -1": ("clip", "more than 0"),
    "stage2_weights: {cls: -.inf}": ("stage2_weights", "token group"),
    "weight_decay: -1": ("weight_decay", "at least 0"),
    "epoch_images: -1": ("epoch_images", "at least 0"),
}


@pytest.mark.parametrize("entry", RECIPES)
def test_bad_recipes(entry: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "mine.yaml").write_text(entry)
    words = ["distill", "teacher", "--data", "images", "--phases", "2", "2", "--recipe", str(tmp_path / "mine.yaml")]
    more = [] if entry.startswith("batch_size") else ["--batch_size", "4"]
    found = run_words([*words, *more, "--out", str(tmp_path / "out")], capsys)
    check_refusal(found, *RECIPES[entry])
    assert not (tmp_path / "out").exists()


CONFIGS = {
    "num_image: 3": ("--num_image", "did you mean --num_images"),
    "num_images: lots": ("--num_images", "a whole number"),
    "num_images: -1": ("--num_images", "at least 1"),
    "data: {a: {b: c}}": ("--data", "words"),
    "data: ''": ("--data is empty", "leave it out"),
    "config: other.yaml": ("--config", "type it yourself"),
    "module: evil.py:f": ("--module", "type it yourself"),
    "trust_hub: true": ("--trust_hub", "type it yourself"),
    "trust-hub: true": ("--trust_hub", "type it yourself"),
    "nested: {trust_hub: true}": ("--nested", "unknown option"),
    "''": ("config", "write option: value"),
}


@pytest.mark.parametrize("entry", CONFIGS)
def test_bad_config_files(entry: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.yaml").write_text(entry)
    words = ["phases", "teacher", "--config", str(tmp_path / "config.yaml"), "--out", str(tmp_path / "out")]
    check_refusal(run_words(words, capsys), *CONFIGS[entry])


# Run folders.


def resume(folder: Path, world: Path, capsys: Any) -> Outcome:
    """The command that made the run, on a damaged copy of it, as if it had been stopped before its summary."""
    words = ["distill", str(world / "teacher"), "--data", str(world / "images"), "--out", str(folder)]
    return run_words([*words, *DISTIL.split()], capsys)


def checkpoint(folder: Path) -> Path:
    return folder / "checkpoint" / (folder / "checkpoint" / "latest").read_text().strip()


def with_state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_json(checkpoint(folder) / "state.json", change)


def with_tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = checkpoint(folder) / "tensors.safetensors"
        save_file(change(load_file(path)), path)
        edit_json(checkpoint(folder) / "state.json", lambda saved: saved.update(tensor_bytes=path.stat().st_size))

    return damage


def with_bytes(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (checkpoint(folder) / name).write_bytes(content) and None


def with_pointer(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "checkpoint" / "latest").write_bytes(content) and None


def first(prefix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def apply(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = next(n for n in tensors if n.startswith(prefix))
        return tensors | {name: change(tensors[name]).contiguous()}

    return with_tensors(apply)


def without(prefix: str) -> Callable[[Path], None]:
    return with_tensors(lambda tensors: {k: v for k, v in tensors.items() if not k.startswith(prefix)})


def nan(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, float("nan"))


CHECKPOINTS: dict[str, Callable[[Path], None]] = {
    "no state": lambda folder: (checkpoint(folder) / "state.json").unlink(),
    "an empty state": with_bytes("state.json", b""),
    "a state of noise": with_bytes("state.json", noise()),
    "a state that is a list": with_bytes("state.json", b"[]"),
    "a deep state": with_bytes("state.json", b"[" * 100000),
    "no sizes": with_state(lambda saved: saved.pop("tensor_bytes") and None),
    "a size of another kind": with_state(lambda saved: saved.update(tensor_bytes="many")),
    "a stage that is not there": with_state(lambda saved: saved.update(stage="stage9")),
    "a stage of another kind": with_state(lambda saved: saved.update(stage=[1])),
    "a step of another kind": with_state(lambda saved: saved.update(step="last")),
    "a negative step": with_state(lambda saved: saved.update(step=-7)),
    "steps of another kind": with_state(lambda saved: saved.update(num_steps=[1])),
    "negative steps": with_state(lambda saved: saved.update(num_steps={"stage1": -1, "stage2": 1})),
    "a time of another kind": with_state(lambda saved: saved.update(seconds="long")),
    "no tensors": lambda folder: (checkpoint(folder) / "tensors.safetensors").unlink(),
    "tensors of noise": with_bytes("tensors.safetensors", noise()),
    "no blocks": without("block."),
    "no variance": without("variance"),
    "no optimizer": without("optimizer."),
    "a NaN block": first("block.", nan),
    "a NaN variance": first("variance", nan),
    "a NaN moment": first("optimizer.exp_avg.", nan),
    "a block of another shape": first("block.", lambda t: t.flatten()[:1]),
    "a variance of another shape": first("variance", lambda t: t[:1]),
    "a moment of another shape": first("optimizer.exp_avg.", lambda t: t.flatten()[:1]),
    "a pointer to nothing": with_pointer(b"step-99"),
    "an empty pointer": with_pointer(b""),
    "a pointer elsewhere": with_pointer(b"../../../../etc"),
    "a pointer of noise": with_pointer(noise()),
    "a pointer to a number without end": with_pointer(b"step-" + b"9" * 5000),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_damaged_checkpoints(name: str, world: Path, capsys: Any) -> None:
    folder = copied(world, "run", "run")
    (folder / "summary.json").unlink()
    CHECKPOINTS[name](folder)
    found = resume(folder, world, capsys)
    check_refusal(found, "checkpoint", "")
    assert any(word in found.err for word in ("choose another --out", "name the model", "weights that are whole"))


SUMMARIES: dict[str, Any] = {
    "empty": b"",
    "noise": noise(),
    "a list": b"[]",
    "a word": b'"x"',
    "deep": b"[" * 100000,
    "half": b'{"phases": [2, 2], ',
    "no phases": {"phases": None},
    "phases of words": {"phases": ["a"]},
    "phases that are negative": {"phases": [-1, 5]},
    "phases of another kind": {"phases": 7},
    "validation of another kind": {"validation": 7},
    "curves of another kind": {"validation": {"curves": 7}},
    "steps of another kind": {"num_steps": 7},
    "a teacher of another kind": {"teacher": [1]},
}


@pytest.mark.parametrize(
    "name, command",
    [(name, command) for name in SUMMARIES for command in ("report", "resume")]
    + [(name, "evaluate") for name in ("empty", "noise", "a list")],
)
def test_damaged_summaries(name: str, command: str, world: Path, tmp_path: Path, capsys: Any) -> None:
    """Each command refuses with the file's name, or does not need what is damaged."""
    folder, change = copied(world, "run", "run"), SUMMARIES[name]
    path = folder / "summary.json"
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    if command == "resume":
        found = resume(folder, world, capsys)
    elif command == "report":
        found = run_words(["report", str(folder), "--num_images", "0"], capsys)
    else:
        found = run_words(["evaluate", str(folder), "--num_images", "2", "--out", str(tmp_path / "out")], capsys)
    check_refusal(found, "summary.json", "")


RESULTS = ["phases.json", "certificate.json", "complexity.json", "dynamics.json", "interventions.json", "images.json"]
DAMAGE = {"empty": b"", "noise": noise(), "a list": b"[1]", "an empty object": b"{}", "deep": b'{"a":' * 100000}


@pytest.mark.parametrize("file", [*RESULTS, "probe-classify.json", "probe-depth.json"])
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_results(name: str, file: str, world: Path, capsys: Any) -> None:
    folder = copied(world, "run", "run")
    (folder / file).write_bytes(DAMAGE[name])
    if file == "phases.json" and name == "an empty object":
        return
    check_refusal(run_words(["report", str(folder), "--num_images", "0"], capsys), file, "again")


def test_a_result_that_is_a_pipe(world: Path, capsys: Any) -> None:
    folder = copied(world, "run", "run")
    for file in ("dynamics.json", "summary.json"):
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)
        check_refusal(run_words(["report", str(folder)], capsys), file, "run the command")
        (folder / file).unlink()


METRICS = {"noise in the middle": b"{}\n\xff\xfe\n{}\n", "a list": b"[]\n{}\n", "half a line": b'{"a": \n{}\n'}


@pytest.mark.parametrize("name", METRICS)
def test_damaged_metrics(name: str, world: Path, capsys: Any) -> None:
    folder = copied(world, "run", "run")
    (folder / "metrics.jsonl").write_bytes(METRICS[name])
    check_refusal(run_words(["report", str(folder), "--num_images", "0"], capsys), "metrics.jsonl", "")


LOSSES = {"words": b'{"loss": "x", "step": 1}\n', "a last line that was cut off": b'{"loss": 1, "step": 1}\n{"lo'}


@pytest.mark.parametrize("name", LOSSES)
def test_odd_losses_are_left_out(name: str, world: Path, capsys: Any) -> None:
    folder = copied(world, "run", "run")
    (folder / "metrics.jsonl").write_bytes(LOSSES[name])
    assert run_words(["report", str(folder), "--num_images", "0"], capsys).code == 0


def test_a_finished_run_repairs_its_surrogate(world: Path, capsys: Any) -> None:
    folder = copied(world, "run", "run")
    shutil.rmtree(folder / "surrogate")
    found = resume(folder, world, capsys)
    assert found.code == 0, found.err
    assert (folder / "surrogate" / "model.safetensors").is_file()
