"""Teachers trained from scratch: their shape, their training, their untrained start, and their scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

from estimates import off_diagonal_mean, within_phases_mean
from records import RaptorScores, SimilarityMeans, TeacherScores, TeacherSimilarity
from surrogates import Machine, Pair, layer_similarity, load_pair, make_raptor

from raptor.data import ChosenData, Preprocess
from raptor.data.apart import changed_images, describe_images
from raptor.devices import seeded
from raptor.options import Option
from raptor.phases import Phases, find_phases
from raptor.run import RunError, drop_checkpoints, read_config, read_summary
from raptor.similarity.cosine import Array
from raptor.surrogate.surrogate import block_parameters
from raptor.train.recipe import resolve_recipe
from raptor.train.schedule import Budget
from raptor.train.stochastic import check_drop
from raptor.train.teacher import check_labelled, evaluate, separate_registers, train_teacher
from raptor.vit.open import open_vit
from raptor.vit.stated import IMAGENET
from raptor.vit.view import ViT

SHAPE = "vit_tiny_patch16_224"
_SHAPE_OPTIONS = ("size", "patch", "dim", "depth", "heads", "registers")
_TRAINING: dict[str, Any] = {"smoothing": 0.1, "augment": "crop"}  # of a teacher, unless its options differ
_TRAIN_SAMPLE = 5000  # training images on which a teacher's training accuracy is measured


class ScratchOptions(TypedDict, total=False):
    """The shape and the training of teachers made from scratch, and the training of their raptors."""

    k: Annotated[int, Option(3, "blocks of each raptor.")]
    size: Annotated[int, Option(64, "the teacher's image size.")]
    patch: Annotated[int, Option(8, "the teacher's patch side in pixels.")]
    dim: Annotated[int, Option(192, "the teacher's width.")]
    depth: Annotated[int, Option(12, "the teacher's number of blocks.")]
    heads: Annotated[int, Option(3, "the teacher's attention heads.")]
    registers: Annotated[int, Option(0, "the teacher's register tokens.")]
    rescale: Annotated[bool, Option(False, "divide kept updates by 1 - p.")]
    teacher_budget: Annotated[str, Option("20epochs", "training of a teacher.")]
    teacher_batch: Annotated[int, Option(512, "images per step of a teacher's training.")]
    teacher_lr: Annotated[float, Option(1e-3, "peak learning rate of a teacher's training.")]
    raptor_budget: Annotated[str, Option("1000steps", "training of a raptor, only in the joint autoregressive stage.")]
    raptor_batch: Annotated[int, Option(256, "images per step of a raptor's training.")]
    recipe: Annotated[str, Option("default", "recipe of a raptor's training.")]


def scratch_pair(options: dict[str, Any], machine: Machine) -> Pair:
    """The images of a cell whose teacher has the shape given in its options."""
    return load_pair(options, Preprocess.for_native(options["size"], *IMAGENET, size=options["size"]), machine)


def scratch_teacher(options: dict[str, Any], pair: Pair, folder: Path, machine: Machine) -> ViT:
    """The teacher in `folder`, which is trained first if it does not exist."""
    if read_summary(folder) is not None:
        _refuse_other_teacher(folder, options, pair)
    else:
        shape: dict[str, Any] = {name: options[name] for name in _SHAPE_OPTIONS}
        train_teacher(
            SHAPE,
            pair,
            out=str(folder),
            **shape,
            drop=options["drop"],
            rescale=options["rescale"],
            budget=options["teacher_budget"],
            batch_size=options["teacher_batch"],
            lr=options["teacher_lr"],
            seed=options["seed"],
            **{name: options.get(name, value) for name, value in _TRAINING.items()},
            device=machine.device,
            compile=machine.compile,
        )
        drop_checkpoints(folder)
    return open_vit(folder / "teacher", device=machine.device)


def check_scratch(options: dict[str, Any], drops: Sequence[float] = ()) -> None:
    """Raise now for options that would fail only after a teacher was trained."""
    if not 1 <= options["k"] <= options["depth"]:
        raise ValueError(f"--k must be from 1 to the teacher's depth {options['depth']}, not {options['k']}")
    if options["heads"] < 1 or options["dim"] < 1 or options["dim"] % options["heads"]:
        raise ValueError(f"--dim {options['dim']} must be a multiple of --heads {options['heads']}")
    known = ["all", "cls", "patches", "pooled", *(["registers"] if options["registers"] else [])]
    if options.get("tokens", "all") not in known:
        raise ValueError(f"teachers have no {options['tokens']!r} tokens: choose from {', '.join(known)}")
    for p in drops:
        check_drop(p)
    resolve_recipe(options["recipe"], {})
    for name in ("teacher_budget", "raptor_budget"):
        Budget.parse(options[name])
    chosen = ChosenData(options["data"], options.get("val"))
    train = chosen.training(2, options["size"])
    for data in (train, chosen.judged(2, options["size"], like=train)):
        check_labelled(data)


def _refuse_other_teacher(folder: Path, options: dict[str, Any], pair: Pair) -> None:
    """Raise when a finished teacher was made with other options. Device and precision do not matter."""
    saved = read_config(folder)
    kwargs = saved["kwargs"]
    names = ("img_size", "patch_size", "embed_dim", "depth", "num_heads")
    had = {name: kwargs.get(old) for name, old in zip(_SHAPE_OPTIONS, names)} | {
        "registers": kwargs.get("reg_tokens", 0)
    }
    trained = {"teacher_budget": "budget", "teacher_batch": "batch_size", "teacher_lr": "lr"}
    trained |= {name: name for name in ("drop", "rescale", "smoothing", "augment", "seed", "data")}
    had |= {name: saved[old] for name, old in trained.items()}
    asked = {**_TRAINING, **options, "data": pair[0].name}
    changed = [f"{name}: {value} -> {asked[name]}" for name, value in had.items() if value != asked[name]]
    if "images" in saved:  # teachers of earlier versions do not say
        both = ({"images": of["train"]} for of in (saved["images"], describe_images(*pair)))
        changed += changed_images(*both)
    if changed:
        raise RunError(f"{folder} holds another teacher ({'; '.join(changed[:3])}): choose another folder")


def untrained_teacher(options: dict[str, Any], num_classes: int, device: str) -> ViT:
    """The model a teacher of these options starts from."""
    kwargs: dict[str, Any] = dict(
        patch_size=options["patch"], embed_dim=options["dim"], depth=options["depth"], num_heads=options["heads"]
    )
    if options["registers"]:
        kwargs |= {"reg_tokens": options["registers"], "no_embed_class": True}
    size = options["size"]
    with seeded(options["seed"]):
        vit = open_vit(
            f"timm/{SHAPE}",
            pretrained=False,
            size=size,
            img_size=size,
            num_classes=num_classes,
            device=device,
            **kwargs,
        )
    separate_registers(vit.model, options["seed"])
    return vit


def _describe_similarity(matrices: dict[str, Array], k: int, tokens: str) -> TeacherSimilarity:
    """The matrices, the max-cut phases of `tokens`, and the two means: off the diagonal, and within phases."""
    phases = find_phases(matrices[tokens], k)
    means = {
        name: SimilarityMeans(off_diagonal=off_diagonal_mean(m), within_phases=within_phases_mean(m, phases))
        for name, m in matrices.items()
    }
    return TeacherSimilarity(
        matrices={name: [[round(float(v), 5) for v in row] for row in m] for name, m in matrices.items()},
        phases=list(phases.lengths),
        means=means,
        off_diagonal=means["all"].off_diagonal,
        within_phases=means["all"].within_phases,
    )


def scratch_raptor(
    options: dict[str, Any], teacher: ViT, pair: Pair, folder: Path, machine: Machine
) -> tuple[TeacherSimilarity, RaptorScores]:
    """A teacher's similarity, and its raptor with the phases cut from it, trained in the joint stage only."""
    similarity = _describe_similarity(
        layer_similarity(teacher, pair[0], machine), options["k"], options.get("tokens", "all")
    )
    raptor = make_raptor(
        teacher,
        pair,
        Phases.from_lengths(similarity.phases),
        folder,
        machine,
        recipe=options["recipe"],
        budget=options["raptor_budget"],
        batch_size=options["raptor_batch"],
        stage1_share=0.0,
        seed=options["seed"],
    )
    return similarity, raptor


def teacher_scores(vit: ViT, pair: Pair, folder: Path, machine: Machine) -> TeacherScores:
    """Accuracy on held-out images and on a sample of the training images, both as centre crops."""
    train, held_out = pair
    sample = train.select(train.sample(min(_TRAIN_SAMPLE, len(train))))
    saved = read_summary(folder) or {}
    return TeacherScores(
        accuracy=evaluate(vit, held_out, machine.precision),
        train_accuracy=evaluate(vit, sample, machine.precision),
        parameters=block_parameters(vit),
        seconds=saved.get("seconds"),
    )
