"""What the small-scale experiments share: data on the device, teachers trained from scratch, raptors of them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from raptor.data import ImageData, InMemory, Preprocess, iterate, open_data
from raptor.devices import pick_precision
from raptor.experiments.statistics import off_diagonal_mean, within_phases_mean
from raptor.fidelity.error_curves import ErrorCurves
from raptor.fidelity.null_models import NULL_NAMES, fit_null_models
from raptor.open import open_vit
from raptor.phases import find_phases
from raptor.run import RunError, read_config, read_json, read_summary
from raptor.similarity.cosine import Array, measure_similarity
from raptor.surrogate.surrogate import block_parameters
from raptor.train import distill
from raptor.train.recipe import load_recipe
from raptor.train.stochastic import check_drop
from raptor.train.teacher import check_labelled, evaluate, separate_registers, train_teacher
from raptor.vit.builders import IMAGENET
from raptor.vit.trajectory import Trajectories
from raptor.vit.view import ViT

Pair = tuple[ImageData, ImageData]
SHAPE = "vit_tiny_patch16_224"
SHAPE_OPTIONS = ("size", "patch", "dim", "depth", "heads", "registers")
TRAINING: dict[str, Any] = {"smoothing": 0.1, "augment": "crop"}  # of a teacher, unless its options say else
SIMILARITY_IMAGES = 2048
NULL_IMAGES = 1024  # that the null models are fitted on, and as many held-out ones they are measured on
TRAIN_SAMPLE = 5000  # training images on which a teacher's training accuracy is measured
CURVES = ("r2", "bounded_r2", "pearson", "cosine", "relative")
SCORES = ("accuracy", "teacher_accuracy", "agreement", "probe", "teacher_probe", "recovery", "recovery_head")


@dataclass(frozen=True)
class Machine:
    """Where cells run; nothing here decides their results."""

    folder: Path
    device: str
    num_workers: int = 0
    compile: bool | None = None

    @property
    def precision(self) -> str:
        return pick_precision("auto", self.device)


def small_shape(*values: int) -> dict[str, int]:
    """A teacher's shape as options of `train_teacher`, in the order of `SHAPE_OPTIONS`."""
    return dict(zip(SHAPE_OPTIONS, values, strict=True))


@lru_cache(maxsize=2)
def load_pair(
    data: str,
    preprocess: Preprocess,
    limit: int | None,
    val_images: int | None,
    device: str,
    num_workers: int = 0,
    in_memory: bool = True,
) -> Pair:
    """Training and held-out images, by default decoded once a process and kept on the device as uint8."""
    parts = (("train", limit), ("val", val_images))
    opened = [open_data(data, split, limit=num, size=preprocess.size) for split, num in parts]  # type: ignore[arg-type]
    if not in_memory:
        return opened[0], opened[1]
    train, held_out = (InMemory(part, preprocess, device, num_workers) for part in opened)
    return train, held_out


def small_pair(options: dict[str, Any], machine: Machine) -> Pair:
    """The images of a cell whose teacher has the shape given in its options."""
    preprocess = Preprocess.for_native(options["size"], *IMAGENET, size=options["size"])
    limit, val_images = options.get("limit"), options.get("val_images")
    return load_pair(options["data"], preprocess, limit, val_images, machine.device, machine.num_workers)


def small_teacher(options: dict[str, Any], pair: Pair, folder: Path, machine: Machine) -> ViT:
    """The teacher in `folder`, trained there first if it is not; options as `train_teacher` takes them."""
    if read_summary(folder) is not None:
        _refuse_other_teacher(folder, options, pair[0].name)
    else:
        shape: dict[str, Any] = {name: options[name] for name in SHAPE_OPTIONS}
        train_teacher(
            SHAPE, pair, out=str(folder), **shape, drop=options["drop"], rescale=options["rescale"],
            budget=options["teacher_budget"], batch_size=options["teacher_batch"], lr=options["teacher_lr"],
            seed=options["seed"], **{name: options.get(name, value) for name, value in TRAINING.items()},
            device=machine.device, compile=machine.compile,
        )  # fmt: skip
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    return open_vit(folder / "teacher", device=machine.device)


def check_small(options: dict[str, Any], drops: Sequence[float] = ()) -> None:
    """Refuse at once what would fail only after a teacher was trained."""
    if not 1 <= options["k"] <= options["depth"]:
        raise ValueError(f"k must be from 1 to the teacher's depth {options['depth']}, not {options['k']}")
    if options["heads"] < 1 or options["dim"] < 1 or options["dim"] % options["heads"]:
        raise ValueError(f"dim {options['dim']} must be a multiple of heads {options['heads']}")
    for p in drops:
        check_drop(p)
    load_recipe(options["recipe"])
    for split in ("train", "val"):
        check_labelled(open_data(options["data"], split, limit=2, size=options["size"]))  # type: ignore[arg-type]


def _refuse_other_teacher(folder: Path, options: dict[str, Any], data: str) -> None:
    """Refuse a finished teacher that was made another way; on what device and in what precision does not matter."""
    saved = read_config(folder)
    kwargs = saved["kwargs"]
    names = ("img_size", "patch_size", "embed_dim", "depth", "num_heads")
    had = {name: kwargs.get(old) for name, old in zip(SHAPE_OPTIONS, names)} | {
        "registers": kwargs.get("reg_tokens", 0)
    }
    trained = {"teacher_budget": "budget", "teacher_batch": "batch_size", "teacher_lr": "lr"}
    trained |= {name: name for name in ("drop", "rescale", "smoothing", "augment", "seed", "data")}
    had |= {name: saved[old] for name, old in trained.items()}
    asked = {**TRAINING, **options, "data": data}
    changed = [f"{name}: {value} -> {asked[name]}" for name, value in had.items() if value != asked[name]]
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options["seed"])
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


