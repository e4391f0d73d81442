"""Names of many images in two arrays: no Python object per image, so forked workers share them and copy nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

_CHUNK = 65536  # names that are decoded at once


class PackedNames(Sequence[str]):
    """A read-only sequence of strings.

    Attributes:
        text: uint8, the UTF-8 bytes of all names end to end.
        ends: int64 (M,), where each name ends in `text`.
        rows: int64 (N,), which of them this sequence holds, in its order; None for all.
    """

    def __init__(
        self,
        text: np.ndarray,
        ends: np.ndarray,
        rows: np.ndarray | None = None,
    ) -> None:
        self.text = text
        self.ends = ends
        self.rows = rows

    @classmethod
    def pack(cls, names: Iterable[str]) -> PackedNames:
        """Pack strings; already packed ones are given back as they are."""
        if isinstance(names, PackedNames):
            return names
        # Names of files may be any bytes: those that are not UTF-8 pass through as surrogates.
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        # Ends and not lengths, so that one name is found without adding up those before it.
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), np.cumsum(lengths, dtype=np.int64))

    def __len__(self) -> int:
        if self.rows is None:
            return len(self.ends)
        return len(self.rows)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        row = range(len(self))[index]  # checks the bounds, counts from the end
        if self.rows is not None:
            row = int(self.rows[row])
        start = 0
        if row:
            start = int(self.ends[row - 1])
        return self.text[start : int(self.ends[row])].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        rows = self.rows
        if rows is None:
            rows = np.arange(len(self.ends))
        # In pieces, because a million ends as Python numbers would take more memory than the names.
        for first in range(0, len(rows), _CHUNK):
            chunk = rows[first : first + _CHUNK]
            starts = np.where(chunk > 0, self.ends[chunk - 1], 0).tolist()
            for start, end in zip(starts, self.ends[chunk].tolist()):
                yield self.text[start:end].tobytes().decode("utf-8", "surrogateescape")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other))

    __hash__ = None  # type: ignore[assignment]

    def take(self, indices: Sequence[int] | np.ndarray) -> PackedNames:
        """The names at `indices`; the text is shared."""
        rows = np.asarray(indices, dtype=np.int64)
        if self.rows is not None:
            rows = self.rows[rows]
        return PackedNames(self.text, self.ends, rows)
