"""Image files, on disk or inside an archive: where their bytes are, and how they are decoded."""

from __future__ import annotations

import os
import re
import stat
import struct
import threading
import zipfile
import zlib
from functools import lru_cache
from io import BytesIO, FileIO
from pathlib import Path
from typing import NamedTuple

from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""The formats that are decoded, by Pillow's names. Others, such as EPS, make Pillow start another program."""
_MAX_FILE_BYTES = 1 << 30  # of one image file
_ZIP_LOCAL_HEADER = struct.Struct("<4s22xHH")
ZIP_START = b"PK\x03\x04"
_IN_TAR = -1  # in place of a zip's method of compression
_IN_MEMORY = re.compile(r"<_io\.BytesIO[^>]*>")  # Pillow names what it was given


class BadImage(ValueError):
    """An image that cannot be read; the message names it."""


class DiskFile(NamedTuple):
    """A file in a folder."""

    path: str | Path

    @property
    def num_bytes(self) -> int:
        """Its size; 0 if it is gone, such as a dead link, which is reported when the image is read."""
        try:
            return os.stat(self.path).st_size
        except OSError:
            return 0

    def read(self) -> bytes:
        """Its bytes; a pipe or a device, which might never end, is refused."""
        # Without O_NONBLOCK, opening a pipe would wait for somebody to write into it.
        with os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError("it is not a plain file")
            _check_file_size(status.st_size)
            return file.read()


class ArchivedFile(NamedTuple):
    """Where a file lies in an archive: `size` bytes at `offset`, `num_bytes` when they are unpacked.

    In a zip `offset` is that of the header before the file; `method` and `crc` are as its index has them.
    """

    archive: str
    offset: int
    size: int
    num_bytes: int
    method: int = _IN_TAR
    crc: int = 0

    def read(self) -> bytes:
        """The content; that of a zip is checked against its CRC."""
        _check_file_size(max(self.size, self.num_bytes))
        if self.method == _IN_TAR:
            return read_at(self.archive, self.offset, self.size)
        # Only this header says where the content begins: its extra field may be longer than the one in the index.
        header = read_at(self.archive, self.offset, _ZIP_LOCAL_HEADER.size)
        magic, name_size, extra_size = _ZIP_LOCAL_HEADER.unpack(header)
        if magic != ZIP_START:
            raise OSError(f"{self.archive} changed since it was opened")
        data = read_at(self.archive, self.offset + _ZIP_LOCAL_HEADER.size + name_size + extra_size, self.size)
        if self.method == zipfile.ZIP_DEFLATED:
            # Never more than the index says, because a small stream can unpack to more than fits in memory.
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, self.num_bytes + 1)
        if zlib.crc32(data) != self.crc:
            raise OSError("checksum mismatch")
        return data


File = DiskFile | ArchivedFile


def _check_file_size(num_bytes: int) -> None:
    if num_bytes > _MAX_FILE_BYTES:
        raise OSError(f"it has {num_bytes:,} bytes, more than {_MAX_FILE_BYTES:,}")


@lru_cache(maxsize=128)
def open_archive(path: str, process: int, thread: int) -> FileIO:
    """A handle that is kept open, one per process and thread, so that forked workers do not move each other's."""
    # Entries are read whole, and a buffer would read beyond them.
    return open(path, "rb", buffering=0)


def read_at(path: str, offset: int, size: int) -> bytes:
    """`size` bytes of an archive."""
    handle = open_archive(path, os.getpid(), threading.get_ident())
    handle.seek(offset)
    data = handle.read(size)
    if len(data) != size:
        raise OSError(f"{path} ends inside the entry")
    return data


def open_image(data: bytes, side: int | None = None) -> Image.Image:
    """Decode the bytes of an image file completely, if it has one of `FORMATS`.

    side: decode a JPEG at 1/2, 1/4 or 1/8 of its size as long as neither of its sides falls below this.
    """
    # A named list: Pillow would choose by the content, and start Ghostscript for EPS in a file called cat.jpg.
    image = Image.open(BytesIO(data), formats=FORMATS)
    if side is not None:
        image.draft(None, (side, side))  # other formats ignore it
    image.load()
    return image


def one_line(error: Exception) -> str:
    """What a decoder says of a file, in one line."""
    return _IN_MEMORY.sub("it", " ".join(str(error).split())) or type(error).__name__
