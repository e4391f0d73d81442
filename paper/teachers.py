"""Teachers trained from scratch: their shape, their training, their untrained start, and their scores."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from estimates import off_diagonal_mean
from surrogates import Pair, layer_similarity, load_pair, make_surrogate, precision_of, top1_accuracy
from sweep import Json, SweepConfig

from raptor import (
    Phases,
    Preprocess,
    ViT,
    block_parameters,
    find_phases,
    open_vit,
    pick_device,
    train_teacher,
    within_and_across,
)

SHAPE = "vit_tiny_patch16_224"  # the timm model whose dimensions the options replace
_TRAIN_SAMPLE = 5000  # training images on which a teacher's training accuracy is measured
# ImageNet's mean and deviation of a channel.
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)


@dataclass(kw_only=True)
class ScratchConfig(SweepConfig):
    """The shape and the training of teachers made from scratch, and the training of their surrogates."""

    k: int = 3  # blocks of each surrogate
    tokens: str = "pooled"  # the tokens whose similarity is cut: all, cls, registers, patches, pooled
    size: int = 64  # the teacher's image size
    patch: int = 8  # the teacher's patch side in pixels
    dim: int = 192  # the teacher's width
    depth: int = 12  # the teacher's number of blocks
    heads: int = 3  # the teacher's attention heads
    rescale: bool = False  # divide kept updates by 1 - p
    teacher_budget: str = "20epochs"  # training of a teacher
    teacher_batch: int = 512  # images per step of a teacher's training
    teacher_lr: float = 1e-3  # peak learning rate of a teacher's training
    raptor_budget: str = "1000steps"  # training of a surrogate, only in the joint autoregressive stage
    raptor_batch: int = 256  # images per step of a surrogate's training
    recipe: str = "default"  # recipe of a surrogate's training


def check_shape(config: ScratchConfig, drops: Sequence[float]) -> None:
    """Raise now for options that would fail only after a teacher was trained."""
    if not 1 <= config.k <= config.depth:
        raise ValueError(f"--k must be from 1 to the teacher's depth {config.depth}, not {config.k}")
    if config.heads < 1 or config.dim % config.heads:
        raise ValueError(f"--dim {config.dim} must be a multiple of --heads {config.heads}")
    for p in drops:
        if not 0 <= p < 1:
            raise ValueError(f"--p must be in [0, 1), not {p}")


def scratch_pair(options: Json, config: SweepConfig) -> Pair:
    """The images of a cell whose teacher has the shape given in its options."""
    preprocess = Preprocess.for_native(options["size"], _MEAN, _STD, size=options["size"])
    return load_pair(options, preprocess, config)


def scratch_teacher(options: Json, pair: Pair, folder: Path, config: SweepConfig) -> ViT:
    """The teacher in `folder`, which is trained first if it is not there."""
    device = pick_device(config.device)
    if not (folder / "summary.json").exists():
        shape = {name: options[name] for name in ("size", "patch", "dim", "depth", "heads", "drop", "rescale", "seed")}
        train_teacher(
            SHAPE,
            pair,
            out=str(folder),
            **shape,
            budget=options["teacher_budget"],
            batch_size=options["teacher_batch"],
            lr=options["teacher_lr"],
            smoothing=options.get("smoothing", 0.1),
            augment=options.get("augment", "crop"),
            device=device,
            compile=config.compile,
        )
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    return open_vit(folder / "teacher", device=device)


def untrained_teacher(options: Json, num_classes: int, config: SweepConfig) -> ViT:
    """The model that a teacher of these options starts from."""
    with torch.random.fork_rng():
        torch.manual_seed(options["seed"])
        return open_vit(
            f"timm/{SHAPE}",
            pretrained=False,
            size=options["size"],
            img_size=options["size"],
            patch_size=options["patch"],
            embed_dim=options["dim"],
            depth=options["depth"],
            num_heads=options["heads"],
            num_classes=num_classes,
            device=pick_device(config.device),
        )


def similarity_of(teacher: ViT, data: object, options: Json, config: SweepConfig) -> Json:
    """The matrices, the max-cut phases, and two means of each matrix: off its diagonal and within the phases."""
    matrices = layer_similarity(teacher, data, config)
    phases = find_phases(matrices[options["tokens"]], options["k"])
    rounded: Json = {}
    means: Json = {}
    for name, matrix in matrices.items():
        rounded[name] = matrix.round(5).tolist()
        within, _ = within_and_across(matrix, phases.lengths)
        means[name] = {"off_diagonal": off_diagonal_mean(matrix), "within_phases": within}
    return {"matrices": rounded, "phases": list(phases.lengths), "means": means, **means["all"]}


def measure_teacher(
    teacher: ViT, pair: Pair, seen: Any, folder: Path, name: str, options: Json, config: SweepConfig
) -> Json:
    """What a cell says of its teacher: scores, similarity of layers, and those of a surrogate with its phases.

    seen: the images that the teacher was trained on. folder: of its run. name: of the surrogate's run folder.
    """
    similarity = similarity_of(teacher, pair[0], options, config)
    surrogate = make_surrogate(
        teacher,
        pair,
        Phases.from_lengths(similarity["phases"]),
        Path(config.out) / "raptors" / name,
        options,
        config,
        budget=options["raptor_budget"],
        batch_size=options["raptor_batch"],
        stage1_share=0.0,  # the joint stage only
    )
    scores = teacher_scores(teacher, seen, pair[1], folder, config)
    return {"teacher": scores, "similarity": similarity, "raptor": surrogate}


def teacher_scores(vit: ViT, train: Any, held_out: Any, folder: Path, config: SweepConfig) -> Json:
    """Accuracy on held-out images and on a sample of the training images, both as centre crops."""
    sample = train.select(train.sample(min(_TRAIN_SAMPLE, len(train))))
    seconds = None
    summary = folder / "summary.json"
    if summary.exists():  # an untrained teacher has none
        seconds = json.loads(summary.read_text())["seconds"]
    return {
        "accuracy": top1_accuracy(vit, held_out, precision_of(config)),
        "train_accuracy": top1_accuracy(vit, sample, precision_of(config)),
        "parameters": block_parameters(vit),
        "seconds": seconds,
    }
