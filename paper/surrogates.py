"""A teacher, its images, the phases of its layers, and a raptor distilled from it: what the cells of most sweeps do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Self, TypedDict

from cells import Cell, DescribedImages, Sweep
from records import GroupCurves, NullCurves, RaptorScores, StochasticDepth

from raptor.data import ChosenData, ImageData, InMemory, Preprocess, iterate
from raptor.data.apart import describe_images
from raptor.data.memory import JoinedInMemory
from raptor.devices import pick_device, pick_precision
from raptor.fidelity.error_curves import ErrorCurves
from raptor.fidelity.null_models import NULL_NAMES, fit_null_models
from raptor.options import Option, Trusting, WeightFile
from raptor.phases import DEFAULT_TOKENS, Phases, check_cuts, find_phases
from raptor.provenance import hash_config
from raptor.run import drop_checkpoints
from raptor.similarity.cosine import Array, measure_similarity
from raptor.surrogate.surrogate import block_parameters
from raptor.train import Distilled, DistillSummary, distill
from raptor.train.recipe import resolve_recipe
from raptor.train.schedule import Budget
from raptor.vit.open import open_vit
from raptor.vit.trajectory import Trajectories
from raptor.vit.view import ViT
from raptor.vit.weights import fingerprint

Pair = tuple[ImageData, ImageData]
"""Training images and held-out images."""
_SIMILARITY_IMAGES = 2048
_PLANNED_IMAGES = 16  # the same of a plan: where phases are cut changes little of what a run takes
_NULL_IMAGES = 1024  # images that the null models are fitted on, and as many held-out ones to measure them on
_SCORES = ("accuracy", "teacher_accuracy", "agreement", "probe", "teacher_probe", "recovery", "recovery_head")


class SweptTeachers(TypedDict, total=False):
    """Where teachers trained from scratch are."""

    teachers: Annotated[str, Option("runs/stochastic-depth", "folder of a stochastic-depth sweep.")]


class OneTeacher(SweptTeachers, WeightFile, Trusting, total=False):
    """Which teacher an experiment studies."""

    model: Annotated[str | None, Option(None, "the teacher; by default the most accurate one of `teachers`.")]


class CutBy(TypedDict, total=False):
    """What phases are cut from."""

    tokens: Annotated[
        str,
        Option(DEFAULT_TOKENS, "the tokens whose similarity is cut: all, cls, registers, patches, pooled."),
    ]


def cut_by(options: Mapping[str, Any]) -> dict[str, str]:
    """The entry of a cell's options for `tokens`; none for all tokens, which cells of earlier versions cut by."""
    return {} if options["tokens"] == "all" else {"tokens": options["tokens"]}


@dataclass(frozen=True)
class Machine:
    """Where cells run. Nothing here decides their results."""

    folder: Path
    device: str
    num_workers: int | None = None
    compile: bool | None = None
    trust_hub: bool = False

    @classmethod
    def of(cls, out: str, options: Mapping[str, Any]) -> Self:
        """That of an experiment that writes to `out`; not every experiment has the options of the last two."""
        last = {name: options[name] for name in ("compile", "trust_hub") if name in options}
        return cls(Path(out), pick_device(options["device"]), options["num_workers"], **last)

    @property
    def precision(self) -> str:
        return pick_precision("auto", self.device)


def load_pair(options: Mapping[str, Any], preprocess: Preprocess, machine: Machine) -> Pair:
    """The training and held-out images of a cell, by default decoded once per process and kept on the device."""
    data, val = (_hashable(spec) for spec in (options["data"], options.get("val")))
    limits = options.get("limit"), options.get("val_images")
    chosen = ChosenData(data, val)
    return _load_pair(
        chosen,
        preprocess,
        *limits,
        machine.device,
        machine.num_workers,
        options.get("in_memory", True),
    )


def _hashable(spec: Any) -> Any:
    return tuple(spec) if isinstance(spec, list) else spec


@lru_cache(maxsize=2)
def _load_pair(
    chosen: ChosenData,
    preprocess: Preprocess,
    limit: int | None,
    val_images: int | None,
    device: str,
    num_workers: int | None,
    in_memory: bool,
) -> Pair:
    train = chosen.training(limit, preprocess.size)
    held_out = chosen.judged(val_images, preprocess.size, like=train)
    if not in_memory:
        return train, held_out
    kept = [InMemory(part, preprocess, device, num_workers) for part in (train, held_out)]
    return kept[0], kept[1]


