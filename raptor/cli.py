"""The command line. Each command is a function of one config (`raptor.config`), whose fields are its options.

Only the module of the chosen command is imported, so `raptor --help` answers at once.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from raptor import __version__
from raptor.checks import OWN, members, near_miss, shown, takes_several
from raptor.config import COMMANDS, Config, at_terminal
from raptor.files import read_yaml, slug
from raptor.progress import started_processes
from raptor.terminal.help import completion, help_of, overview
from raptor.terminal.module import load_module
from raptor.terminal.streams import fail_fast_offline, is_users, one_line, safe_streams, stopped_by_signals

# The first two run code. A file may come from a stranger, so it may not give them.
_ONLY_TYPED = ("module", "trust_hub", "config")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code: 0 when the result is saved; 2 with one line when the input was
    wrong; 130 when it was stopped."""
    words = sys.argv[1:] if argv is None else list(argv)
    with safe_streams(), stopped_by_signals():
        try:
            return _run(words)
        except KeyboardInterrupt:
            return _fail(130, "stopped")
        except Exception as error:
            if not is_users(error):
                # A fault of the program, whose traceback is wanted.
                raise
            # By name, because `raptor.run` imports torch.
            was_stopped = type(error).__name__ == "Interrupted"
            return _fail(130 if was_stopped else 2, one_line(error))


def _fail(code: int, line: str) -> int:
    """Say why this process ended. torchrun or srun then ends the other ranks."""
    rank = started_processes()[0]
    # Only torchrun or srun start several, and their output is mixed.
    if rank:
        line = f"rank {rank} on {socket.gethostname()}: {line}"
    print("raptor:", line, file=sys.stderr)
    return code


def _run(words: list[str]) -> int:
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        told = overview()
    elif words[0] in ("-V", "--version"):
        told = f"raptor {__version__}"
    elif words[0] == "completion":
        told = completion(words[1:])
    else:
        return run_command(words[0], words[1:])
    print(told, flush=True)
    return 0


def run_command(name: str, words: list[str]) -> int:
    kind = config_of(name)
    if started_processes()[1] > 1 and not kind.IN_PARALLEL:
        raise ValueError(f"raptor {name} is one process: start it without torchrun, and with srun --ntasks=1")
    # Help is given whatever else is typed, also where a value is wrong or missing.
    if not {"-h", "--help", "--help-all"}.isdisjoint(words):
        print(help_of(name, everything="--help-all" in words), flush=True)
        return 0
    as_json = "--json" in words
    # A module of the user's own may print, and standard output is for the JSON.
    with _output_to_stderr() if as_json else nullcontext():
        config = parse(name, [word for word in words if word != "--json"])
        function = name.replace("-", "_")
        result = getattr(import_module(f"raptor.commands.{function}"), function)(config)
    told = ""
    if as_json and result is not None:
        told = json.dumps(result.to_dict(), default=str)
    elif hasattr(result, "text"):
        told = result.text()
    # The other ranks have the same result.
    if told and started_processes()[0] == 0:
        print(told, flush=True)
    return 0


@contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Inside, what is printed goes to standard error, also by C code and by processes that a module starts."""
    sys.stdout.flush()
    # sys.stdout is not enough: C code and child processes write to file descriptor 1.
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def config_of(name: str) -> type[Config]:
    """The config of a command."""
    if name not in COMMANDS:
        raise ValueError(f"unknown command {name!r}{near_miss(name, COMMANDS, ', '.join(COMMANDS))}")
    return COMMANDS[name]


def parse(name: str, words: Sequence[str]) -> Config:
    """The config that words at a terminal give: what is typed, else the entries of --config files, else defaults."""
    kind = config_of(name)
    kinds = kind.kinds()
    typed = split_words(name, words)
    given: dict[str, Any] = {}
    for file in typed.pop("config", []):
        given |= _read_config(Path(file).expanduser(), kind)
    module = typed.pop("module", [None])[0]
    for option, values in typed.items():
        given[option] = values if takes_several(kinds[option]) else values[0]
    stands_for = kind.POSITIONAL[0]
    if module is not None:
        if stands_for in given:
            stands_for = "teacher"
        elif name == "report":
            raise ValueError("raptor report shows the results of a run: name its folder before --module")
        if stands_for not in kinds:
            raise ValueError("--module stands for MODEL: leave out one of them")
        # It passes the checks of a config. The model is made at the end, when all else is known to be right.
        given[stands_for] = OWN
    for option in kind.POSITIONAL:
        if option not in given and kind.requires(option):
            raise ValueError(f"give {shown(kind, option)}; see raptor {name} --help")
    config = kind(**given)
    # Only then, because the lookup of a name may take seconds.
    if re.search("'(timm|hf)/", str(vars(config))):
        fail_fast_offline()
    if module is None:
        return config
    changes: dict[str, Any] = {stands_for: load_module(module)}
    if stands_for != "teacher" and name in ("phases", "probe", "dynamics", "states") and "out" not in given:
        # Models of one class are told apart by file and function.
        file, _, function = module.rpartition(":")
        changes["out"] = f"runs/{name}-{slug(f'{Path(file).stem}-{function}')}"
    return replace(config, **changes)


def split_words(name: str, words: Sequence[str]) -> dict[str, list[str]]:
    """The words of a command line by option. Words that belong to no option are the command's own, by their place.

    `--num-images` is `--num_images`; a switch alone is true; `--data photos/ MODEL` is not taken apart.
    """
    kind = config_of(name)
    # A mapping cannot be typed: weights of token groups are given in a recipe.
    kinds = {option: of for option, of in (kind.kinds() | at_terminal(kind)).items() if dict not in members(of)}
    found: dict[str, list[str]] = {}
    free: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not _is_option(word):
            free.append(word)
            continue
        flag, equals, value = word.partition("=")
        option = flag.removeprefix("--").replace("-", "_")
        if f"{option}_" in kinds:  # `for` is a keyword of Python, so the option is called `for_`
            option += "_"
        if option not in kinds or not flag.startswith("--"):
            raise ValueError(_unknown(name, flag, [*kinds, "help"]))
        # Dropping the first value without a word would run something else than was typed.
        if option in found and option != "config":
            raise _twice(kind, option)
        values = [value] if equals else []
        if bool in members(kinds[option]) and not equals:
            # A word after a switch is the command's own where it has none yet: `--skip_bad MODEL`.
            is_its = bool(rest) and not _is_option(rest[0]) and (bool(free) or rest[0].lower() in ("true", "false"))
            values = [rest.pop(0) if is_its else "true"]
        while not equals and rest and not _is_option(rest[0]) and (not values or takes_several(kinds[option])):
            values.append(rest.pop(0))
        if not values:
            raise ValueError(f"{flag} has no value: give one, as {flag}=VALUE where it starts with a dash")
        found[option] = [*found.get(option, []), *values]
    by_place = _by_place(name, free, found)
    for option in by_place.keys() & found.keys():
        raise _twice(kind, option)
    return by_place | found


def _by_place(name: str, free: list[str], found: dict[str, list[str]]) -> dict[str, list[str]]:
    """The words without an option, by the options whose places they take."""
    kind = config_of(name)
    places = list(kind.POSITIONAL)
    # The module stands for the model.
    if "module" in found and len(free) < len(places):
        places = places[1:]
    if free and places and takes_several(kind.kinds()[places[0]]):
        return {places[0]: free}
    if len(free) > len(places):
        extra = " ".join(free[len(places) :])
        # `distill` takes its images without an option, so they are tried elsewhere too.
        is_data = "data" in kind.kinds() and "data" not in found and Path(extra).expanduser().exists()
        hint = f": did you mean --data {extra}?" if is_data else f"; see raptor {name} --help"
        raise ValueError(f"unexpected {extra}{hint}")
    return {option: [word] for option, word in zip(places, free)}


def _twice(kind: type[Config], option: str) -> ValueError:
    return ValueError(f"{shown(kind, option)} is given twice: leave out one of them")


def _is_option(word: str) -> bool:
    # -1 and -.5 are numbers.
    return word.startswith("-") and not word[1:2].isdigit() and word[1:2] != "."


def _unknown(name: str, typed: str, known: list[str]) -> str:
    """What to say of an option that the command does not have."""
    option = typed.removeprefix("--").replace("-", "_")
    others = [other for other, kind in COMMANDS.items() if option in kind.kinds()]
    if others:
        return f"unknown option {typed}: it is an option of {', '.join(others)}; see raptor {name} --help"
    return f"unknown option {typed}{near_miss(option, known, mark='--') or f'; see raptor {name} --help'}"


def _read_config(path: Path, kind: type[Config]) -> dict[str, Any]:
    """The options in a --config file. Options that run code are refused: only a person may type those."""
    if not path.is_file():
        raise ValueError(f"--config: there is no file {path}: check its path")
    found: dict[str, Any] = {}
    for key, value in read_yaml(path, "write option: value on each line").items():
        option = key.replace("-", "_")
        if option in _ONLY_TYPED:
            raise ValueError(f"{path} gives --{option}, which is not taken from a file: type it yourself")
        if option not in kind.kinds():
            raise ValueError(f"{path}: unknown option --{option}{near_miss(option, kind.kinds(), mark='--')}")
        found[option] = value
    if not found:
        raise ValueError(f"--config: {path} is empty: write option: value on each line, or leave it out")
    return found


if __name__ == "__main__":
    sys.exit(main())
