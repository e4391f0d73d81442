"""What an option may be: the check of one value of a config, and the words for it. torch is not imported here."""

from __future__ import annotations

import difflib
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin


@dataclass(frozen=True)
class Bounds:
    """The smallest and the largest value of a number; with `above` and `below`, these two are not among them. With
    `endless`, infinity is a value as well."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False
    endless: bool = False


@dataclass(frozen=True)
class Exists:
    """The word names a file, or is one of these."""

    words: tuple[str, ...] = ()


OWN = "own"
"""Stands for a model that --module makes."""
_WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
_MODEL_PREFIXES = ("timm/", "hf/", "hub/")
_DATA_NAMES = ("scenes", "cifar10", "cifar100", "imagenet")


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


def members(kind: Any) -> tuple[list[Any], list[Any]]:
    """The types that an option takes, and what their annotations say of them (`Bounds`, `Exists`).

    A list or a tuple stands as `list` before the types of its entries, a mapping as `dict`.
    """
    if get_origin(kind) is Annotated:
        kinds, notes = members(get_args(kind)[0])
        return kinds, [*notes, *get_args(kind)[1:]]
    if get_origin(kind) is Literal or not get_args(kind):
        return [kind], []
    origin = {tuple: list}.get(get_origin(kind), get_origin(kind))
    kinds, notes = [], []
    parts = list(get_args(kind))
    if origin in (list, dict):
        kinds.append(origin)
    if origin is dict:
        parts = parts[1:]  # the names of its entries are words
    for part in parts:
        if part is Ellipsis:
            continue
        inner, inner_notes = members(part)
        kinds += inner
        notes += inner_notes
    return list(dict.fromkeys(kinds)), list(dict.fromkeys(notes))


def takes_none(kind: Any) -> bool:
    return type(None) in members(kind)[0]


def choices_of(kind: Any) -> tuple[str, ...]:
    for one in members(kind)[0]:
        if get_origin(one) is Literal:
            return get_args(one)
    return ()


def typed_value(kind: Any, words: list[str]) -> Any:
    """What words at a terminal mean in the type of their option. A word that does not fit stays: `check` refuses it."""
    kinds, _ = members(kind)
    value = in_type(kind, words if list in kinds else words[0])
    if bool in kinds and str(value).lower() in ("true", "false"):
        return value.lower() == "true"
    return value


def in_type(kind: Any, value: Any) -> Any:
    """An entry of a YAML file in its option's type: YAML reads 1e-3 as a word, and 32.0 where 32 is meant."""
    kinds, _ = members(kind)
    if isinstance(value, list | tuple) and list in kinds:
        entries = [in_type(kind, entry) for entry in value]
        return tuple(entries) if get_origin(kind) is tuple else entries
    if isinstance(value, dict) and dict in kinds:
        return {name: in_type(float, entry) for name, entry in value.items()}
    # YAML reads 224 as a number, also where it is the name of a folder.
    if kinds == [str] and value is not None:
        return str(value)
    # A bool of Python is an int, and float(True) would be 1.
    if isinstance(value, bool) or not (int in kinds or float in kinds):
        return value
    if float not in kinds and isinstance(value, str) and re.fullmatch(r"[-+]?\d{1,30}", value):
        return int(value)  # exact: a float has 53 bits
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return value
    if float in kinds:
        return number
    # A fraction stays as it is, and `check` refuses it in words.
    if number.is_integer():
        return int(number)
    return value


def in_words(kind: Any) -> str:
    """What values an option of this type takes."""
    kinds, _ = members(kind)
    if dict in kinds:
        return "a weight of each token group, as in {cls: 1, patches: 1}"
    if choices_of(kind):
        return f"one of {', '.join(choices_of(kind))}"
    if get_origin(kind) is tuple and Ellipsis not in get_args(kind):
        return f"{len(get_args(kind))} numbers"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    if list in kinds:
        names = {int: "whole numbers", float: "numbers", str: "words"}
    return " or ".join(names[one] for one in kinds if one in names)


