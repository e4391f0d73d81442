"""`raptor.vit.stated`: what a model says about itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raptor.vit.stated import check_size, processor_settings, split_revision


def test_a_revision_stands_after_the_name_of_a_repository(tmp_path: Path) -> None:
    assert split_revision("me/vit@v1") == ("me/vit", "v1")
    assert split_revision("me/vit") == ("me/vit", None)
    folder = tmp_path / "a@b"
    folder.mkdir()
    assert split_revision(str(folder)) == (str(folder), None)


def test_settings_of_an_image_processor(tmp_path: Path) -> None:
    assert processor_settings(str(tmp_path)) == ({}, None)
    older, whole = tmp_path / "preprocessor_config.json", tmp_path / "processor_config.json"
    older.write_text('{"image_mean": 0.1}')
    whole.write_text('{"processor_class": "CLIPProcessor"}')  # without an entry for images
    assert processor_settings(str(tmp_path)) == ({"image_mean": 0.1}, older)
    whole.write_text(json.dumps({"image_processor": {"image_mean": 0.2}}))
    assert processor_settings(str(tmp_path)) == ({"image_mean": 0.2}, whole)


@pytest.mark.parametrize("size", [0, -3, 5000, 1.5])
def test_impossible_sizes(size: int) -> None:
    with pytest.raises(ValueError, match="are not possible"):
        check_size(size)
