"""What a run remembers of its images, and the check that it does not judge on the images it trains on."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from raptor.data.images import NUM_SIZES, Items
from raptor.data.split import choose_sample

Described = dict[str, dict[str, Any]]
"""Number and fingerprint of images, by part: train and val."""
_NUM_COMPARED = 128  # judged images that are compared with those trained on
_MAX_READ = 2048  # training files of the same sizes that are read for it
_MAX_DECODED = 384  # training images whose pixels are compared
_SIDE = 8  # of the pictures whose colours are compared
_DETAIL_SIDE = 32  # of those whose details are: two X-rays have the same outline and other details
_MAX_DIFFERENCE = 6.0  # of colours, mean over 0..255: a JPEG of quality 50 differs by 1, one of a thumbnail by 4
_MIN_CORRELATION = 0.7  # of details: at least .77 for a JPEG of quality 50, at most .74 for two frames of one room
_MIN_DEVIATION = 4.0  # of colours: all flat pictures look alike


def describe_images(train: Items, val: Items) -> Described:
    """What a run remembers of its images, to notice when they change."""
    return {
        part: {"num_images": len(data), "fingerprint": data.fingerprint()}
        for part, data in (("train", train), ("val", val))
    }


def changed_images(saved: Mapping[str, Any], found: Described) -> list[str]:
    """The parts of what was remembered that differ from what is found, each as `train: 96 (0a1b2c3d) -> 97 (…)`."""
    changed = []
    for part, old in saved.items():
        new = found.get(part)
        if new is not None and old != new:
            changed.append(f"{part}: {_count_text(old)} -> {_count_text(new)}")
    return changed


def _count_text(of: Mapping[str, Any]) -> str:
    return f"{of['num_images']} ({of['fingerprint'][:8]})"


@dataclass
class _Matches:
    """Judged images that are training images.

    Attributes:
        pairs: the training image's name by the judged image's index.
        estimate: how many there are by an estimate, where only a sample of the training images was looked at.
    """

    pairs: dict[int, str] = field(default_factory=dict)
    estimate: float = 0.0

    def add(self, pairs: Mapping[int, str], share_looked_at: float = 1.0) -> None:
        new = {row: name for row, name in pairs.items() if row not in self.pairs}
        self.pairs |= new
        self.estimate += len(new) / share_looked_at


def check_apart(train: Items, judged: Items) -> None:
    """Raise if half of the judged images, or more, are among those trained on; if there are fewer, say so.

    A sample of the judged images is looked for: by name if both are drawn; as files, byte for byte, among those of the
    same size; and by their looks, so that a copy that was resized or saved in another format is found too.
    """
    rows = choose_sample(judged.keys, _NUM_COMPARED)
    matches = _Matches()
    is_one_set = set(_names_of_sets(judged)) <= set(_names_of_sets(train))
    if is_one_set and not any(_size(judged, row) for row in rows):
        names = set(train.names)
        same = [row for row in rows if judged.names[row] in names or f"{judged.name}: {judged.names[row]}" in names]
        matches.add({row: judged.names[row] for row in same})
    else:
        keys = {judged.keys[row] for row in rows}
        same_keys = [index for index, key in enumerate(train.keys) if key in keys]
        matches.add(_same_files(train, judged, rows, same_keys))
        left = [row for row in rows if row not in matches.pairs]
        # Two splits of one set are searched for copies of files only: decoding images would delay every command.
        if not is_one_set:
            _add_lookalikes(train, judged, left, same_keys, matches)
    if not matches.pairs:
        return
    row, name = min(matches.pairs.items())
    pair = " and ".join(dict.fromkeys([judged.names[row], name]))
    found = (
        f"{len(matches.pairs)} of {len(rows)} images of {judged.name} that were compared are also in the training "
        f"images of {train.name} (such as {pair})"
    )
    if 2 * matches.estimate >= len(rows):
        own = "remove the copies, or judge on others with --val"
        other = "judge on others with --val, or leave it out for held-out ones"
        raise ValueError(f"{found}: {own if is_one_set else other}")
    print(found, file=sys.stderr)


def _names_of_sets(data: Items) -> Sequence[str]:
    return getattr(data, "specs", [data.name])


def _size(data: Items, index: int) -> int:
    return data.num_bytes(int(data.positions[index]))


def _same_files(train: Items, judged: Items, rows: list[int], same_keys: list[int]) -> dict[int, str]:
    """Which judged files are training files, among all of the same name and a sample of 10,000 others."""
    size_of = {row: _size(judged, row) for row in rows}
    sizes = set(size_of.values()) - {0}
    if not sizes:
        return {}
    looked_at = dict.fromkeys([*same_keys, *choose_sample(train.keys, NUM_SIZES)])
    alike = [index for index in looked_at if _size(train, index) in sizes]
    name_of: dict[bytes | None, str] = {}
    for index in alike[:_MAX_READ]:
        name_of.setdefault(_digest(train, index), train.names[index])
    name_of.pop(None, None)  # a file that cannot be read
    found = {}
    for row in rows:
        name = name_of.get(_digest(judged, row)) if size_of[row] else None
        if name is not None:
            found[row] = name
    return found


def _digest(data: Items, index: int) -> bytes | None:
    try:
        content = data.content(int(data.positions[index]))
    except (OSError, ValueError):
        return None
    return hashlib.blake2b(content, digest_size=16).digest()


def _add_lookalikes(train: Items, judged: Items, rows: list[int], same_keys: list[int], matches: _Matches) -> None:
    """Add judged images that look as a training image does, of the same name or of a sample."""
    own = _looks(judged, rows)
    matches.add(_alike(own, _looks(train, same_keys[:_MAX_DECODED]), train))
    others = choose_sample(train.keys, _MAX_DECODED)
    matches.add(_alike(own, _looks(train, others), train), len(others) / len(train))


@dataclass
class _Looks:
    """How images look, for comparing every one with every other.

    Attributes:
        indices: of the images, without those that are flat or cannot be read.
        colours_nc: float32, the pixels of a tiny picture of each.
        details_nd: float32, what a larger picture has beside the tiny one, of unit length.
    """

    indices: list[int]
    colours_nc: Tensor
    details_nd: Tensor


def _looks(data: Items, rows: list[int]) -> _Looks:
    indices = []
    colours = []
    details = []
    for row in rows:
        try:
            picture = data.picture(row).resize((_DETAIL_SIDE, _DETAIL_SIDE), Image.Resampling.BILINEAR)
        except (OSError, ValueError):
            continue
        tiny = picture.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)
        outline = tiny.resize(picture.size, Image.Resampling.BILINEAR)
        colour = np.asarray(tiny, dtype=np.float32).ravel()
        if colour.std() >= _MIN_DEVIATION:
            indices.append(row)
            colours.append(colour)
            details.append((np.asarray(picture, dtype=np.float32) - np.asarray(outline, dtype=np.float32)).ravel())
    if not indices:
        return _Looks([], torch.empty(0, 1), torch.empty(0, 1))
    details_nd = torch.from_numpy(np.stack(details))
    centred_nd = details_nd - details_nd.mean(dim=1, keepdim=True)
    return _Looks(indices, torch.from_numpy(np.stack(colours)), torch.nn.functional.normalize(centred_nd, dim=1))


def _alike(own: _Looks, others: _Looks, train: Items) -> dict[int, str]:
    """For each judged image that looks as a training image does, the name of that one."""
    if not own.indices or not others.indices:
        return {}
    difference_nm = torch.cdist(own.colours_nc, others.colours_nc, p=1) / own.colours_nc.shape[1]
    has_details_nm = own.details_nd @ others.details_nd.mT >= _MIN_CORRELATION
    is_alike_nm = (difference_nm <= _MAX_DIFFERENCE) & has_details_nm
    found = {}
    for row, is_alike_m in zip(own.indices, is_alike_nm):
        if is_alike_m.any():
            found[row] = train.names[others.indices[int(is_alike_m.int().argmax())]]
    return found