def check(config: Any, name: str, kind: Any, value: Any) -> None:
    """Raise for a value that no command can use, naming its option."""
    option = shown(config, name)
    kinds, notes = members(kind)
    if type(value) in (list, tuple) and not value:
        raise ValueError(f"{option} is missing: give one; see --help")
    if not _has_form(kind, kinds, value):
        raise ValueError(f"{option} must be {in_words(kind)}, got {value!r}")
    for entry in _entries(value):
        if isinstance(entry, str):
            # A default may be empty, as the filter of `raptor models` is.
            if not entry.strip() and entry != type(config).__dict__.get(name):
                raise ValueError(f"{option} is empty: give a value, or leave it out")
            _check_word(option, name, kind, kinds, entry)
        elif isinstance(entry, bool):
            # Asked before the numbers, because a bool of Python is an int.
            if bool not in kinds:
                raise ValueError(f"{option} must be {in_words(kind)}, got {str(entry).lower()}")
        elif isinstance(entry, int | float):
            _check_number(option, kind, kinds, notes, entry)
    for note in notes:
        if isinstance(note, Exists) and isinstance(value, str):
            _check_file(option, note.words, value)
    if name == "out" and isinstance(value, str):
        _check_out(config, value)


def _entries(value: Any) -> list[Any]:
    """The values that are checked one by one."""
    if isinstance(value, list | tuple):
        return list(value)
    if type(value) is dict:
        return list(value.values())
    return [value]


def _check_file(option: str, words: tuple[str, ...], value: str) -> None:
    if value in words or Path(value).exists():
        return
    remedy = "check its path"
    if words:
        remedy += f", or choose from {', '.join(words)}"
    raise ValueError(f"{option}: there is no file {value}: {remedy}")


def _has_form(kind: Any, kinds: list[Any], value: Any) -> bool:
    """Whether a list, a mapping or a single value stands where the option takes one. Objects pass."""
    if type(value) is dict or dict in kinds:
        return dict in kinds and isinstance(value, dict | None)
    if type(value) in (list, tuple):
        has_length = get_origin(kind) is tuple and Ellipsis not in get_args(kind)
        if has_length and len(value) != len(get_args(kind)):
            return False
        return list in kinds
    # A word passes where a list is meant: in Python data="photos/" is one folder.
    return list not in kinds or not isinstance(value, int | float)


def shown(config: Any, name: str) -> str:
    """An option as it is typed: --k, but MODEL and IMAGE for the words that come first."""
    if name in ("model", "models", "run") and name == config.POSITIONAL[0]:
        return name.upper().removesuffix("S")
    if name == "image" and name in config.POSITIONAL:
        return "IMAGE"
    return f"--{name.rstrip('_')}"  # `for_`, because `for` is a keyword of Python


def _check_word(option: str, name: str, kind: Any, kinds: list[Any], word: str) -> None:
    choices = choices_of(kind)
    if choices and str not in kinds:
        if word not in choices:
            raise ValueError(f"{option} must be {in_words(kind)}, got {word}")
    elif str not in kinds:
        raise ValueError(f"{option} must be {in_words(kind)}, got {word!r}")
    elif name in ("model", "models", "run", "teacher", "start"):
        _check_model(word, is_run=name == "run")
    elif name in ("data", "val"):
        _check_data(word)


def _check_number(option: str, kind: Any, kinds: list[Any], notes: list[Any], number: float) -> None:
    is_whole = isinstance(number, int)
    if not (float in kinds or (is_whole and int in kinds)):
        raise ValueError(f"{option} must be {in_words(kind)}, got {number!r}")
    is_endless = any(isinstance(note, Bounds) and note.endless for note in notes)
    # First, because NaN is neither below nor above any bound.
    if not math.isfinite(number) and not (is_endless and number > 0):
        raise ValueError(f"{option} must be {in_words(kind)}, got {number}")
    for note in notes:
        if isinstance(note, Bounds):
            if note.above and number <= note.low:
                raise ValueError(f"{option} must be more than {note.low:g}, got {number:g}")
            if number < note.low:
                raise ValueError(f"{option} must be at least {note.low:g}, got {number:g}")
            if note.below and number >= note.high:
                raise ValueError(f"{option} must be less than {note.high:g}, got {number:g}")
            if number > note.high:
                raise ValueError(f"{option} must be at most {note.high:.12g}, got {number:.12g}")