def layer_similarity(vit: ViT, data: ImageData, machine: Machine, num_images: int = SIMILARITY_IMAGES) -> Any:
    """Layer-layer similarity of training images, by token group: name -> (L, L)."""
    batches = iterate(data, vit.preprocess, 256, device=vit.device, limit=num_images, num_workers=machine.num_workers)
    states = (states for states, _, _ in Trajectories(vit, batches, machine.precision))
    return measure_similarity(states, vit.num_layers, vit.groups, cka_features=None).matrices


def describe_similarity(matrices: dict[str, Array], k: int) -> dict[str, Any]:
    """The matrices, the max-cut phases of all tokens, and the two means: off the diagonal, and within phases."""
    phases = find_phases(matrices["all"], k)
    groups = {
        name: {"off_diagonal": off_diagonal_mean(m), "within_phases": within_phases_mean(m, phases.lengths)}
        for name, m in matrices.items()
    }
    kept = {name: [[round(float(v), 5) for v in row] for row in m] for name, m in matrices.items()}
    return {"matrices": kept, "phases": list(phases.lengths), "means": groups, **groups["all"]}


def teacher_scores(vit: ViT, pair: Pair, folder: Path, machine: Machine) -> dict[str, Any]:
    """Accuracy on held-out images and on a sample of the training images, both as centre crops."""
    train, held_out = pair
    sample = train.select(train.sample(min(TRAIN_SAMPLE, len(train))))
    saved = read_summary(folder) or {}
    return {
        "accuracy": evaluate(vit, held_out, machine.precision),
        "train_accuracy": evaluate(vit, sample, machine.precision),
        "parameters": block_parameters(vit),
        "seconds": saved.get("seconds"),
    }


def make_raptor(
    teacher: ViT, pair: Pair, phases: Sequence[int], folder: Path, machine: Machine, **options: Any
) -> dict[str, Any]:
    """Distil a surrogate with these phases into `folder`; its scores. The checkpoint goes, the surrogate stays."""
    done = distill(
        teacher, pair, phases=list(phases), out=str(folder), device=machine.device, compile=machine.compile, **options
    )
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    nulls = null_scores(teacher, pair, phases, machine)
    return raptor_scores(done.summary) | {"parameters": block_parameters(done.surrogate), "nulls": nulls}


def null_scores(teacher: ViT, pair: Pair, phases: Sequence[int], machine: Machine) -> dict[str, Any]:
    """Curves of the null models: what is followed without training. Null -> group -> R2 and bounded R2 by layer."""
    batches = [
        iterate(part, teacher.preprocess, 128, device=teacher.device, limit=min(NULL_IMAGES, len(part)),
                num_workers=machine.num_workers)
        for part in pair
    ]  # fmt: skip
    nulls = fit_null_models(teacher, phases, batches[0], machine.precision)
    curves = {name: ErrorCurves(teacher.num_layers, teacher.groups) for name in NULL_NAMES}
    for states, _, batch in Trajectories(teacher, batches[1], machine.precision):
        for name, own in nulls.states(batch.images, states, machine.precision).items():
            curves[name].update(states, own)
    found = {name: curve.result().to_dict() for name, curve in curves.items()}
    return {
        name: {group: {m: metrics[m] for m in ("r2", "bounded_r2")} for group, metrics in groups.items()}
        for name, groups in found.items()
    }


def best_null(raptor: dict[str, Any], group: str = "all", metric: str = "r2") -> float | None:
    """The last layer's R2 of the null model that does best; None where none was measured."""
    known = [groups[group][metric][-1] for groups in raptor.get("nulls", {}).values()]
    return max((value for value in known if value is not None), default=None)


def raptor_scores(summary: dict[str, Any]) -> dict[str, Any]:
    """What the experiments keep of a distillation's summary."""
    scores = summary["validation"]
    curves = {group: {name: metrics[name] for name in CURVES} for group, metrics in scores["curves"].items()}
    return {
        "phases": list(summary["phases"]),
        "num_steps": summary["num_steps"],
        "seconds": summary["seconds"],
        "num_images": scores["num_images"],
        "curves": curves,
        "r2_last": scores["r2_last"],
        "r2_lowest": scores["r2_lowest"],
        "bounded_r2_last": curves["all"]["bounded_r2"][-1],
        **{name: scores.get(name) for name in SCORES},
    }


def sweep_results(folder: str | Path, name: str) -> dict[str, Any]:
    """NAME.json of a finished experiment."""
    path = Path(folder) / f"{name}.json"
    if not path.exists():
        raise ValueError(f"no {path}: run raptor reproduce {name} --out {folder} first")
    return read_json(path)


def best_teacher(folder: str | Path) -> str:
    """The folder of the most accurate teacher of a stochastic-depth sweep."""
    rows = sweep_results(folder, "stochastic-depth")["rows"]
    best = max(rows, key=lambda row: row["teacher"]["accuracy"])
    return str(Path(folder) / "teachers" / best["cell"] / "teacher")
