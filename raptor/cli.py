"""The command line. Each command is a typed function; its options are that function's arguments.

Only the module of the chosen command is imported, so `raptor --help` answers at once.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, TextIO, Union, cast, get_args, get_origin, get_type_hints

COMMANDS = {
    "demo": ("raptor.commands.demo:demo", "everything below on the built-in default; ends with report.html"),
    "models": ("raptor.commands.models:models", "what can be opened"),
    "phases": ("raptor.commands.phases:phases", "layer-layer similarity and the phases depth falls into"),
    "distill": ("raptor.commands.distill:distill", "rewrite a ViT as k recurrent blocks"),
    "evaluate": ("raptor.commands.evaluate:evaluate", "the certificate: how faithful a surrogate is, layer by layer"),
    "probe": ("raptor.commands.probe:probe", "linear probes: classify, segment, depth"),
    "dynamics": ("raptor.commands.dynamics:dynamics", "depth as a dynamical system"),
    "report": ("raptor.commands.report:report", "one interactive page of a run folder"),
    "explore": ("raptor.commands.explore:explore", "a local page to try images and perturbations"),
    "train-teacher": ("raptor.commands.train_teacher:train_teacher", "train a small ViT to study"),
    "reproduce": ("raptor.commands.reproduce:reproduce", "a table or figure of the paper, by name"),
}

EXAMPLES = {
    "demo": ["raptor demo --out runs/demo"],
    "models": ["raptor models dinov2", "raptor models '*siglip*'"],
    "phases": [
        "raptor phases scenes --data scenes --k 2 3 4",
        "raptor phases timm/vit_base_patch14_reg4_dinov2.lvd142m timm/deit3_base_patch16_224.fb_in1k --data photos/",
    ],
    "distill": [
        "raptor distill scenes --data scenes --k 3 --budget 60s --out runs/scenes-k3",
        "raptor distill timm/vit_base_patch14_reg4_dinov2.lvd142m --data imagenet/ --k 3 --recipe paper",
    ],
    "evaluate": ["raptor evaluate runs/scenes-k3 --data scenes"],
    "probe": ["raptor probe runs/scenes-k3 --task depth --data scenes"],
    "dynamics": ["raptor dynamics scenes --data scenes", "raptor dynamics runs/scenes-k3 --data scenes"],
    "report": ["raptor report runs/scenes-k3"],
    "explore": ["raptor explore runs/scenes-k3"],
    "train-teacher": ["raptor train-teacher --data scenes --size 48 --patch 8 --dim 128 --depth 12 --heads 4"],
    "reproduce": ["raptor reproduce figure1 --data photos/", "raptor reproduce list"],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code: 0 when the result is saved; 2 with one line when the input was
    wrong; 130 when it was stopped; 1 when an experiment's cell failed."""
    words = list(sys.argv[1:] if argv is None else argv)
    with _safe_streams():
        try:
            return _run(words)
        except KeyboardInterrupt:
            print("raptor: stopped", file=sys.stderr)
            return 130
        except Exception as error:
            if not is_users(error):
                raise
            print("raptor:", one_line(error), file=sys.stderr)
            return 130 if type(error).__name__ == "Interrupted" else 2


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview(), flush=True)
        return 0
    if words[0] in ("-V", "--version"):
        print(f"raptor {version('raptor-vit')}", flush=True)
        return 0
    return run_command(words[0], words[1:])