def _check_out(config: Any, out: str) -> None:
    """Refuse a folder of images as --out: the figures written there would be read as images."""
    for name in ("data", "val"):
        words = getattr(config, name, None)
        for word in _entries(words):
            if not isinstance(word, str):
                continue
            folder = Path(word).expanduser()
            # Resolved, so that photos, photos/ and a link to it are one folder.
            if folder.is_dir() and folder.resolve() == Path(out).resolve():
                raise ValueError(f"--out {out} is the folder of the images: choose another --out")


def _check_model(word: str, is_run: bool) -> None:
    """Refuse a path or a plain word that is not there; other names are looked up when the model is opened."""
    name, _, weights = word.partition("@")
    if weights.endswith(_WEIGHT_SUFFIXES) and not Path(weights).expanduser().exists():  # else it is a revision
        raise ValueError(f"{word}: there is no weight file {weights}")
    if name == OWN or name.startswith(_MODEL_PREFIXES) or Path(name).expanduser().exists():
        return
    built_in = [path.name for path in (Path(__file__).parent / "assets").iterdir()]
    if name in built_in:
        return
    file, _, function = name.partition(":")
    if not is_run and file.endswith(".py"):
        raise ValueError(f"unknown model {word!r}: did you mean --module {file}:{function or 'FUNCTION'}?")
    if name.endswith(_WEIGHT_SUFFIXES):
        raise ValueError(f"weights file {name} does not exist: correct the path, or write timm/NAME for a model")
    near = _near_folder(name)
    if is_run:
        raise ValueError(f"there is no run folder {word}: {near or 'give the --out of an earlier command'}")
    if near or "/" in name.rstrip("/") or name.startswith((".", "~")):
        other = near or "there is no such folder; or write timm/NAME, hf/REPO, hub/REPO:ENTRY"
        raise ValueError(f"unknown model {word!r}: {other}")
    close = difflib.get_close_matches(name, built_in, n=1)
    # It looks like a name of timm. Whether timm has it is not asked, because the import of timm takes seconds.
    if not close and re.fullmatch(r"[a-z]+\w*[_\d][\w.]*", name):
        close = [f"timm/{name}"]
    hint = "write timm/NAME, hf/REPO, hub/REPO:ENTRY, scenes or a folder"
    if close:
        hint = f"did you mean {close[0]!r}?"
    raise ValueError(f"unknown model {word!r}: {hint}")


def _check_data(word: str) -> None:
    """Refuse a plain word that is neither a folder nor a known name; other data is checked when it is opened."""
    # Words with a colon or braces belong to the readers, which check them when they open the data.
    plain = re.fullmatch(r"[\w~. /-]+", word) and not word.startswith(("hf/", "wds/"))
    if not plain or word.endswith((".zip", ".tar")) or word in _DATA_NAMES or Path(word).expanduser().exists():
        return
    # A far name would lead astray, so the bound is above .6, difflib's own.
    close = difflib.get_close_matches(word, _DATA_NAMES, n=1, cutoff=0.7)
    hint = _near_folder(word)
    if close:
        hint = f"did you mean {close[0]}?"
    elif not hint:
        hint = "there is no such folder; give a folder, a .zip, scenes, cifar10, hf/NAME or wds/PATTERN"
    raise ValueError(f"unknown data {word!r}: {hint}")


def _near_folder(word: str) -> str:
    """`did you mean ...?` for a path whose last part is misspelt; empty where nothing beside it is near."""
    path = Path(word).expanduser()
    try:
        beside = [other.name for other in path.parent.iterdir() if other.is_dir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.8)
    if not close:
        return ""
    return f"did you mean {path.parent / close[0]}?"
