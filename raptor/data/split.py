"""Which images are held out: the data's own validation split, else 5 % by a hash of the file name.

What is hashed is an image's key (`split_keys`), which does not depend on how the data is addressed: the same image is
held out of `photos/`, of its parent folder, of its zip and of its tar shards.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from raptor.data.names import PackedNames

Split = str
"""`train`, `val` (held out), `all` (both), or the name of one of the data's own parts, such as `test`."""
TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("val", "validation", "valid", "test", "testing")
_HELD_OUT_SHARE = 0.05
_CHOICE_SHARE = 0.1
_SAMPLE = "sample:"  # a sample of held-out images must not be chosen by the hash that held them out


def is_train(part: str | None) -> bool:
    """Whether images of this part of the data are trained on; data without parts (None) is."""
    return part is None or part.lower() in TRAIN_NAMES


def is_split_name(word: str) -> bool:
    """Whether a folder or a word names a split."""
    return word.lower() in TRAIN_NAMES + VAL_NAMES


def split_word(path: str) -> str | None:
    """The split that a file name has as a word (`imagenet-val-0003.tar`), or that its folder is called, or None."""
    folder, _, name = path.rpartition("/")
    words = [*re.split(r"[^A-Za-z]+", name), folder.rpartition("/")[2]]
    return next((word.lower() for word in words if is_split_name(word)), None)


def split_keys(paths: Iterable[str]) -> list[str]:
    """The key of each image: its file name without suffix, with its folder where several images have that name."""
    stems, folders = [], []
    for path in paths:
        folder, _, name = unicodedata.normalize("NFC", path).rpartition("/")
        stem, dot, suffix = name.rpartition(".")
        stems.append(stem if dot and stem and suffix.isalnum() and not suffix.isdigit() else name)
        folders.append(folder.rpartition("/")[2])
    count = Counter(stems)
    return [f"{folder}/{stem}" if folder and count[stem] > 1 else stem for folder, stem in zip(folders, stems)]


def name_share(name: str) -> float:
    """A stable number in [0, 1) for a name; a leading split folder does not count."""
    head, _, tail = name.partition("/")
    key = tail if tail and is_split_name(head) else name
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def _name_shares(keys: Sequence[str], salt: str = "") -> np.ndarray:
    """`name_share(salt + key)` of each key, (N,); packed names may have them ready."""
    if isinstance(keys, PackedNames):
        return keys.column(f"share:{salt}", lambda key: name_share(salt + key))
    return np.array([name_share(salt + key) for key in keys], dtype=np.float64)


def keep_shares(keys: PackedNames) -> None:
    """Compute what splits and samples of these keys are chosen by, once."""
    for salt in ("", _SAMPLE):
        keys.keep_column(f"share:{salt}", lambda key, salt=salt: name_share(salt + key))  # type: ignore[misc]


def own_validation(parts: Sequence[str | None]) -> str | None:
    """The data's own validation part: the first of val, validation, valid, test that it has."""
    present = {part.lower() for part in parts if part is not None}
    return next((name for name in VAL_NAMES if name in present), None)


def choose_split(keys: Sequence[str], parts: Sequence[str | None], split: Split, source: str) -> list[int]:
    """The indices of one split. `parts` says which own split each image belongs to (None: the data has none)."""
    validation = own_validation(parts)
    if split == "own":  # of data that is only judged on
        split = "val" if validation is not None else "all"
    own = sorted({part.lower() for part in parts if part is not None})
    if split.lower() not in ("train", "val", "all", *own):
        others = "".join(f", {part}" for part in own if part not in ("train", "val"))
        raise ValueError(f"unknown split {split!r} of {source}; use train, val, all{others}")
    if split.lower() in own and split.lower() not in ("train", "val"):
        return [i for i, part in enumerate(parts) if part is not None and part.lower() == split.lower()]
    train = [i for i, part in enumerate(parts) if is_train(part)]
    if validation is not None:
        val = [i for i, part in enumerate(parts) if part is not None and part.lower() == validation]
    else:
        shares, rows = _name_shares(keys), np.array(train, dtype=np.int64)
        held_out = shares[rows] < _HELD_OUT_SHARE
        if len(rows) and not held_out.any():
            held_out[shares[rows].argmin()] = True
        val, train = rows[held_out].tolist(), rows[~held_out].tolist()
    chosen = {"train": train, "val": val, "all": sorted(train + val)}[split]
    if not chosen:
        remedy = f", or give it with --val to judge on it only ({len(val)} images)" if split == "train" and val else ""
        raise ValueError(f"{source} has no {split} images; add them or choose another split{remedy}")
    return chosen


def choose_sample(keys: Sequence[str], limit: int) -> list[int]:
    """`limit` indices spread over the data by the keys' hash, in order; a larger limit contains a smaller one."""
    if limit < 1:
        raise ValueError(f"the number of images must be at least 1; got {limit}")
    if limit >= len(keys):
        return list(range(len(keys)))
    order = np.argsort(_name_shares(keys, _SAMPLE), kind="stable")
    return np.sort(order[:limit]).tolist()


def choice_split(keys: Sequence[str]) -> tuple[list[int], list[int]]:
    """Indices of train to fit on and, a tenth by a hash of the key, to choose on."""
    if len(keys) < 2:
        raise ValueError(f"a probe needs at least two training images; got {len(keys)}")
    shares = _name_shares(keys, "probe:")
    held = shares < _CHOICE_SHARE
    if not held.any():
        held[shares.argmin()] = True
    if held.all():
        held[1:] = False
    return np.flatnonzero(~held).tolist(), np.flatnonzero(held).tolist()
