"""Small runs for tests of faults, and the faults: what a process does that is to be killed at a given moment."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from quick import blank_figures, short_run_times
from safetensors.torch import load_file
from tiny_run import tiny_teacher, write_recipe
from torch.utils.data import get_worker_info

from raptor.cli import main
from raptor.data import ImageData
from raptor.train import distill
from raptor.train.teacher import train_teacher


class Noise(ImageData):
    """Random pictures of three classes, each a function of its number.

    deadly: a file. While it is there, a process that decodes images for the training dies at its third picture.
    """

    def __init__(self, part: str, num_images: int, deadly: Path | None = None, cached: bool = True) -> None:
        labels = [i % 3 for i in range(num_images)]
        super().__init__("noise", [f"{part}/{i:02d}.png" for i in range(num_images)], labels, ["a", "b", "c"])
        self.part = part
        self.deadly = deadly
        self.cached = cached
        self.num_read = 0

    def read(self, position: int, side: int | None = None) -> Image.Image:
        self.num_read += 1
        if self.num_read == 3 and self.deadly is not None and self.deadly.exists() and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        rng = np.random.default_rng((len(self.part), position))
        return Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8))

    def worth_caching(self, device: torch.device) -> bool:
        return self.cached


def _distil(out: Path, deadly: Path | None = None, **options: Any) -> None:
    """Both stages on a teacher without a head, so that a ridge head is fitted and kept as well."""
    with TemporaryDirectory() as folder:  # not beside the run, whose disk may be full
        drawn = dict(mixup=0.4, cutmix=0.5, jitter=0.4, grey=0.2)
        training = dict(batch_size=4, budget="24steps", normalise="group", average_last=0.5)
        recipe = write_recipe(Path(folder), **training, **drawn)
        _distil_by(recipe, out, deadly, **options)


def _distil_by(recipe: str, out: Path, deadly: Path | None, **options: Any) -> None:
    teacher = tiny_teacher(embed_dim=16, num_classes=0)
    options = {"num_workers": 0, **options}
    cached = not options["num_workers"]
    data = Noise("train", 24, deadly, cached), Noise("val", 9)
    distill(teacher, data, recipe=recipe, phases=[2, 2], out=str(out), device="cpu", **options)


def _train(out: Path, **options: Any) -> None:
    shape = dict(size=24, patch=8, dim=16, depth=3, heads=2, registers=2, drop=0.3, mixup=0.2, cutmix=1.0)
    training = dict(budget="24steps", batch_size=4, num_workers=0, device="cpu", checkpoint_minutes=0)
    data = Noise("train", 24), Noise("val", 9)
    train_teacher("vit_tiny_patch16_224", data, out=str(out), **shape, **training, **options)


def _command(out: Path, words: list[str]) -> None:
    for save_time in (short_run_times, blank_figures):
        save_time(pytest.MonkeyPatch())
    code = main([*words, "--out", str(out)])
    if code:
        sys.exit(code)


RUNS: dict[str, Callable[..., None]] = {"distil": _distil, "teacher": _train, "command": _command}


def run(kind: str, out: Path, report: Path, fault: dict[str, Any] | None = None, **options: Any) -> None:
    """A run in a process of its own. What went wrong, in one line, is left in `report`.

    fault: `die_at`: kill -9 before this file operation under `out`; `torn`: the file that is written then is cut in
    half; `each`: see `_Operations`; `clock`: the seed of a clock that jumps by hours; `rank`: of two.
    """
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of the processes that decode images, as in a plain run
    fault = fault or {}
    if fault.get("clock") is not None:
        _jumping_clock(fault["clock"])
    if fault.get("rank") is not None:
        _become_rank(**fault["rank"])
    if "each" in fault or fault.get("die_at"):
        _Operations(out, fault.get("die_at", 0), fault.get("torn", False), fault.get("each"), report)
    try:
        RUNS[kind](out, **options)
    except ValueError as error:
        report.write_text(str(error))
        sys.exit(2)


class _Operations:
    """Counts what the process does to files under a folder, and kills it before a given one of these operations.

    look: a function of the folder that counts what is whole there. With it the process splits at its first operation:
        a copy is killed before the first one, the next copy before the second one, and so on, until a copy ends by
        itself. So the work before is done once. The number of kills and what `look` counted go into `report`.
    """

    EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")

    def __init__(self, folder: Path, die_at: int, torn: bool, look: Callable[[Path], int] | None, report: Path) -> None:
        self.folder = str(folder)
        self.die_at = die_at
        self.torn = torn
        self.look = look
        self.report = report
        self.count = 0
        self.fsync = os.fsync
        os.fsync = self._sync
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in self.EVENTS:
            self._next(str(args[0]))

    def _sync(self, number: int) -> None:
        self._next(os.readlink(f"/proc/self/fd/{number}"), synced=True)
        self.fsync(number)

    def _next(self, path: str, synced: bool = False) -> None:
        if not path.startswith(self.folder) or ".trial-" in path:  # a look whether the folder can be written
            return
        self.count += 1
        if self.look is not None and self.count == 1:
            self._split()
        if self.count != self.die_at:
            return
        if synced and self.torn and ".tmp" in path and os.path.isfile(path):  # what was never synced may be lost
            with open(path, "r+b") as file:
                file.truncate(os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    def _split(self) -> None:
        look = self.look
        self.look = None
        assert look is not None
        counts = {"kills": 0, "artefacts checked": 0, "lost or damaged": 0}
        for number in itertools.count(1):
            copy = os.fork()
            if copy == 0:
                self.die_at = number
                self.torn = number % 2 == 0
                return
            code = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
            counts["kills"] += code == -signal.SIGKILL
            try:
                counts["artefacts checked"] += look(Path(self.folder))
            except Exception as error:
                counts["lost or damaged"] += 1
                print(f"killed before operation {number}: {error!r}", file=sys.stderr)
            if code != -signal.SIGKILL:
                self.report.write_text(json.dumps(counts))
                os._exit(code)


def _jumping_clock(seed: int) -> None:
    """From now on `time.time` jumps by up to a day, forwards and backwards."""
    draw = random.Random(seed)
    now = time.time
    time.time = lambda: now() + draw.uniform(-86_400, 86_400)  # type: ignore[assignment]


def _become_rank(rank: int, port: int) -> None:
    """What torchrun tells a process of two."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "faults"}
    os.environ.update({name: str(value) for name, value in place.items()})


