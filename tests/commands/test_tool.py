"""The results of the four tools: one image is refused, and each says where its files are."""

from __future__ import annotations

from pathlib import Path

import pytest

from raptor.commands.tool import open_tool
from raptor.config import EditConfig
from raptor.recurrence.edit import EditFile


def test_one_image_gives_no_shares(tmp_path: Path) -> None:
    config = EditConfig("scenes-k3", num_images=1, device="cpu", out=str(tmp_path))
    with pytest.raises(ValueError, match="scenes has one image, and shares of images are measured: give at least two"):
        open_tool(config, EditFile)