@lru_cache(maxsize=1)
def _load_more(
    specs: tuple[str, ...], preprocess: Preprocess, limit: int | None, device: str, num_workers: int | None, keep: bool
) -> ImageData:
    joined = ChosenData(specs).training(limit, preprocess.size).without_labels()
    return InMemory(joined, preprocess, device, num_workers) if keep else joined


def images_to_distil(
    pair: Pair, options: Mapping[str, Any], preprocess: Preprocess, machine: Machine
) -> tuple[ImageData, ...]:
    """The images for `distill`: the pair or, with `more_data`, all images to train on, those held out, the labelled."""
    more = options.get("more_data")
    if not more:
        return pair
    train, held_out = pair
    limit, rest = options.get("limit"), (machine.device, machine.num_workers)
    if isinstance(train, InMemory) and limit is None:
        further = _load_more(tuple(more), preprocess, None, *rest, keep=True)
        assert isinstance(further, InMemory)
        return JoinedInMemory([train, further]).without_labels(), held_out, train
    keep = isinstance(train, InMemory)
    return _load_more(_with_more(options), preprocess, limit, *rest, keep=keep), held_out, train


def _with_more(options: Mapping[str, Any]) -> tuple[str, ...]:
    """`data` and `more_data` as one set."""
    data = options["data"]
    return ((data,) if isinstance(data, str) else tuple(data)) + tuple(options["more_data"])


def describe_pair(options: Mapping[str, Any]) -> DescribedImages:
    """What cells with these options remember of their images, as `run_sweep` takes it."""
    chosen, limit = ChosenData(options["data"], options.get("val")), options.get("limit")
    held_out = chosen.judged(options.get("val_images"))
    found = {"data": describe_images(chosen.training(limit), held_out)}
    if options.get("more_data"):
        found["more_data"] = describe_images(ChosenData(_with_more(options)).training(limit), held_out)
    return found


def open_teacher(options: dict[str, Any], machine: Machine) -> tuple[ViT, Pair]:
    """The teacher that the options of a cell name, and its images."""
    teacher = open_vit(**_opening(options, machine), device=machine.device)
    return teacher, load_pair(options, teacher.preprocess, machine)


