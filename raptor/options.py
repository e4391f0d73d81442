"""Options that several commands take. Each is declared here once, with its type, its default and its help.

A command takes them as keyword arguments, both from Python and from the terminal:

    class PhasesOptions(Opening, Measuring, total=False): ...

    def phases(models: list[str], *, k: list[int] | None = None, **given: Unpack[PhasesOptions]) -> PhasesResult:
        options = with_defaults(PhasesOptions, given)
        views = [open_vit(name, **part(Opening, options)) for name in models]

The groups that only sweeps take are in `experiments`. Where the docstring of a command describes one of these options,
its `--help` shows that text instead.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypedDict,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

Group = TypeVar("Group", bound=Mapping[str, Any])
Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Option:
    """What an option is when it is left out, what `--help` says about it, and its values where they are few."""

    default: Any
    help: str
    choices: tuple[str, ...] = ()


def declared(kind: type[Any]) -> dict[str, Option]:
    """The options of a group and of the groups it inherits from, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("num_images", "train_images", "val_images", "head_images", "limit", "phase_images"), (1, 10**9)),
    **dict.fromkeys(("intervention_images", "rank_images", "overfit_images"), (1, 10**6)),
    **dict.fromkeys(("stability_images", "images"), (0, 10**6)),
    **dict.fromkeys(("batch_size", "teacher_batch", "raptor_batch"), (1, 10**6)),
    **dict.fromkeys(("epochs", "classify_epochs", "segment_epochs", "depth_epochs", "refit_epochs"), (1, 10**6)),
    **dict.fromkeys(("seed", "seeds", "more_seeds"), (0, 2**63 - 1)),
    **dict.fromkeys(("k", "paper_k", "min_length", "num_random", "jobs"), (1, 1024)),
    **dict.fromkeys(("patch", "heads", "segment_size", "depth_size"), (1, 4096)),
    "depth": (2, 1024),
    "dim": (1, 2**16),
    "registers": (0, 4096),
    "cls": (0, 1),
    "head_classes": (0, 2**20),
    "num_workers": (0, 1024),
    "bootstrap": (0, 10**6),
    "num_classes": (0, 10**6),
    "port": (1, 65535),
}
"""Smallest and largest value of options that are numbers, or lists of numbers, in every command that has them."""
POSITIVE = ("lr", "lrs", "teacher_lr", "eps", "max_seconds", "probe_seconds")
"""Options that are positive numbers."""


def check_bounds(options: Mapping[str, Any]) -> None:
    """Raise for a number that no command can use, naming its option; what is not a number is not looked at."""
    for name, value in options.items():
        if name not in BOUNDS and name not in POSITIVE:
            continue
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if name in POSITIVE:
                if not 0 < number < math.inf:
                    raise ValueError(f"--{name} must be more than 0, got {number:g}")
                continue
            low, high = BOUNDS[name]
            if not low <= number <= high:
                side = f"at least {low:g}" if not number >= low else f"at most {int(high)}"
                raise ValueError(f"--{name} must be {side}, got {number}")


def takes_list(kind: Any) -> bool:
    """Whether a type is a list, a list or None, or one word or a list of words, and nothing else."""
    if get_origin(kind) in (list, tuple, Sequence):
        return True
    inner = [k for k in get_args(kind) if k is not type(None)] if get_origin(kind) in (Union, UnionType) else []
    inner = [k for k in inner if k is not str or list[str] not in inner]
    return bool(inner) and all(takes_list(k) for k in inner)


def choices_of(kind: Any) -> tuple[str, ...]:
    return next((get_args(part) for part in members_of(kind) if get_origin(part) is Literal), ())


