"""Experiment trackers, as extras: the numbers of metrics.jsonl sent on to wandb or tensorboard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

TRACKERS = ("wandb", "tensorboard")
Tracker = Callable[[Mapping[str, float], int], object]


def check_tracker(track: str | None) -> None:
    """Refuse a tracker that is unknown or not installed, before any work is done."""
    if track is not None and track not in TRACKERS:
        raise ValueError(f"unknown tracker {track!r}: choose from {', '.join(TRACKERS)}")
    if track is not None and find_spec(track) is None:
        raise ValueError(f"{track} is not installed: pip install 'raptor-vit[track]'")


def open_tracker(track: str | None, folder: Path) -> Tracker | None:
    """A function of (numbers, step) that logs them, or None."""
    check_tracker(track)
    if track == "wandb":
        import wandb

        run = wandb.init(project="raptor", dir=str(folder), name=folder.name)
        return lambda values, step: run.log(dict(values), step=step)
    if track == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard"))

        def add_scalars(values: Mapping[str, float], step: int) -> None:
            for key, value in values.items():
                writer.add_scalar(key, value, step)

        return add_scalars
    return None
