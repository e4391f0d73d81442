"""raptor probe: frames of the dense tasks take any size, whatever the model's patches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from raptor.commands.probe import probe
from raptor.open import open_pair

SMALL = dict(lrs=[1e-2], limit=12, val_images=6, epochs=1, batch_size=4, device="cpu")


def test_frames_of_any_size_are_padded(tmp_path: Path) -> None:
    # The built-in teacher has patches of 8 pixels: 30 is no multiple of it.
    done = probe("scenes", task="depth", size=30, out=str(tmp_path), **SMALL)
    assert done.results["teacher"].score > 0
    assert (tmp_path / "probe-depth.json").is_file()
    with pytest.raises(ValueError):
        probe("scenes", task="classify", size=30, out=str(tmp_path), **SMALL)


def test_the_default_folder_and_the_structure_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = {}

    def opened(source, **options):
        seen.update(options)
        return open_pair("scenes")

    monkeypatch.setattr(sys.modules["raptor.commands.probe"], "open_pair", opened)
    done = probe("timm/some model", size=48, blocks="b", norm="n", cls=1, registers=2, **SMALL)
    assert done.folder == Path("runs/probe-timm_some_model")
    assert [seen[k] for k in ("blocks", "norm", "cls", "registers", "size")] == ["b", "n", 1, 2, 48]