def members_of(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def in_words(kind: Any) -> str:
    """What values an option of this type takes."""
    if takes_list(kind):
        inner = get_args(kind) if get_origin(kind) not in (Union, UnionType) else get_args(get_args(kind)[0])
        return {int: "whole numbers", float: "numbers"}.get(inner[0], "words")
    if choices_of(kind):
        return f"one of {', '.join(choices_of(kind))}"
    members = set(get_args(kind) or (kind,)) - {type(None)}
    named = {int: "a whole number", float: "a number", bool: "true or false"}
    return " or ".join(named.get(member, "a word") for member in sorted(members, key=str))


def check_numbers(kinds: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise for text where an option of these types is a number: Python does not read `"2"` as one."""
    for name, value in options.items():
        given = value if isinstance(value, list | tuple) else [value]
        is_number = _leaves(kinds.get(name)) - {type(None)} <= {int, float, bool}
        if is_number and kinds.get(name) is not None and any(isinstance(one, str) for one in given):
            raise ValueError(f"--{name} must be {in_words(kinds[name])}, got {value!r}")


def _leaves(kind: Any) -> set[Any]:
    """The types that a union, or a list, is made of."""
    parts = get_args(kind)
    return set().union(*map(_leaves, parts)) if parts else {kind}


def expand_home(value: Any) -> Any:
    """An option, or a list or mapping of them, with `~` expanded: a word that begins with it is a path."""
    if isinstance(value, str | Path):
        return type(value)(os.path.expanduser(value)) if str(value).startswith("~") else value
    if type(value) in (list, tuple):
        return type(value)(map(expand_home, value))
    return {name: expand_home(entry) for name, entry in value.items()} if type(value) is dict else value


def takes_paths(function: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """A command whose arguments are expanded by `expand_home`, as those of a terminal are."""

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        return function(*map(expand_home, args), **expand_home(kwargs))  # type: ignore[arg-type]

    return run


def with_defaults(kind: type[Group], given: Group) -> Group:
    """All options of a group: those given, and the defaults of the others. Other names raise a TypeError, numbers that
    no command can use a ValueError."""
    options = declared(kind)
    for name in given:
        if name not in options:
            close = difflib.get_close_matches(name, options, n=1)
            raise TypeError(f"unexpected argument {name!r}" + (f": did you mean {close[0]!r}?" if close else ""))
    check_bounds(given)
    return cast(Group, {name: option.default for name, option in options.items()} | dict(given))


def part(kind: type[Group], options: Mapping[str, Any]) -> Group:
    """The entries of `options` that belong to one group."""
    return cast(Group, {name: options[name] for name in declared(kind) if name in options})


class WeightFile(TypedDict, total=False):
    """Where the weights of a model are."""

    weights: Annotated[str | None, Option(None, "a local weight file for the teacher.")]


class Trusting(TypedDict, total=False):
    """Whether code of others is run."""

    trust_hub: Annotated[bool, Option(False, "run the code of a torch.hub repository, for hub/REPO:ENTRY.")]


class Opening(WeightFile, Trusting, total=False):
    """How a model is opened. The options are those of a teacher where the command also takes surrogates."""

    name: Annotated[
        str | None, Option(None, "what the model is called in titles and figures; by default the weight file's stem.")
    ]
    size: Annotated[int | None, Option(None, "image size.")]
    blocks: Annotated[
        str | None, Option(None, "dotted path of the block list, for a model whose structure cannot be guessed.")
    ]
    norm: Annotated[str | None, Option(None, "dotted path of the final norm, for such a model.")]
    cls: Annotated[int | None, Option(None, "number of cls tokens (0 or 1), for such a model.")]
    registers: Annotated[int | None, Option(None, "number of register tokens, for such a model.")]
    head_classes: Annotated[
        int | None,
        Option(None, "number of class scores the model gives, where its configuration does not say; 0 for none."),
    ]
    dtype: Annotated[
        str,
        Option(
            "fp32",
            "type of the weights: fp32, bf16 or fp16; fp32 also widens stored halves.",
            ("fp32", "bf16", "fp16"),
        ),
    ]


class Untrained(TypedDict, total=False):
    """Whether a model has its published weights."""

    pretrained: Annotated[bool, Option(True, "fetch published weights; false gives the same model untrained.")]
    layer_scale: Annotated[
        float | None,
        Option(None, "what LayerScale starts from in an untrained model; DINOv2's own 1e-5 leaves tokens in place."),
    ]


class OpeningModel(Opening, Untrained, total=False):
    """How a model that may be untrained is opened."""


class OfTeacher(TypedDict, total=False):
    """The teacher of a surrogate."""

    teacher: Annotated[
        str | None,
        Option(None, "the teacher of a surrogate, if its folder does not name it or the name fails to open."),
    ]
    allow_other_teacher: Annotated[
        bool, Option(False, "compare with a teacher that the surrogate was not made from; the results say so.")
    ]


class OnDevice(TypedDict, total=False):
    """Where a command runs."""

    device: Annotated[str, Option("auto", "auto, cpu or cuda.", ("auto", "cpu", "cuda"))]


class Decoding(TypedDict, total=False):
    """How images are read."""

    num_workers: Annotated[int | None, Option(None, "processes that decode images; chosen by images and cores.")]


class Running(OnDevice, Decoding, total=False):
    """Where and in which precision a command runs, and how it reads images."""

    precision: Annotated[str, Option("auto", "auto, fp32 or bf16.", ("auto", "fp32", "bf16"))]
    skip_bad: Annotated[bool, Option(False, "skip unreadable images instead of stopping.")]


class HeldOut(TypedDict, total=False):
    """Which images are judged on."""

    val: Annotated[
        list[str] | str | None, Option(None, "other images to judge on, instead of the held-out part of the data.")
    ]


class GivenData(TypedDict, total=False):
    """Which images are read first."""

    data: Annotated[
        list[str] | str | None,
        Option(
            None,
            "images: a folder, zip archives, scenes, cifar10, hf/NAME:split, wds/PATTERN; several are joined, with "
            "labels where all have the same classes. By default those of the run, else scenes.",
        ),
    ]


class OnData(GivenData, HeldOut, total=False):
    """Which images are read."""


class HeadClasses(TypedDict, total=False):
    """What the outputs of a model's head stand for."""

    classes: Annotated[
        str | None,
        Option(None, "a file with the classes of the model's head, one per line; ImageNet's WordNet ids need none."),
    ]


class Measuring(Running, OnData, total=False):
    """What a command measures on."""

    num_images: Annotated[int, Option(1000, "how many images.")]
    batch_size: Annotated[int, Option(64, "images per forward pass.")]


class AnySplit(TypedDict, total=False):
    """Which part of the data is measured."""

    split: Annotated[str, Option("val", "val (held out), train, all, or one of the data's own parts, such as test.")]


class GivenHead(TypedDict, total=False):
    """The head for a teacher that has no classifier."""

    head_file: Annotated[str | None, Option(None, "a linear head, for a teacher that has none or to replace its own.")]
    head_images: Annotated[
        int | None,
        Option(
            None,
            "training images of a ridge head, for a teacher that has none; by default the head kept in the run, else "
            "20 images per class, 5,000 at least.",
        ),
    ]


class Limited(TypedDict, total=False):
    """How many images are used."""

    limit: Annotated[int | None, Option(None, "use only this many training images.")]
    val_images: Annotated[int | None, Option(None, "use only this many held-out images.")]


class Compiling(TypedDict, total=False):
    """Whether training compiles the blocks."""

    compile: Annotated[bool | None, Option(None, "compile the blocks; by default on a GPU only.")]


class Planning(TypedDict, total=False):
    """Whether a command only says what it would take."""

    dry_run: Annotated[
        bool,
        Option(
            False,
            "open and check everything, measure a few steps, print memory, images/s, time and size for 1 and more "
            "devices; write nothing.",
        ),
    ]


class Resuming(TypedDict, total=False):
    """Whether training continues where it stopped, and how often it saves."""

    resume: Annotated[bool, Option(True, "continue a run that was interrupted.")]
    checkpoint_minutes: Annotated[
        float,
        Option(10.0, "minutes between checkpoints; one is also written before each validation. 0 is after every step."),
    ]