def _opening(options: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """The arguments of `open_vit` for the teacher that the options of a cell name."""
    given = {name: options.get(name) for name in ("weights", "size")}
    return {"source": options["model"], **given, "trust_hub": machine.trust_hub}


def with_contents(cells: Iterable[Cell], machine: Machine) -> tuple[Cell, ...]:
    """The cells with fingerprints of the teacher and the recipe that their options name.

    What is not on this machine has none: finished cells can be put together without it.
    """
    known: dict[str, dict[str, str]] = {}
    made = []
    for cell in cells:
        own: dict[str, str] = {}
        for names, find in ((("model", "weights", "size"), _teacher_of), (("recipe", "base"), _recipe_of)):
            options = {name: cell.options[name] for name in names if cell.options.get(name) is not None}
            key = repr((names, options))
            if key not in known:  # cells of several recipes share a teacher
                known[key] = find(options, machine)
            own |= known[key]
        made.append(replace(cell, made_of=own))
    return tuple(made)


def _teacher_of(options: Mapping[str, Any], machine: Machine) -> dict[str, str]:
    if "model" not in options:  # it is trained in the cell
        return {}
    with suppress(ValueError, OSError):
        return {"teacher": fingerprint(open_vit(**_opening(options, machine)).model)}
    return {}


def _recipe_of(options: Mapping[str, Any], machine: Machine) -> dict[str, str]:
    recipe = options.get("recipe", options.get("base"))
    with suppress(ValueError, OSError):
        if recipe is not None:
            return {"recipe": hash_config(asdict(resolve_recipe(str(recipe), {})))}
    return {}


def check_cells(sweep: Sweep, machine: Machine) -> None:
    """Raise now for options with which every cell that is left would fail."""
    left = [cell.options for cell in sweep.missing()]
    for budget in {options["budget"] for options in left if "budget" in options}:
        Budget.parse(budget)
    for recipe in {
        str(options.get("recipe") or options.get("base")) for options in left if {"recipe", "base"} & options.keys()
    }:
        resolve_recipe(recipe, {})
    for name, weights, size in {(o["model"], o["weights"], o.get("size")) for o in left}:
        vit = open_vit(name, weights=weights, size=size, trust_hub=machine.trust_hub)
        check_cuts(vit, [options["k"] for options in left if options.get("k") is not None])


def trained_by(recipe: str, optimizer: str | None = None) -> dict[str, str]:
    """For the options of a cell: the optimizer, where it is not the AdamW of all cells that do not name one.

    optimizer: instead of the recipe's.

    The default recipe had AdamW once: what such cells found is not taken for a result of today's.
    """
    found = optimizer or resolve_recipe(recipe, {}).optimizer
    return {} if found == "adamw" else {"optimizer": found}


def layer_similarity(vit: ViT, data: ImageData, machine: Machine) -> dict[str, Array]:
    """Layer-layer similarity of training images, by token group: name -> (L, L)."""
    batches = iterate(
        data, vit.preprocess, 256, device=vit.device, limit=_SIMILARITY_IMAGES, num_workers=machine.num_workers
    )
    states = (states for states, _, _ in Trajectories(vit, batches, machine.precision))
    return measure_similarity(states, vit.num_layers, vit.groups, cka_features=None).matrices


def cut_phases(vit: ViT, data: ImageData, k: int, machine: Machine, tokens: str = DEFAULT_TOKENS) -> Phases:
    """Phases by max-cut of the similarity of `tokens` on training images."""
    check_cuts(vit, [k], tokens=tokens)
    return find_phases(layer_similarity(vit, data, machine)[tokens], k)


def make_raptor(
    teacher: ViT, images: tuple[ImageData, ...], phases: Phases, folder: Path, machine: Machine, **options: Any
) -> RaptorScores:
    """Distil a surrogate with these phases into `folder` and return its scores. Its checkpoints are deleted.

    images: training and held-out ones, and labelled ones if the former have no labels; as `distill` takes them.
    """
    done = distill(
        teacher,
        images,
        phases=list(phases.lengths),
        out=str(folder),
        device=machine.device,
        compile=machine.compile,
        **options,
    )
    assert isinstance(done, Distilled)
    drop_checkpoints(folder)
    nulls = _null_curves(teacher, (images[0], images[1]), phases, machine)
    return _raptor_scores(done.summary, block_parameters(done.surrogate), nulls)


def _null_curves(teacher: ViT, pair: Pair, phases: Phases, machine: Machine) -> dict[str, dict[str, NullCurves]]:
    """R2 of the null models, which need no training: null model -> token group -> curves."""
    fitting, held_out = (
        iterate(
            part,
            teacher.preprocess,
            128,
            device=teacher.device,
            limit=min(_NULL_IMAGES, len(part)),
            num_workers=machine.num_workers,
        )
        for part in pair
    )
    nulls = fit_null_models(teacher, phases, fitting, machine.precision)
    curves = {name: ErrorCurves(teacher.num_layers, teacher.groups) for name in NULL_NAMES}
    for states, _, batch in Trajectories(teacher, held_out, machine.precision):
        for name, own in nulls.states(batch.images, states, machine.precision).items():
            curves[name].update(states, own)
    found = {name: curve.result().to_dict() for name, curve in curves.items()}
    return {
        name: {group: NullCurves.from_dict(metrics) for group, metrics in groups.items()}
        for name, groups in found.items()
    }


def _raptor_scores(summary: DistillSummary, parameters: int, nulls: dict[str, dict[str, NullCurves]]) -> RaptorScores:
    scores = summary.validation
    curves = {group: GroupCurves.from_dict(metrics) for group, metrics in scores.curves.items()}
    return RaptorScores(
        phases=list(summary.phases),
        num_steps=summary.num_steps,
        seconds=summary.seconds,
        num_images=scores.num_images,
        curves=curves,
        r2_last=scores.r2_last,
        r2_lowest=scores.r2_lowest,
        bounded_r2_last=curves["all"].bounded_r2[-1],
        parameters=parameters,
        nulls=nulls,
        **{name: getattr(scores, name) for name in _SCORES},
    )


def best_teacher(folder: str | Path) -> str:
    """The folder of the most accurate teacher of a stochastic-depth sweep."""
    best = max(StochasticDepth.read(folder).rows, key=lambda row: row.teacher.accuracy)
    return str(Path(folder) / "teachers" / best.cell / "teacher")
