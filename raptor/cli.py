"""The command line. Each command is a function of one config (`raptor.config`), whose fields are its options.

Only the module of the chosen command is imported, so `raptor --help` answers at once.
"""

from __future__ import annotations

import difflib
import io
import json
import os
import re
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import MISSING, fields, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from raptor.checks import OWN, in_words, members, shown
from raptor.config import COMMANDS, WORDS_FIRST, WORDS_SECOND, Config
from raptor.files import read_yaml, slug
from raptor.progress import started_processes
from raptor.terminal.help import completion, help_of, overview
from raptor.terminal.module import load_module
from raptor.terminal.streams import fail_fast_offline, is_users, one_line, safe_streams, stopped_by_signals

_IN_PARALLEL = ("phases", "distill", "evaluate", "probe", "dynamics", "states", "train-teacher")
_MODELS = ("model", "models", "run")
_ONLY_TYPED = ("module", "trust_hub", "config")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code: 0 when the result is saved; 2 with one line when the input was
    wrong; 130 when it was stopped."""
    words = list(sys.argv[1:] if argv is None else argv)
    with safe_streams(), stopped_by_signals():
        try:
            return _run(words)
        except KeyboardInterrupt:
            return _fail(130, "stopped")
        except Exception as error:
            if not is_users(error):
                raise
            return _fail(130 if type(error).__name__ == "Interrupted" else 2, one_line(error))


def _fail(code: int, line: str) -> int:
    """Say why this process ended. torchrun or srun then ends the other ranks."""
    rank = started_processes()[0]
    print("raptor:", f"rank {rank} on {socket.gethostname()}: {line}" if rank else line, file=sys.stderr)
    return code


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview(), flush=True)
        return 0
    if words[0] in ("-V", "--version"):
        print(f"raptor {version('raptor-vit')}", flush=True)
        return 0
    if words[0] == "completion":
        print(completion(words[1:]), flush=True)
        return 0
    return run_command(words[0], words[1:])


def config_of(name: str) -> type[Config]:
    """The config of a command."""
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f": did you mean {close[0]}?" if close else f": choose from {', '.join(COMMANDS)}"
        raise ValueError(f"unknown command {name!r}{hint}")
    return COMMANDS[name][0]


def run_command(name: str, words: list[str]) -> int:
    kind = config_of(name)
    if started_processes()[1] > 1 and name not in _IN_PARALLEL:
        raise ValueError(f"raptor {name} is one process: start it without torchrun, and with srun --ntasks=1")
    if "-h" in words or "--help" in words or "--help-all" in words:
        print(help_of(name, everything="--help-all" in words), flush=True)
        return 0
    as_json = "--json" in words
    with _output_to_stderr() if as_json else nullcontext():  # a module of one's own may print
        config = parse(name, kind, [word for word in words if word != "--json"])
        function = name.replace("-", "_")
        result = getattr(import_module(f"raptor.commands.{function}"), function)(config)
    if started_processes()[0] != 0:  # only rank 0 prints
        return 0
    if as_json and result is not None:
        print(json.dumps(result.to_dict() if hasattr(result, "to_dict") else result, default=str), flush=True)
    elif hasattr(result, "text"):
        print(result.text(), flush=True)
    return 0


@contextmanager
def _output_to_stderr() -> Iterator[None]:
    with redirect_stdout(sys.stderr):
        yield


def parse(name: str, kind: type[Config], words: Sequence[str]) -> Config:
    """The config that words at a terminal give: what is typed, else the entries of --config files, else defaults."""
    typed = split_words(name, kind, words)
    files, module = typed.pop("config", []), typed.pop("module", [None])[0]
    defaults: dict[str, Any] = {}
    for file in files:
        defaults |= _read_config(Path(file).expanduser(), kind)
    first = kind.POSITIONAL[0]
    is_named = first in typed or first in defaults
    if module is not None and not is_named:
        if name == "report":
            raise ValueError("raptor report shows the results of a run: name its folder before --module")
        typed[first] = [OWN]
    elif not is_named and first in _MODELS:
        raise ValueError(f"give {shown(kind, first)}; see raptor {name} --help")
    for option in kind.POSITIONAL:
        if option in WORDS_SECOND and option not in typed and option not in defaults:
            raise ValueError(f"give {shown(kind, option)}; see raptor {name} --help")
    config = _with_tyro(name, kind, typed, defaults)
    if any(str(word).startswith(("timm/", "hf/")) for value in vars(config).values() for word in _as_list(value)):
        fail_fast_offline()
    return config if module is None else _with_module(name, config, module, is_named)


def split_words(name: str, kind: type[Config], words: Sequence[str]) -> dict[str, list[str]]:
    """The words of a command line by option; those that belong to no option are the command's first argument.

    `--num-images` is `--num_images`; a switch alone is true; `--data photos/ MODEL` is not taken apart.
    """
    kinds = {option: of for option, of in kind.kinds().items() if dict not in members(of)[0]}
    kinds |= {"config": list[str], "module": str}
    first = kind.POSITIONAL[0] if kind.POSITIONAL else None
    found: dict[str, list[str]] = {}
    free: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not _is_option(word):
            free.append(word)
            continue
        option, equals, value = word.partition("=")
        option = option.removeprefix("--").replace("-", "_") if option.startswith("--") else option
        if f"{option}_" in kinds:  # the name of the option is a keyword of Python
            option = f"{option}_"
        if option not in kinds or (option == "module" and not _has_model(kind)):
            raise ValueError(_unknown(name, word.partition("=")[0], kinds))
        if option in found and option != "config":
            raise ValueError(f"{shown(kind, option)} is given twice: leave out one of them")
        values = [value] if equals else []
        takes = members(kinds[option])[0]
        while not equals and rest and not _is_option(rest[0]) and (list in takes or not values):
            if bool in takes and rest[0].lower() not in ("true", "false") and first in WORDS_FIRST and not free:
                break
            values.append(rest.pop(0))
        if not values and bool in takes:
            values = ["true"]
        if not values:
            flag = shown(kind, option)
            raise ValueError(f"{flag} has no value: give one, as {flag}=VALUE where it starts with a dash")
        found[option] = [*found.get(option, []), *values]
    return {**_by_place(name, kind, free, "module" in found), **found}


def _by_place(name: str, kind: type[Config], free: list[str], has_module: bool) -> dict[str, list[str]]:
    """The words that belong to no option, by what their place says: the model, and of `show` the image after it."""
    places = [option for option in kind.POSITIONAL if option in WORDS_FIRST or option in WORDS_SECOND]
    if has_module and len(free) < len(places):  # which stands for the model
        places = places[1:]
    if places == ["models"]:
        return {"models": free} if free else {}
    if len(free) > len(places):
        raise ValueError(f"unexpected {' '.join(free[len(places) :])}; see raptor {name} --help")
    return {option: [word] for option, word in zip(places, free)}


def _has_model(kind: type[Config]) -> bool:
    return bool(kind.POSITIONAL) and kind.POSITIONAL[0] in _MODELS


def _is_option(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit() and word[1:2] != "."


_ALIKE = {"num_images": "limit", "limit": "num_images"}  # what a command measures; what it fits on


def _unknown(name: str, typed: str, kinds: Mapping[str, Any]) -> str:
    """What to say of an option that the command does not have."""
    option = typed.removeprefix("--").replace("-", "_")
    others = [other for other in COMMANDS if option in config_of(other).kinds()]
    if _ALIKE.get(option) in kinds:
        return f"unknown option {typed}: did you mean --{_ALIKE[option]}?"
    if others:
        return f"unknown option {typed}: it is an option of {', '.join(others)}; see raptor {name} --help"
    close = difflib.get_close_matches(option, [*kinds, "json", "help"], n=1)
    return f"unknown option {typed}" + (f": did you mean --{close[0]}?" if close else f"; see raptor {name} --help")


def _read_config(path: Path, kind: type[Config]) -> dict[str, Any]:
    """The options in a --config file. Options that run code are refused: only a person may type those."""
    if not path.is_file():
        raise ValueError(f"--config: there is no file {path}: check its path")
    entries = {
        key.replace("-", "_"): value for key, value in read_yaml(path, "write option: value on each line").items()
    }
    if not entries:
        raise ValueError(f"--config: {path} is empty: write option: value on each line, or leave it out")
    for key in entries:
        if key in _ONLY_TYPED:
            raise ValueError(f"{path} gives --{key}, which is not taken from a file: type it yourself")
        if key not in kind.kinds():
            close = difflib.get_close_matches(key, kind.kinds(), n=1)
            hint = f": did you mean --{close[0]}?" if close else ""
            raise ValueError(f"{path}: unknown option --{key}{hint}")
        if isinstance(entries[key], dict):
            raise ValueError(f"{path}: --{key} must be {in_words(kind.kinds()[key])}, got names with values")
    return entries


def _with_tyro(name: str, kind: type[Config], typed: Mapping[str, list[str]], defaults: Mapping[str, Any]) -> Config:
    """The config that tyro makes of the typed words; its message as one line where it cannot."""
    import tyro

    blank = object.__new__(kind)  # not checked: tyro makes the config that is
    for f in fields(kind):
        value = f.default_factory() if f.default_factory is not MISSING else f.default
        setattr(blank, f.name, defaults.get(f.name, tyro.MISSING if value is MISSING else value))
    words = [word for option, values in typed.items() for word in (f"--{option}", *map(_truth, values))]
    said = io.StringIO()
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "10000"  # one line
    try:
        with redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one word where a list may stand: it is checked by the config
            return cast(
                Config,
                tyro.cli(kind, args=words, default=blank, use_underscores=True, config=(tyro.conf.FlagConversionOff,)),
            )
    except SystemExit:
        raise ValueError(_of_tyro(said.getvalue(), kind, typed)) from None
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns


def _truth(word: str) -> str:
    return word.capitalize() if word.lower() in ("true", "false") else word


def _of_tyro(text: str, kind: type[Config], typed: Mapping[str, list[str]]) -> str:
    """What tyro says of a value, in words of the option's type; its own words for what a config refuses."""
    option = re.search(r"(?:Error parsing|for argument) '?--(\w+)", text)
    if option is not None:
        name = option[1]
        return f"--{name} must be {in_words(kind.kinds()[name])}, got {' '.join(typed[name])}"
    lines = [line.strip(" │╭╮╰╯─-") for line in text.splitlines()]
    said = [line for line in lines if line]
    return re.sub(r"^Error parsing \S+: ", "", said[1])  # the first is a title


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _with_module(name: str, config: Config, where: str, is_named: bool) -> Config:
    """The config with the user's own model: the teacher where a run was named, else the model itself."""
    made = load_module(where)
    if is_named:
        if not hasattr(config, "teacher"):
            raise ValueError("--module stands for MODEL: leave out one of them")
        changes: dict[str, Any] = {"teacher": made}
        return replace(config, **changes)
    first = config.POSITIONAL[0]
    changes = {first: [made] if first == "models" else made}
    if name in ("phases", "probe", "dynamics", "states") and getattr(config, "out", None) is None:
        file, _, function = where.rpartition(":")  # models of one class are told apart by file and function
        changes["out"] = f"runs/{name}-{slug(f'{Path(file).stem}-{function}')}"
    return replace(config, **changes)


if __name__ == "__main__":
    sys.exit(main())
