"""Which images are held out: the data's own validation split, else 5 % by a hash of the file name.

What is hashed is an image's key (`split_keys`), which does not depend on how the data is addressed: the same image is
held out of `photos/`, of its parent folder, of its zip and of its tar shards.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

Split = str
"""`train`, `val` (held out), `all` (both), or the name of one of the data's own parts, such as `test`; `own` for data
that is only judged on: its validation part, or all of it without one."""
TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("val", "validation", "valid", "test", "testing")
_HELD_OUT_SHARE = 0.05
_CHOICE_SHARE = 0.1


def is_train(part: str | None) -> bool:
    """Whether images of this part of the data are trained on; those of data without parts (None) are."""
    return part is None or part.lower() in TRAIN_NAMES


def is_split_name(word: str) -> bool:
    """Whether a folder or a word names a split."""
    return word.lower() in TRAIN_NAMES + VAL_NAMES


def split_word(path: str) -> str | None:
    """The split that a file name has as a word (`imagenet-val-0003.tar`), or that its folder is called, or None."""
    folder, _, name = path.rpartition("/")
    # Digits separate words too: `val0003.tar` is a shard of `val`.
    words = [*re.split(r"[^A-Za-z]+", name), folder.rpartition("/")[2]]
    return next((word.lower() for word in words if is_split_name(word)), None)


def split_keys(paths: Iterable[str]) -> list[str]:
    """The key of each image: its file name without suffix, with its folder if several images have that name."""
    stems = []
    folders = []
    for path in paths:
        # One letter with an accent has two spellings in Unicode, and file systems differ in which one they keep.
        folder, _, name = unicodedata.normalize("NFC", path).rpartition("/")
        stem, dot, suffix = name.rpartition(".")
        # `v1.0` has no suffix: a zip or a tar of the same files may leave the real one out.
        has_suffix = dot and stem and suffix.isalnum() and not suffix.isdigit()
        if not has_suffix:
            stem = name
        stems.append(stem)
        folders.append(folder.rpartition("/")[2])
    count = Counter(stems)
    keys = []
    for folder, stem in zip(folders, stems):
        key = stem
        if folder and count[stem] > 1:
            key = f"{folder}/{stem}"
        keys.append(key)
    return keys


def name_share(name: str) -> float:
    """A stable number in [0, 1) for a name; a leading split folder does not count."""
    head, _, tail = name.partition("/")
    if tail and is_split_name(head):
        name = tail
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    # 53 bits, which a float holds exactly, so that no share is rounded to 1.
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def _name_shares(keys: Sequence[str], salt: str = "") -> np.ndarray:
    """`name_share(salt + key)` of each key, (N,). Choices with another salt are independent of each other."""
    return np.fromiter((name_share(salt + key) for key in keys), np.float64, len(keys))


def own_validation(parts: Iterable[str | None]) -> str | None:
    """The data's own validation part: the first of val, validation, valid, test that it has."""
    present = {str(part).lower() for part in set(parts)}
    return next((name for name in VAL_NAMES if name in present), None)


def part_read(split: Split, parts: Iterable[str | None]) -> Split:
    """The part that a split means, where it is `own`."""
    if split != "own":
        return split
    return "all" if own_validation(parts) is None else "val"


def choose_split(keys: Sequence[str], parts: Sequence[str | None], split: Split, source: str) -> list[int]:
    """The indices of one split.

    Args:
        parts: the data's own split of each image (None: the data has none).
        split: as in `Split`.
        source: the name of the data, for messages.
    """
    present = set(parts)

    def rows_of(is_wanted: Callable[[str | None], bool]) -> np.ndarray:
        chosen = set(filter(is_wanted, present))
        return np.flatnonzero(np.fromiter(map(chosen.__contains__, parts), bool, len(parts)))

    validation = own_validation(present)
    wanted = part_read(split, present).lower()
    accepted = {"train": None, "val": None, "all": None}
    accepted |= dict.fromkeys(sorted(part.lower() for part in present if part))
    if wanted not in accepted:
        raise ValueError(f"unknown split {split!r} of {source}; use {', '.join(accepted)}")
    if wanted not in ("train", "val", "all"):
        return rows_of(lambda part: part is not None and part.lower() == wanted).tolist()
    train = rows_of(is_train)
    if validation is not None:
        held_out = rows_of(lambda part: part is not None and part.lower() == validation)
    else:
        # By the name and not by chance, so that a set that grows keeps its held-out images held out.
        shares = _name_shares(keys)[train]
        is_held_out = shares < _HELD_OUT_SHARE
        if len(train) and not is_held_out.any():
            is_held_out[shares.argmin()] = True
        held_out = train[is_held_out]
        train = train[~is_held_out]
    chosen = {"train": train, "val": held_out, "all": np.sort(np.concatenate([train, held_out]))}[wanted]
    if not len(chosen):
        remedy = ""
        if wanted == "train" and len(held_out):
            remedy = f", or give it with --val to judge on it only ({len(held_out)} images)"
        raise ValueError(f"{source} has no {split} images; add them or choose another split{remedy}")
    return chosen.tolist()


def choose_sample(keys: Sequence[str], limit: int) -> list[int]:
    """`limit` indices spread over the data by the keys' hash, in order; a larger limit contains a smaller one."""
    if limit < 1:
        raise ValueError(f"the number of images must be at least 1; got {limit}")
    if limit >= len(keys):
        return list(range(len(keys)))
    # Not the hash that held images out: a sample of those would be the same few. Stable, so that two images of one
    # key, as of joined sets, keep their order.
    order = np.argsort(_name_shares(keys, "sample:"), kind="stable")
    return np.sort(order[:limit]).tolist()


def choice_split(keys: Sequence[str]) -> tuple[list[int], list[int]]:
    """Indices of the training images to fit on and of a tenth of them, by a hash of the key, to choose on."""
    if len(keys) < 2:
        raise ValueError(f"a probe needs at least two training images; got {len(keys)}")
    # By a hash of its own: the images with the smallest shares may be held out already.
    shares = _name_shares(keys, "probe:")
    held = shares < _CHOICE_SHARE
    if not held.any():
        held[shares.argmin()] = True
    if held.all():  # of two images, one is fitted on
        held[1:] = False
    return np.flatnonzero(~held).tolist(), np.flatnonzero(held).tolist()