@contextmanager
def _safe_streams() -> Iterator[None]:
    """Inside, a standard stream that nobody reads any more is silent, so that it never ends a run.

    A closed one (`2>&-`) is opened on /dev/null first: the next file that is opened would otherwise take its number
    and receive what is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    old = sys.stdout, sys.stderr
    try:
        sys.stdout = cast(TextIO, _Unbroken(sys.stdout, BrokenPipeError))
        sys.stderr = cast(TextIO, _Unbroken(sys.stderr, OSError))
        yield
    finally:
        sys.stdout, sys.stderr = old


class _Unbroken:
    """A standard stream on which errors of one kind are not raised; after the first it writes to /dev/null."""

    def __init__(self, stream: TextIO | None, ignored: type[OSError]):
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115
        self._ignored = ignored

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except (OSError, ValueError) as error:
            self._silence(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._silence(error)

    def _silence(self, error: OSError | ValueError) -> None:
        with suppress(OSError, ValueError):  # what is in the buffer goes there too, when the process ends
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        if isinstance(error, OSError) and not isinstance(error, self._ignored):
            raise error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def is_users(error: Exception) -> bool:
    """Whether the input or the machine is at fault, not the program. torch's error by name: it may not be imported."""
    return isinstance(error, (ValueError, OSError)) or type(error).__name__ == "OutOfMemoryError"


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if type(error).__name__ == "OutOfMemoryError":
        return f"the GPU's memory is full: lower --batch_size ({text[:120]})"
    return text


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = ["Vision Transformers as recurrent dynamical systems.", "", "usage: raptor COMMAND [OPTIONS]", ""]
    lines += [f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([*lines, "", "raptor COMMAND --help shows a command's options with examples."])


def run_command(name: str, words: list[str]) -> int:
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f": did you mean {close[0]}?" if close else f": choose from {', '.join(COMMANDS)}"
        raise ValueError(f"unknown command {name!r}{hint}")
    experiment = words[0] if name == "reproduce" and words else None
    function, words = find_function(name, words)
    if function is None:
        return 0
    parser = build_parser(name, function, experiment)
    words = [_with_underscores(w) for w in words]
    if name in OPTIONAL_FIRST_WORD and words and not words[0].startswith("-"):
        words = [f"--{OPTIONAL_FIRST_WORD[name]}={words[0]}", *words[1:]]
    options = parser.parse_args(join_lists(words, parser)).as_dict()
    as_json = options.pop("json")
    result = function(**{k: v for k, v in options.items() if k != "config"})
    if os.environ.get("RANK", "0") != "0":  # with torchrun, only rank 0 prints
        return 0
    if as_json and result is not None:
        print(json.dumps(result.to_dict() if hasattr(result, "to_dict") else result, default=str), flush=True)
    elif hasattr(result, "text"):
        print(result.text(), flush=True)
    return 1 if getattr(result, "failed", None) else 0


def find_function(name: str, words: list[str]) -> tuple[Callable[..., Any] | None, list[str]]:
    """The function of a command and its words; for `reproduce`, the function of the named experiment."""
    module, _, function_name = COMMANDS[name][0].partition(":")
    function = getattr(import_module(module), function_name)
    if name != "reproduce":
        return function, words
    if not words or words[0] in ("list", "-h", "--help"):
        return function("list"), []
    return import_module(module).experiment(words[0]), words[1:]


OPTIONAL_FIRST_WORD = {"models": "filter"}


@dataclass(frozen=True)
class Argument:
    """One argument of a command's function, as it is given at a terminal."""

    name: str
    kind: Any
    default: Any
    help: str
    is_positional: bool

    @property
    def metavar(self) -> str:
        """MODEL for `model` and for a list of `models`."""
        return self.name.upper().removesuffix("S" if takes_list(self.kind) else "")

    @property
    def usage(self) -> str:
        return f"{self.metavar} [{self.metavar} ...]" if takes_list(self.kind) else self.metavar

    def add_to(self, parser: Any) -> None:
        if self.is_positional:
            parser.add_argument(self.name, type=self.kind, help=self.help, metavar=self.metavar)
        elif self.default is inspect.Parameter.empty:
            parser.add_argument(f"--{self.name}", type=self.kind, help=self.help, required=True)
        else:
            parser.add_argument(f"--{self.name}", type=self.kind, help=self.help, default=self.default)


def read_arguments(function: Callable[..., Any]) -> Iterator[Argument]:
    """The arguments of a function in its order, those of its shared options (`**given: Unpack[...]`) last."""
    from raptor.options import declared

    hints, helps = get_type_hints(function), read_helps(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            (group,) = get_args(hints[name])
            kinds = get_type_hints(group)
            for shared, option in declared(group).items():
                yield Argument(shared, kinds[shared], option.default, helps.get(shared, option.help), False)
        else:
            is_first = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            is_positional = is_first and parameter.default is inspect.Parameter.empty
            kind = as_typed(hints[name])
            yield Argument(name, kind, parameter.default, helps.get(name, ""), is_positional)


def read_helps(function: Callable[..., Any]) -> dict[str, str]:
    """What a docstring says about each argument, also where it describes several together: `patch, dim: ...`."""
    from docstring_parser import DocstringStyle, parse

    told = parse(inspect.getdoc(function) or "", style=DocstringStyle.GOOGLE).params
    return {name: " ".join((entry.description or "").split()) for entry in told for name in entry.arg_name.split(", ")}


def as_typed(kind: Any) -> Any:
    """The type of an argument at a terminal: where Python takes a string or an object, a string."""
    return str if str in get_args(kind) and _has_object(kind) else kind


def _has_object(kind: Any) -> bool:
    """Whether a union has a member that cannot be written as a word or a list of words."""
    simple = {str, int, float, bool, type(None), Ellipsis}
    return any(
        part not in simple and not (takes_list(part) and set(get_args(part)) <= simple) for part in get_args(kind)
    )


def build_parser(name: str, function: Callable[..., Any], experiment: str | None = None) -> Any:
    """A parser whose options are the function's arguments; their help is in its docstring.

    experiment: which one, for `reproduce`.
    """
    from argparse import RawDescriptionHelpFormatter

    from jsonargparse import ArgumentParser, DefaultHelpFormatter

    class Formatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
        pass

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
            raise ValueError(explain(str(message), self))

    title = f"raptor {name}" if experiment is None else f"raptor {name} {experiment}"
    arguments = list(read_arguments(function))
    words = [argument.usage for argument in arguments if argument.is_positional]
    if name in OPTIONAL_FIRST_WORD:
        words.append(f"[{OPTIONAL_FIRST_WORD[name].upper()}]")
    summary = (inspect.getdoc(function) or "").split("\n\n")[0]
    parser = Parser(
        formatter_class=Formatter,
        usage=" ".join([title, *words, "[OPTIONS]"]),
        prog=title,
        description="\n".join([summary, "", "examples:", *(f"  {e}" for e in find_examples(name, experiment))]),
        exit_on_error=True,
    )
    parser.add_argument("--config", action="config", help="a YAML file of options; those on the command line win")
    for argument in arguments:
        argument.add_to(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def find_examples(name: str, experiment: str | None) -> list[str]:
    if experiment is None:
        return EXAMPLES[name]
    title = f"raptor {name} {experiment}"
    recipe = Path(__file__).parent / "recipes" / f"{experiment}.yaml"
    return [f"{title} --config {recipe} --data DATA" if recipe.exists() else f"{title} --out runs/{experiment}"]


def list_options(parser: Any) -> tuple[list[str], bool]:
    """Options that take several values, and whether the positional argument does."""
    names, positional = [], False
    for action in parser._actions:
        if takes_list(getattr(action, "_typehint", None)):
            names += [o for o in action.option_strings if o.startswith("--")]
            positional = positional or not action.option_strings
    return names, positional


def takes_list(kind: Any) -> bool:
    """Whether a type is a list, or a list or None, and nothing else."""
    if get_origin(kind) in (list, tuple, Sequence):
        return True
    inner = [k for k in get_args(kind) if k is not type(None)] if get_origin(kind) in (Union, UnionType) else []
    return bool(inner) and all(takes_list(k) for k in inner)


def join_lists(words: list[str], parser: Any) -> list[str]:
    """Words as the parser takes them: `--k 2 3 4` as `--k=[2,3,4]`, `--skip_bad` alone as true, and the words that
    belong to no option first, as one list where the command takes several."""
    names, several = list_options(parser)
    switches = [o for a in parser._actions if _is_switch(getattr(a, "_typehint", None)) for o in a.option_strings]
    alone = [o for a in parser._actions if a.nargs == 0 for o in a.option_strings]
    positional: list[str] = []
    joined: list[str] = []
    i = 0
    while i < len(words):
        word, i = words[i], i + 1
        follows = i < len(words) and not _is_option(words[i])
        if word in names:
            values = []
            while i < len(words) and not _is_option(words[i]):
                values += [v for v in words[i].strip("[]").split(",") if v] if words[i][:1] == "[" else [words[i]]
                i += 1
            joined.append(f"{word}=[{','.join(values)}]")
        elif not _is_option(word):
            positional.append(word)
        elif word in switches and not follows:
            joined.append(f"{word}=true")
        elif follows and "=" not in word and word not in alone:
            joined += [word, words[i]]
            i += 1
        else:
            joined.append(word)
    return [json.dumps(positional)] * bool(positional) + joined if several else positional + joined


def _is_switch(kind: Any) -> bool:
    return kind is bool or (get_origin(kind) in (Union, UnionType) and set(get_args(kind)) == {bool, type(None)})


def _with_underscores(word: str) -> str:
    """`--num-images` is `--num_images`: the same names as in Python, written either way."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _is_option(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit() and word[1:2] != "."


def explain(message: str, parser: Any) -> str:
    """A parser's message as one line that names options as they are typed."""
    line = " ".join(message.split())
    if "nrecognized arguments" in line or "not accepted" in line or "No action for" in line:
        return _explain_unknown(line, parser)
    missing = re.search(r"arguments are required: (.+)", line)
    if missing is not None:
        words = {a.dest: a.metavar if not a.option_strings else f"--{a.dest}" for a in parser._actions}
        names = [words.get(name, name) for name in missing[1].split(", ")]
        return f"give {' and '.join(names)}; see {parser.prog} --help"
    wrong = re.match(r'Parser key "(\w+)": .*(?:Got value|Given value): (.*)$', line)
    if wrong is not None:
        kind = next((getattr(a, "_typehint", a.type) for a in parser._actions if a.dest == wrong[1]), None)
        return f"--{wrong[1]} must be {in_words(kind)}, got {wrong[2]}"
    return re.sub(r'^Parser key "(\w+)"', r"--\1", line)[:300]


def _explain_unknown(line: str, parser: Any) -> str:
    """The word or option that no command knows, with the nearest option."""
    quoted = re.search(r"Option '(\w+)' is not accepted", line)  # of a --config file
    words = line.partition(": ")[2].split() if quoted is None else [f"--{quoted[1]}"]
    unknown = next((w for w in words if w.startswith("--")), "")
    if not unknown:
        return f"unexpected {' '.join(words)}; see {parser.prog} --help"
    options = [o for action in parser._actions for o in action.option_strings if o.startswith("--")]
    close = difflib.get_close_matches(unknown.split("=")[0], options, n=1)
    return f"unknown option {unknown}" + (f": did you mean {close[0]}?" if close else f"; see {parser.prog} --help")


def in_words(kind: Any) -> str:
    """What values an option of this type takes."""
    if takes_list(kind):
        inner = get_args(kind) if get_origin(kind) not in (Union, UnionType) else get_args(get_args(kind)[0])
        return {int: "whole numbers", float: "numbers"}.get(inner[0], "words")
    members = set(get_args(kind) or (kind,)) - {type(None)}
    named = {int: "a whole number", float: "a number", bool: "true or false"}
    return " or ".join(named.get(member, "a word") for member in sorted(members, key=str))


if __name__ == "__main__":
    sys.exit(main())
