"""Bytes of image files, on disk and inside archives."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from tiny_images import encoded, pixels, same

from raptor.data.archives import zip_files
from raptor.data.image_file import ArchivedFile, DiskFile, open_image


def test_a_file_is_the_same_on_disk_and_in_a_zip(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(encoded(1))
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tmp_path / "1.png", "a/1.png")
    for file in (DiskFile(tmp_path / "1.png"), zip_files(str(tmp_path / "x.zip"))["a/1.png"]):
        assert file.num_bytes == len(encoded(1)) and same(open_image(file.read()), pixels(1))


def test_what_lies_beyond_the_archive_or_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(bytes(10))
    with pytest.raises(OSError, match=r"x\.tar ends inside the entry"):
        ArchivedFile(str(tmp_path / "x.tar"), 4, 8, 8).read()
    with pytest.raises(OSError, match="more than 1,073,741,824"):
        ArchivedFile(str(tmp_path / "x.tar"), 0, 2**40, 2**40).read()
    assert DiskFile(tmp_path / "gone.png").num_bytes == 0