def write_json_often(path: Path, number: int) -> None:
    """Write one file again and again, as two commands do that work in one folder."""
    from raptor.files import write_text

    for _ in range(60):
        write_text(path, json.dumps({"writer": number, "long": [number] * 2000}))


def image_folder(root: Path) -> Path:
    """A folder of tiny pictures, for commands that take their data by name."""
    for part, name, i in _places():
        path = root / part / name / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng((len(part), len(name), i))
        Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)).save(path)
    return root


def _places() -> Iterator[tuple[str, str, int]]:
    return ((part, name, i) for part in ("train", "val") for name in ("ant", "wasp", "cat_fish") for i in range(4))


def whole_results(out: Path) -> dict[str, bytes]:
    """Every result under a folder by its name, after a look that it is whole."""
    found = {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.suffix != ".tmp" and path.is_file()}
    for path, data in found.items():
        if path.suffix == ".json":
            json.loads(data)
        elif path.suffix == ".safetensors":
            load_file(path)
        elif path.suffix == ".png":
            assert data.endswith(b"IEND\xaeB`\x82"), f"{path} is not whole"
        elif path.suffix == ".svg":
            assert data.rstrip().endswith(b"</svg>"), f"{path} is not whole"
    return {str(path.relative_to(out)): data for path, data in found.items()}


def count_whole(out: Path, old: frozenset[str]) -> int:
    """How many results are there and whole; raises where one of the `old` ones is not."""
    found = whole_results(out)
    assert old <= found.keys(), f"{', '.join(sorted(old - found.keys()))} lost"
    return len(found)
