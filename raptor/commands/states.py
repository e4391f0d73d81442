"""raptor states: features of every image, per layer and token group, streamed to disk."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from raptor.commands.job import Job
from raptor.config import StatesConfig
from raptor.data import ChosenData, ImageData
from raptor.devices import Ranks
from raptor.files import WriteError, read_json, sync
from raptor.provenance import Provenance, command
from raptor.run import ResultFile
from raptor.streaming import Result
from raptor.subject import Subject
from raptor.vit.parts import Parts, recording_parts
from raptor.vit.trajectory import NonFiniteStates, Trajectories
from raptor.vit.view import ModelFacts, ViT

_COPIED_ROWS = 1024


@dataclass
class StatesFile(ResultFile):
    """states.json: what the feature files hold.

    Attributes:
        arrays: name (`layer3.cls`, or `layer3.attn_out.cls` for a part of block 3) -> file and shape; row i is image i
            of `names`.
        labels: class index per image, or None.
        bad_images: unreadable images, which were left out.
    """

    FILE: ClassVar[str] = "states.json"

    model: ModelFacts
    data: str
    split: str
    arrays: dict[str, tuple[str, list[int]]]
    names: list[str]
    labels: list[int] | None
    classes: list[str] | None
    bad_images: list[str] = field(default_factory=list)
    provenance: Provenance = field(default_factory=Provenance)
    subject: Subject | None = None


@dataclass
class States(Result):
    """The features that were saved, and their folder."""

    saved: StatesFile
    folder: Path

    def load(self, name: str) -> np.ndarray:
        """One array, such as `layer3.cls`, (N, D) or (N, tokens, D); mapped from disk, not read into memory."""
        if name not in self.saved.arrays:
            raise ValueError(f"no features {name!r}: choose from {', '.join(self.saved.arrays)}")
        return np.load(self.folder / self.saved.arrays[name][0], mmap_mode="r")

    def to_dict(self) -> dict[str, Any]:
        return {**self.saved.to_dict(), "folder": str(self.folder)}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per array."""
        return [{"name": name, "file": file, "shape": shape} for name, (file, shape) in self.saved.arrays.items()]

    def text(self) -> str:
        lines = [f"{self.saved.model.name}: features of {len(self.saved.names)} images of {self.saved.data}"]
        lines += [f"  {name:<20} {' x '.join(map(str, shape))}" for name, (_, shape) in self.saved.arrays.items()]
        bad = self.saved.bad_images
        if bad:
            lines.append(f"{len(bad)} unreadable images were left out: see bad_images in states.json")
        return "\n".join([*lines, f"written to {self.folder}; names and labels are in states.json"])


@command(StatesConfig)
def states(config: StatesConfig) -> States:
    """Save features of every image, per layer and token group, without holding them in memory."""
    job = Job(config)
    ranks = job.ranks
    _check_one_machine(ranks)
    vit = job.open_studied(config.model)
    # Before images are opened: a layer that is not there is told at once.
    features = _choose_features(vit, config)
    job.about_models("states", config.model, None, vit)
    folder = job.folder
    chosen, images = _choose_images(vit, job.source, config)
    job.judge(images, StatesFile.FILE)
    shapes = {feature.name: [len(images), *feature.shape] for feature in features}
    # Rank 0 makes the files in full length. Each rank then maps them and writes rows of its own, without a lock.
    ranks.first(lambda: _make_files(folder, shapes))
    arrays = _open_files(folder, shapes)
    batches = job.stream(images)
    rows: dict[int, int] = {}  # of the arrays, and the image of each
    layers = {feature.layer for feature in features if feature.part}
    with recording_parts(vit.blocks, vit.name, config.parts or (), layers) as inside:
        for found, _, batch in Trajectories(vit, batches, job.precision, f"features of {vit.name}"):
            assert batch.places is not None
            # Unreadable images leave gaps, so each row remembers its image.
            rows |= zip(batch.places, batch.indices.tolist())
            for feature in features:
                values = feature.read(found, inside, config.pool)
                _check_finite(values, images.names, batch.indices, vit, feature.layer)
                arrays[feature.name][batch.places.start : batch.places.stop] = values
    for array in arrays.values():
        array.flush()
    # Ranks have whole batches in turn: sorting brings back the order of the images.
    rows = dict(sorted(pair for pairs in ranks.gather(rows) for pair in pairs.items()))
    kept, places = list(rows.values()), list(rows)
    if len(kept) < len(images):
        shapes = {name: [len(kept), *shape[1:]] for name, shape in shapes.items()}
        ranks.first(lambda: _keep_rows(folder, arrays, places, shapes))
    ranks.first(lambda: _put_in_place(folder, shapes))
    saved = StatesFile(
        model=vit.facts(),
        data=chosen.name,
        split=chosen.split,
        arrays={name: (f"{name}.npy", shape) for name, shape in shapes.items()},
        names=[images.names[i] for i in kept],
        labels=None if images.labels is None else [int(images.labels[i]) for i in kept],
        classes=images.classes,
        bad_images=batches.bad_images(),
        provenance=job.provenance(),
        subject=job.subject,
    )
    ranks.first(lambda: saved.write(folder))
    return States(saved, folder)


def _check_one_machine(ranks: Ranks) -> None:
    """Ranks write their rows into the same mapped files, which machines that share a disk cannot do."""
    hosts = sorted(set(ranks.gather(socket.gethostname())))
    if len(hosts) > 1:
        raise ValueError(
            f"raptor states writes from one machine, not from {', '.join(hosts)}: use torchrun --standalone, or give "
            "each machine other --layers and another --out"
        )


