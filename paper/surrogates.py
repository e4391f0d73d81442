"""A teacher, its images, the phases of its layers, and a surrogate distilled from it: what most cells do."""

from __future__ import annotations

import json
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sweep import Json, SweepConfig

from raptor import (
    ChosenData,
    ErrorCurves,
    InMemory,
    Phases,
    Trajectories,
    ViT,
    block_parameters,
    check_cuts,
    distill,
    find_phases,
    fit_null_models,
    iterate,
    measure_similarity,
    open_vit,
    pick_device,
    pick_precision,
)

_SIMILARITY_IMAGES = 2048
_NULL_IMAGES = 1024  # images that the null models are fitted on, and as many held-out ones to measure them on
_SCORES = ("accuracy", "teacher_accuracy", "agreement", "probe", "teacher_probe", "recovery", "recovery_head")
# Options of a cell that `distill` takes, as far as the script has them.
_OF_TRAINING = ("recipe", "optimizer", "budget", "batch_size", "lr", "seed")
_CURVES = ("r2", "bounded_r2", "pearson", "cosine", "relative")
Pair = tuple[Any, Any]
"""Training images and held-out images."""


def precision_of(config: SweepConfig) -> str:
    return pick_precision("auto", pick_device(config.device))


def open_teacher(options: Json, config: SweepConfig) -> tuple[ViT, Pair]:
    """The teacher that the options of a cell name, and its images."""
    teacher = open_vit(
        options["model"],
        weights=options.get("weights"),
        size=options.get("size"),
        trust_hub=config.trust_hub,
        device=pick_device(config.device),
    )
    return teacher, load_pair(options, teacher.preprocess, config)


def load_pair(options: Json, preprocess: Any, config: SweepConfig) -> Pair:
    """The training and held-out images of a cell, by default decoded once and kept on the device."""
    # Written as JSON, options that name the same images are one key of the cache.
    names = ("data", "val", "limit", "val_images", "in_memory")
    key = json.dumps({name: options.get(name) for name in names})
    return _load_pair(key, preprocess, pick_device(config.device), config.num_workers)


@lru_cache(maxsize=1)
def _load_pair(key: str, preprocess: Any, device: str, num_workers: int | None) -> Pair:
    options = json.loads(key)
    chosen = chosen_data(options)
    train = chosen.training(options["limit"], preprocess.size)
    held_out = chosen.judged(options["val_images"], preprocess.size, like=train)
    if options["in_memory"] is False:
        return train, held_out
    return InMemory(train, preprocess, device, num_workers), InMemory(held_out, preprocess, device, num_workers)


def images_to_distil(pair: Pair, options: Json, preprocess: Any, config: SweepConfig) -> tuple[Any, ...]:
    """The images for `distill`: the pair or, with `more_data`, all images to train on, those held out, the labelled."""
    if not options.get("more_data"):
        return pair
    train, held_out = pair
    names = (*options["data"], *options["more_data"])
    in_memory = options.get("in_memory") is not False
    device = pick_device(config.device)
    return _load_more(names, options["limit"], in_memory, preprocess, device, config.num_workers), held_out, train


@lru_cache(maxsize=1)
def _load_more(
    names: tuple[str, ...], limit: int | None, in_memory: bool, preprocess: Any, device: str, num_workers: int | None
) -> Any:
    joined = ChosenData(list(names)).training(limit, preprocess.size).with_labels(None, None)
    return InMemory(joined, preprocess, device, num_workers) if in_memory else joined


def chosen_data(options: Json, **given: Any) -> ChosenData:
    """The images that the options of a cell name; one name stands by itself."""
    data = options["data"]
    val = options["val"]
    if len(data) == 1:
        data = data[0]
    if val is not None and len(val) == 1:
        val = val[0]
    return ChosenData(data, val, **given)


def layer_similarity(vit: ViT, data: Any, config: SweepConfig) -> dict[str, np.ndarray]:
    """Layer-layer similarity of training images, by token group: name -> (L, L)."""
    batches = iterate(
        data, vit.preprocess, 256, device=vit.device, limit=_SIMILARITY_IMAGES, num_workers=config.num_workers
    )
    trajectories = Trajectories(vit, batches, precision_of(config))
    return measure_similarity(trajectories, vit.num_layers, vit.groups, cka_features=None).matrices


