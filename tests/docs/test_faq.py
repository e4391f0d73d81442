"""Every message that docs/faq.md quotes is what the program says, or in its source where it needs another machine."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from pages import ROOT, Block, fenced
from PIL import Image
from safetensors.numpy import save_file

from raptor.cli import main

BLOCKS = fenced("docs/faq.md", "console")
GAP = "…"


def name_of(block: Block) -> str:
    return block.code.splitlines()[0]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands name: images, an empty folder, a broken image, a file of foreign weights, a run."""
    path = tmp_path_factory.mktemp("faq")
    image = Image.fromarray(np.zeros((40, 40, 3), dtype=np.uint8))
    for folder in ("photos", "holiday", "empty"):
        (path / folder).mkdir()
    for number in range(8):
        image.save(path / "photos" / f"{number}.jpg")
        image.save(path / "holiday" / f"{number}.jpg")
    (path / "holiday" / "3.jpg").write_bytes(b"not an image")
    save_file({"x": np.zeros(3, dtype=np.float32)}, str(path / "other.safetensors"))
    small = "--budget 2steps --batch_size 2 --train_images 8 --num_images 4"
    run = [
        "distill",
        "scenes",
        "--data",
        "scenes",
        "--phases",
        "6",
        "6",
        "--out",
        str(path / "runs/faq"),
        *small.split(),
    ]
    assert main(run) == 0
    moved = shutil.copytree(path / "runs/faq", path / "runs/moved")
    config = (moved / "config.yaml").read_text()
    (moved / "config.yaml").write_text(config.replace("data: scenes", "data: photos"))
    return path


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.is_run], ids=name_of)
def test_the_command_says_so(
    block: Block, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(desk)
    typed, *said = block.code.strip().splitlines()
    assert main(shlex.split(typed)[2:]) == 2
    pattern = ".*".join(re.escape(part) for part in " ".join(said).split(GAP))
    assert re.fullmatch(pattern, capsys.readouterr().err.strip()), said


@cache
def templates() -> list[str]:
    """Every text in raptor's source; what an f-string fills in is a gap."""
    found = []
    for path in (ROOT / "raptor").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (str(p.value) if isinstance(p, ast.Constant) else GAP for p in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def matches(quoted: str, template: str) -> bool:
    """Whether a quoted message can come from a template: both have gaps."""
    pieces = [re.escape(piece) for piece in template.split(GAP)]
    return len(template.replace(GAP, "").split()) > 2 and re.search(".*".join(pieces), quoted) is not None


@pytest.mark.parametrize("block", [b for b in BLOCKS if not b.is_run], ids=name_of)
def test_the_message_is_in_the_source(block: Block) -> None:
    quoted = block.code.strip().splitlines()[-1]
    assert any(matches(quoted, template) for template in templates()), quoted


def test_the_search_would_miss_another_wording() -> None:
    assert not any(matches("the GPU has no more memory: lower the batch (…)", template) for template in templates())


def test_the_page_quotes_many() -> None:
    assert len(BLOCKS) >= 15
