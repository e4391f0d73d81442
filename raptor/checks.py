"""What an option may be: a value in its type, the words for it, and names of models and data.

Types and bounds are pydantic's. torch is not imported here.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError

OWN = "own"
"""Stands for a model that --module makes."""
WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
_MODEL_PREFIXES = ("timm/", "hf/", "hub/")
_DATA_NAMES = ("scenes", "cifar10", "cifar100", "imagenet")
_BOUNDS = {
    "greater_than": "more than {gt:.12g}",
    "greater_than_equal": "at least {ge:.12g}",
    "less_than": "less than {lt:.12g}",
    "less_than_equal": "at most {le:.12g}",
}


def expand_home(value: Any) -> Any:
    """An option, or a list or mapping of them, with `~` expanded: a word that begins with it is a path."""
    # A shell leaves `~` in --out=~/x, and Python and YAML never expand it.
    if isinstance(value, str | Path) and str(value).startswith("~"):
        return type(value)(os.path.expanduser(value))
    # Plain lists only: a Dataset of PyTorch has no end as a list.
    if type(value) in (list, tuple):
        return type(value)(map(expand_home, value))
    if type(value) is dict:
        return {name: expand_home(entry) for name, entry in value.items()}
    return value


def members(kind: Any) -> list[Any]:
    """The types in an annotation, such as list, int and None in `list[int] | None`. A Literal stays whole."""
    origin = get_origin(kind)
    if origin is Annotated:
        return members(get_args(kind)[0])
    if origin is Literal or not get_args(kind):
        return [kind]
    found = [origin] if origin in (list, tuple, dict) else []
    for part in get_args(kind):
        found += members(part)
    return found


def takes_several(kind: Any) -> bool:
    return not {list, tuple}.isdisjoint(members(kind))


def choices_of(kind: Any) -> tuple[str, ...]:
    for one in members(kind):
        if get_origin(one) is Literal:
            return get_args(one)
    return ()


def in_words(kind: Any) -> str:
    """What values an option of this type takes."""
    if dict in members(kind):
        return "a weight of each token group, as in {cls: 1, patches: 1}"
    if choices_of(kind):
        return f"one of {', '.join(choices_of(kind))}"
    if get_origin(kind) is tuple and ... not in get_args(kind):
        return f"{len(get_args(kind))} numbers"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    if takes_several(kind):
        names = {int: "whole numbers", float: "numbers", str: "words"}
    return " or ".join(dict.fromkeys(names[one] for one in members(kind) if one in names))


def checked(option: str, kind: Any, value: Any) -> Any:
    """A value in its option's type: words of a terminal, entries of a YAML file, arguments of Python.

    ValueError that names the option where it does not fit. An object that no terminal can give passes as it is.
    """
    if not _is_plain(value):
        return value
    # In Python one entry may stand for a list of one.
    if takes_several(kind) and isinstance(value, str | int | float):
        value = [value]
    if value in ([], ()):
        raise ValueError(f"{option} has no value: give at least one; see --help")
    for entry in value if isinstance(value, list | tuple) else [value]:
        if isinstance(entry, str) and not entry.strip():
            raise ValueError(f"{option} is empty: give a value, or leave it out")
        # To pydantic a truth value is a number.
        if isinstance(entry, bool) and bool not in members(kind):
            raise ValueError(f"{option} must be {in_words(kind)}, got {str(entry).lower()}")
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        faults = error.errors(include_url=False)
    # Where a word may stand for a number, what is wrong with the word says more.
    fault = faults[-1] if faults[0]["type"] == "int_parsing" else faults[0]
    if fault["type"] == "value_error":
        raise ValueError(f"{option}: {fault['ctx']['error']}")
    words = in_words(kind)
    if fault["type"] in _BOUNDS:
        words = _BOUNDS[fault["type"]].format(**fault["ctx"])
    raise ValueError(f"{option} must be {words}, got {fault['input']}")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    # YAML reads 224 as a number, also where it is the name of a folder.
    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=True))


def _is_plain(value: Any) -> bool:
    """Whether a value could come from a terminal or from a YAML file."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, bool | int | float | str)


def near_name(word: str, choices: Iterable[str]) -> str:
    """The choice that is nearest to a word, or the first one that begins nearly so; empty where none is near."""
    choices = list(choices)
    close = difflib.get_close_matches(word, choices, n=1)
    if close:
        return close[0]
    # Fewer letters are the beginning of too many.
    if len(word) < 4:
        return ""
    by_beginning: dict[str, str] = {}
    for choice in choices:
        by_beginning.setdefault(choice[: len(word)], choice)
    close = difflib.get_close_matches(word, by_beginning, n=1, cutoff=0.8)
    return by_beginning[close[0]] if close else ""


def near_miss(word: str, choices: Iterable[str], otherwise: str = "", mark: str = "") -> str:
    """`: did you mean ...?` where one of the choices is near, else `: choose from ...` where that is given.

    mark: what stands before the choice where it is typed, such as `--`.
    """
    near = near_name(word, choices)
    if near:
        return f": did you mean {mark}{near}?"
    if otherwise:
        return f": choose from {otherwise}"
    return ""