def cut_phases(vit: ViT, data: Any, k: int, config: SweepConfig, tokens: str) -> Phases:
    """Phases by max-cut of the similarity of `tokens` on training images."""
    check_cuts(vit, [k], tokens=tokens)
    return find_phases(layer_similarity(vit, data, config)[tokens], k)


def make_surrogate(
    teacher: ViT, images: tuple[Any, ...], phases: Phases, folder: Path, options: Json, config: SweepConfig, **more: Any
) -> Json:
    """Distil a surrogate with these phases into `folder` by the options of a cell, and return its scores.

    images: training and held-out ones, and labelled ones if the former have no labels; as `distill` takes them.
    more: further options of `distill`, or others than the cell's.
    """
    given = {name: options[name] for name in _OF_TRAINING if name in options}
    done: Any = distill(
        teacher,
        images,
        phases=list(phases.lengths),
        out=str(folder),
        device=pick_device(config.device),
        compile=config.compile,
        num_workers=config.num_workers,
        **{**given, **more},
    )
    # Needed only to go on; a sweep's surrogates together would fill the disk with them.
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    summary = done.summary
    scores = summary.validation
    curves: Json = {}
    for group, metrics in scores.curves.items():
        curves[group] = {name: metrics[name] for name in _CURVES}
    return {
        "phases": list(summary.phases),
        "num_steps": summary.num_steps,
        "seconds": summary.seconds,
        "num_images": scores.num_images,
        "curves": curves,
        "r2_last": scores.r2_last,
        "r2_lowest": scores.r2_lowest,
        "bounded_r2_last": curves["all"]["bounded_r2"][-1],
        "parameters": block_parameters(done.surrogate),
        "nulls": _null_curves(teacher, images, phases, config),
        **{name: getattr(scores, name) for name in _SCORES},
    }


def _null_curves(teacher: ViT, images: tuple[Any, ...], phases: Phases, config: SweepConfig) -> Json:
    """R2 of the null models, which need no training: null model -> token group -> curves."""

    def batches_of(part: Any) -> Any:
        num = min(_NULL_IMAGES, len(part))
        return iterate(part, teacher.preprocess, 128, device=teacher.device, limit=num, num_workers=config.num_workers)

    precision = precision_of(config)
    nulls = fit_null_models(teacher, phases, batches_of(images[0]), precision)
    measured: dict[str, ErrorCurves] = {}
    for states, _, batch in Trajectories(teacher, batches_of(images[1]), precision):
        for name, own in nulls.states(batch.images, states, precision).items():
            if name not in measured:
                measured[name] = ErrorCurves(teacher.num_layers, teacher.groups)
            measured[name].update(states, own)
    found: Json = {}
    for name, curves in measured.items():
        found[name] = {}
        for group, metrics in curves.result().to_dict().items():
            found[name][group] = {"r2": metrics["r2"], "bounded_r2": metrics["bounded_r2"]}
    return found


@torch.no_grad()
def top1_accuracy(vit: ViT, data: Any, precision: str) -> float:
    """Accuracy of the model's own head on `data`."""
    num_right = 0
    for batch in iterate(data, vit.preprocess, 256, device=vit.device):
        with torch.autocast(vit.device.type, torch.bfloat16, enabled=precision == "bf16"):
            chosen_b = vit(batch.images).argmax(-1)
        assert batch.labels is not None
        num_right += int((chosen_b == batch.labels).sum())
    return num_right / len(data)


def best_null(scores: Json, group: str = "all") -> float | None:
    """R2 at the last layer of the best null model; None where none was measured."""
    known = []
    for curves in scores.get("nulls", {}).values():
        value = curves[group]["r2"][-1]
        if value is not None:
            known.append(value)
    return max(known, default=None)


def best_teacher(folder: str) -> str:
    """The folder of the most accurate teacher of a stochastic-depth sweep."""
    best = max(read_sweep(folder), key=lambda row: row["teacher"]["accuracy"])
    return str(Path(folder) / "teachers" / best["cell"] / "teacher")


def read_sweep(folder: str) -> list[Json]:
    """The rows of a stochastic-depth sweep."""
    path = Path(folder) / "stochastic-depth.json"
    if not path.exists():
        raise ValueError(f"no {path}: run paper/stochastic_depth.py --out {folder} first, or name a model")
    rows: list[Json] = json.loads(path.read_text())["rows"]
    return rows