def _choose_images(vit: ViT, model: Any, config: StatesConfig) -> tuple[ChosenData, ImageData]:
    """The images whose features are saved, and what they were chosen by."""
    split = "val" if config.val is not None and config.split == "all" else config.split
    chosen = ChosenData.of(model, {**vars(config), "split": split}, vit.classes, vit.num_classes)
    if split in ("train", "all"):  # of the data, whatever else a run was judged on
        chosen = replace(chosen, val=None)
    return chosen, chosen.judged(config.num_images, vit.preprocess.size)


@dataclass(frozen=True)
class _Feature:
    """One array: the state at a layer or a part of the block before it, at the tokens of a group.

    shape: of one image.
    """

    layer: int
    part: str
    group: str
    where: slice
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        part = f".{self.part}" if self.part else ""
        return f"layer{self.layer}{part}.{self.group}"

    def read(self, states: Sequence[Tensor], inside: Parts, pool: bool) -> np.ndarray:
        """The feature of a batch of images, (B, *shape)."""
        x = states[self.layer]
        if self.part:
            x = getattr(inside, self.part)[self.layer]
        # The tokens are the second last axis: those that attend, of an attention pattern (B, heads, T, T).
        x = x[..., self.where, :].float()
        if pool:
            x = x.mean(-2)
        return x.cpu().numpy()


def _choose_features(vit: ViT, config: StatesConfig) -> list[_Feature]:
    """The arrays that are saved: of every layer its state and the parts of the block before it, by token group."""
    layers = [vit.num_layers]
    if config.layers is not None:
        layers = sorted(set(config.layers))
    if not layers or any(not 0 <= layer <= vit.num_layers for layer in layers):
        given = " ".join(map(str, config.layers or []))
        raise ValueError(f"--layers must be from 0 to {vit.num_layers}, got {given}")
    parts = list(dict.fromkeys(config.parts or ()))
    if parts and layers == [0]:
        raise ValueError("layer 0 comes before the blocks and has no parts: give other --layers, or leave out --parts")
    num_heads = _count_heads(vit, parts, layers)
    features = []
    for layer in layers:
        for part in ["", *parts]:
            if part and layer == 0:
                continue
            for group, where in vit.groups.present():
                shape = [where.stop - where.start, vit.dim]
                if part == "attn":
                    shape = [num_heads[layer], where.stop - where.start, vit.groups.num_tokens]
                if config.pool:
                    del shape[-2]
                features.append(_Feature(layer, part, group, where, tuple(shape)))
    return features


def _count_heads(vit: ViT, parts: Sequence[str], layers: Sequence[int]) -> dict[int, int]:
    """Attention heads of the blocks `layers`. One image tells, and also whether the parts can be read at all."""
    size = vit.preprocess.size
    # Nothing runs where nobody asked for parts: a hook of the user's own may need a whole batch.
    if not parts:
        return {}
    with torch.no_grad():
        _, _, inside = vit.record(torch.zeros(1, 3, size, size, device=vit.device), parts, layers)
    return {layer: pattern.shape[1] for layer, pattern in inside.attn.items()}


def _check_finite(features: np.ndarray, names: Sequence[str], indices_b: Tensor, vit: ViT, layer: int) -> None:
    """Raise for features (B, ...) of the images `indices_b` that are not finite, naming the first such image."""
    bad = np.flatnonzero(~np.isfinite(features.reshape(len(features), -1)).all(1))
    if len(bad):
        raise NonFiniteStates.of(vit.name, f"at layer {layer} for {names[int(indices_b[bad[0]])]}")


def _keep_rows(
    folder: Path, arrays: Mapping[str, np.memmap], places: Sequence[int], shapes: Mapping[str, Sequence[int]]
) -> None:
    """Write the files again with only the rows `places`: unreadable images leave no gaps."""
    partial = folder / ".shorter"
    _make_files(partial, shapes)
    for name, array in _open_files(partial, shapes).items():
        for start in range(0, len(array), _COPIED_ROWS):
            array[start : start + _COPIED_ROWS] = arrays[name][places[start : start + _COPIED_ROWS]]
        array.flush()
        os.replace(partial / f"{name}.npy.tmp", folder / f"{name}.npy.tmp")
    partial.rmdir()


def _make_files(folder: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Files for float32 arrays of these shapes; until all are whole their names end in `.tmp`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, shape in shapes.items():
        path = folder / f"{name}.npy.tmp"
        np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=tuple(shape))
        _reserve(path, path.stat().st_size)


def _open_files(folder: Path, names: Iterable[str]) -> dict[str, np.memmap]:
    return {name: np.lib.format.open_memmap(folder / f"{name}.npy.tmp", mode="r+") for name in names}


def _reserve(path: Path, num_bytes: int) -> None:
    """Give a file its disk space now: a mapped file that meets a full disk later ends the process with a bus error."""
    try:
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        path.unlink()
        raise WriteError(path, error.strerror or "no space") from None


# A states.json may have been edited: only files that are called as this command calls them are ever deleted.
_OWN_FILE = re.compile(r"layer\d+(\.\w+){1,2}\.npy")


def _put_in_place(folder: Path, names: Iterable[str]) -> None:
    """Whole arrays take the place of all that an earlier states.json describes."""
    try:
        earlier = {str(file) for file, _ in read_json(folder / StatesFile.FILE)["arrays"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # a damaged one describes none
        earlier = set()
    # Removed first: an interruption must not leave it beside arrays that it does not describe.
    (folder / StatesFile.FILE).unlink(missing_ok=True)
    for file in earlier:
        if _OWN_FILE.fullmatch(file):
            (folder / file).unlink(missing_ok=True)
    for name in names:
        sync(folder / f"{name}.npy.tmp")
        os.replace(folder / f"{name}.npy.tmp", folder / f"{name}.npy")