def shown(kind: Any, name: str) -> str:
    """An option of a config as it is typed: --k, but MODEL for a word that has to be given."""
    if name in kind.POSITIONAL and kind.requires(name):
        return name.upper().removesuffix("S")
    return f"--{name.rstrip('_')}"  # `for_`, because `for` is a keyword of Python


def whole_number(value: Any) -> Any:
    """`1e5` as a whole number, which pydantic takes for a fraction."""
    if isinstance(value, str) and re.fullmatch(r"[\d.]+e\+?\d{1,2}", value):
        return float(value)
    return value


def existing_file(word: str) -> str:
    if not Path(word).exists():
        raise ValueError(f"there is no file {word}: check its path")
    return word


def existing_head(word: str) -> str:
    if word not in ("own", "random") and not Path(word).exists():
        raise ValueError(f"there is no file {word}: check its path, or choose from own, random")
    return word


def target(word: str) -> str:
    """The word, unless it is not a score that a surrogate can reach, such as `r2=.6`."""
    name, _, value = word.partition("=")
    # No surrogate passes NaN, or 95 for .95; a recovery may be a little above 1.
    highest = {"recovery": 2.0, "r2": 1.0}
    try:
        if -math.inf < float(value) <= highest[name]:
            return word
    except (KeyError, ValueError):
        pass
    raise ValueError(
        f"{word} is no number of blocks and no target: write 3, recovery=.95 or r2=.6; r2 is at most 1, recovery at "
        "most 2"
    )


def check_out(out: str, images: Any) -> None:
    """Refuse a folder of images as --out: the figures written there would be read as images."""
    for word in images if isinstance(images, list) else []:
        # Resolved, so that photos, photos/ and a link to it are one folder.
        if isinstance(word, str) and Path(word).is_dir() and Path(word).resolve() == Path(out).resolve():
            raise ValueError(f"--out {out} is the folder of the images: choose another --out")


def run_name(word: str) -> str:
    """The word, unless it is a path that is not there."""
    if not _is_known_model(word):
        hint = _near_folder(word) or "give the --out of an earlier command"
        raise ValueError(f"there is no run folder {word}: {hint}")
    return word


def model_name(word: str) -> str:
    """The word, unless it is a path or a plain word that is not there; others are looked up when a model is opened."""
    if _is_known_model(word):
        return word
    hint = _near_folder(word) or "write timm/NAME, hf/REPO, hub/REPO:ENTRY, scenes or a folder that is there"
    file, _, function = word.partition(":")
    close = difflib.get_close_matches(word, _built_in(), n=1)
    if file.endswith(".py"):
        hint = f"did you mean --module {file}:{function or 'FUNCTION'}?"
    elif close:
        hint = f"did you mean {close[0]}?"
    elif re.fullmatch(r"[a-z]+\w*[_\d][\w.]*", word):
        # Whether timm has it is not asked, because the import of timm takes seconds.
        hint = f"did you mean timm/{word}?"
    raise ValueError(f"unknown model {word!r}: {hint}")


def _is_known_model(word: str) -> bool:
    name, _, weights = word.partition("@")
    # Another word after the @ is a revision.
    if weights.endswith(WEIGHT_SUFFIXES) and not Path(weights).expanduser().exists():
        raise ValueError(f"{word}: there is no weight file {weights}")
    if name == OWN or name in _built_in() or name.startswith(_MODEL_PREFIXES) or Path(name).expanduser().exists():
        return True
    if name.endswith(WEIGHT_SUFFIXES):
        raise ValueError(f"weights file {name} does not exist: correct the path, or write timm/NAME for a model")
    return False


def _built_in() -> list[str]:
    return [path.name for path in (Path(__file__).parent / "assets").iterdir()]


def data_name(word: str) -> str:
    """The word, unless it is a plain one that is neither a folder nor a known name."""
    # Words with a colon or braces belong to the readers, which check them when they open the data.
    plain = re.fullmatch(r"[\w~. /-]+", word) and not word.startswith(("hf/", "wds/"))
    if not plain or word.endswith((".zip", ".tar")) or word in _DATA_NAMES or Path(word).expanduser().exists():
        return word
    hint = (
        _near_folder(word) or "there is no such folder; give a folder, a .zip, scenes, cifar10, hf/NAME or wds/PATTERN"
    )
    # A far name would lead astray, so the bound is above .6, difflib's own.
    close = difflib.get_close_matches(word, _DATA_NAMES, n=1, cutoff=0.7)
    if close:
        hint = f"did you mean {close[0]}?"
    raise ValueError(f"unknown data {word!r}: {hint}")


def _near_folder(word: str) -> str:
    """`did you mean ...?` for a path whose last part is misspelt; empty where nothing beside it is near."""
    path = Path(word).expanduser()
    try:
        beside = [other.name for other in path.parent.iterdir() if other.is_dir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.8)
    return f"did you mean {path.parent / close[0]}?" if close else ""
