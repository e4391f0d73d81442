"""The fingerprints that a run keeps of its images, and the check that images to judge on were not trained on."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from raptor.data.images import NUM_SIZES, ImageData
from raptor.data.split import choose_sample

Described = dict[str, dict[str, Any]]
"""Number and fingerprint of images, by part: train and val."""
_NUM_COMPARED = 128  # judged images that are compared with those trained on
_MAX_READ = 2048  # training files of the same sizes that are read for it
_MAX_DECODED = 384  # training images whose pixels are compared
_LOOK_SIDE = 64  # of images that are only looked at
_SIDE = 8  # of the pictures whose colours are compared
_DETAIL_SIDE = 32  # of the pictures whose details are compared: two X-rays have one outline and other details
_MAX_DIFFERENCE = 6.0  # of colours, mean over 0..255: a JPEG of quality 50 differs by 1, one of a thumbnail by 4
_MIN_CORRELATION = 0.7  # of details: at least .77 for a JPEG of quality 50, at most .74 for two frames of one room
_MIN_DEVIATION = 4.0  # of colours: all flat pictures look alike


def describe_images(train: ImageData, val: ImageData) -> Described:
    """The number and the fingerprint of a run's images, to notice when they change."""
    described = {}
    for part, data in (("train", train), ("val", val)):
        described[part] = {"num_images": len(data), "fingerprint": data.fingerprint()}
    return described


def check_apart(train: ImageData, judged: ImageData, role: str = "training images", remedy: str | None = None) -> None:
    """Raise if half of the judged images, or more, are among those trained on; if there are fewer, say so.

    role, remedy: what the first images are for, and what to do, where it is not training.

    A sample of the judged images is looked for: by name if both are drawn; as files, byte for byte, among those of the
    same size; and by their looks, so that a copy that was resized or saved in another format is found too.
    """
    rows = choose_sample(judged.keys, _NUM_COMPARED)
    is_one_set = set(judged.specs) <= set(train.specs)
    pairs: dict[int, str] = {}  # the training image's name by the judged image's index
    if is_one_set and not any(_size(judged, row) for row in rows):
        names = set(train.names)
        for row in rows:
            name = judged.names[row]
            if name in names or f"{judged.name}: {name}" in names:
                pairs[row] = name
        num_copies = float(len(pairs))
    else:
        keys = {judged.keys[row] for row in rows}
        same_keys = [index for index, key in enumerate(train.keys) if key in keys]
        pairs = _same_files(train, judged, rows, same_keys)
        num_copies = float(len(pairs))
        # Two splits of one set are searched for copies of files only: decoding images would delay every command.
        if not is_one_set:
            others = [row for row in rows if row not in pairs]
            looks = _looks(judged, others)
            pairs |= _alike(looks, _looks(train, same_keys[:_MAX_DECODED]), train)
            num_copies = float(len(pairs))
            sample = choose_sample(train.keys, _MAX_DECODED)
            pairs = _alike(looks, _looks(train, sample), train) | pairs
            # Only a sample of the training images was decoded, so each match stands for several.
            num_copies += (len(pairs) - num_copies) * len(train) / len(sample)
    if not pairs:
        return
    row, name = min(pairs.items())
    example = " and ".join(dict.fromkeys([judged.names[row], name]))
    found = (
        f"{len(pairs)} of {len(rows)} images of {judged.name} that were compared are also in the {role} "
        f"of {train.name} (such as {example})"
    )
    if 2 * num_copies < len(rows):
        print(found, file=sys.stderr)
        return
    if remedy is None and is_one_set:
        remedy = "remove the copies, or judge on others with --val"
    elif remedy is None:
        remedy = "judge on others with --val, or leave it out for held-out ones"
    raise ValueError(f"{found}: {remedy}")


def _size(data: ImageData, index: int) -> int:
    """The size of the file of an image; 0 if it is not a file."""
    file = data.file(int(data.positions[index]))
    return 0 if file is None else file.num_bytes


def _same_files(train: ImageData, judged: ImageData, rows: list[int], same_keys: list[int]) -> dict[int, str]:
    """Which judged files are training files, among all of the same name and a sample of 10,000 others."""
    sizes = {}
    for row in rows:
        size = _size(judged, row)
        if size:
            sizes[row] = size
    if not sizes:
        return {}
    # Only files of one size can be equal, so that few are read.
    looked_at = dict.fromkeys([*same_keys, *choose_sample(train.keys, NUM_SIZES)])
    wanted = set(sizes.values())
    of_one_size = [index for index in looked_at if _size(train, index) in wanted]
    name_of: dict[bytes, str] = {}
    for index in of_one_size[:_MAX_READ]:
        digest = _digest(train, index)
        if digest is not None:
            name_of.setdefault(digest, train.names[index])
    found = {}
    for row in sizes:
        digest = _digest(judged, row)
        if digest in name_of:
            found[row] = name_of[digest]
    return found


def _digest(data: ImageData, index: int) -> bytes | None:
    """A hash of the file of an image; None if it cannot be read."""
    file = data.file(int(data.positions[index]))
    assert file is not None
    try:
        return hashlib.blake2b(file.read(), digest_size=16).digest()
    except (OSError, ValueError):
        return None


_Looks = tuple[list[int], Tensor, Tensor]
"""Indices of images, without those that are flat or cannot be read; the pixels of a tiny picture of each, float32
(N, C); what a larger picture has beside the tiny one, float32 (N, D) of unit length."""


def _looks(data: ImageData, rows: list[int]) -> _Looks:
    """How images look, for comparing every one with every other."""
    indices = []
    colours = []
    details = []
    for row in rows:
        try:
            picture = data.load(row, _LOOK_SIDE).resize((_DETAIL_SIDE, _DETAIL_SIDE), Image.Resampling.BILINEAR)
        except (OSError, ValueError):
            continue
        tiny = picture.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)
        outline = tiny.resize(picture.size, Image.Resampling.BILINEAR)
        colour = np.asarray(tiny, dtype=np.float32).ravel()
        if colour.std() >= _MIN_DEVIATION:
            # What the larger picture has beside the tiny one: edges and texture, which two copies share.
            indices.append(row)
            colours.append(colour)
            details.append((np.asarray(picture, dtype=np.float32) - np.asarray(outline, dtype=np.float32)).ravel())
    if not indices:
        return [], torch.empty(0, 1), torch.empty(0, 1)
    details_nd = torch.from_numpy(np.stack(details))
    centred_nd = details_nd - details_nd.mean(dim=1, keepdim=True)
    return indices, torch.from_numpy(np.stack(colours)), torch.nn.functional.normalize(centred_nd, dim=1)


def _alike(judged: _Looks, others: _Looks, train: ImageData) -> dict[int, str]:
    """For each judged image that looks as a training image does, the name of that one."""
    rows, colours_nc, details_nd = judged
    indices, colours_mc, details_md = others
    if not rows or not indices:
        return {}
    difference_nm = torch.cdist(colours_nc, colours_mc, p=1) / colours_nc.shape[1]
    has_details_nm = details_nd @ details_md.mT >= _MIN_CORRELATION
    is_alike_nm = (difference_nm <= _MAX_DIFFERENCE) & has_details_nm
    found = {}
    for row, is_alike_m in zip(rows, is_alike_nm):
        if is_alike_m.any():
            found[row] = train.names[indices[int(is_alike_m.int().argmax())]]
    return found
