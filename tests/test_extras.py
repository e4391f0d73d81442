"""Without an optional package, the command that needs it ends with one line that says how to install it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from raptor.cli import main

ROOT = Path(__file__).parents[1]
USES = {
    "transformers": ("hf", "phases hf/facebook/dinov2-small"),
    "datasets": ("hf", "phases scenes --data hf/beans:train"),
    "wandb": ("track", "distill scenes --track wandb"),
    "tensorboard": ("track", "distill scenes --track tensorboard"),
    "h5py": ("nyu", "probe scenes --task depth --data nyuv2:labelled.mat"),
    "gradio": ("explore", "explore scenes"),
    "onnx": ("export", "export scenes-k3 --to onnx"),
    "onnxruntime": ("export", "export scenes-k3 --to onnx"),
    "onnxscript": ("export", "export scenes-k3 --to onnx"),
    "torchao": ("export", "export scenes-k3 --weights int8"),
}
"""Package: its extra, and a command that needs it."""


def test_every_optional_package_is_tried() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    declared = {(name.partition(">")[0], extra) for extra in extras.keys() - {"docs", "test"} for name in extras[extra]}
    assert declared == {(package, extra) for package, (extra, _) in USES.items()}


@pytest.mark.parametrize("package", USES)
def test_a_missing_extra_gives_its_install_line(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    extra, line = USES[package]
    (tmp_path / "labelled.mat").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert f"pip install 'raptor-vit[{extra}]'" in error and error.count("\n") == 1
