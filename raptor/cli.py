"""The command. A thin table: each verb is a typed function, and its options are that function's arguments.

Only the chosen verb's module is imported, so `raptor --help` answers at once.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import FunctionType, UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

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
    """Run the command line and give its exit code: 0; 2 with one line when the input was wrong; 130 when it was
    stopped; 1 when an experiment's cell failed."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"raptor {version('raptor-vit')}")
        return 0
    try:
        return run_command(words[0], words[1:])
    except KeyboardInterrupt:
        print("raptor: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output, such as head, has what it wanted
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 0
    except Exception as error:
        if not is_users(error):
            raise
        print("raptor:", one_line(error), file=sys.stderr)
        return 130 if type(error).__name__ == "Interrupted" else 2


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
        words = [f"{OPTIONAL_FIRST_WORD[name]}={words[0]}", *words[1:]]
    options = parser.parse_args(join_lists(words, parser)).as_dict()
    as_json = options.pop("json")
    result = function(**{k: v for k, v in options.items() if k != "config"})
    if os.environ.get("RANK", "0") != "0":  # torchrun starts many; one speaks
        return 0
    if as_json and result is not None:
        print(json.dumps(result.to_dict() if hasattr(result, "to_dict") else result, default=str), flush=True)
    elif hasattr(result, "text"):
        print(result.text(), flush=True)
    return 1 if getattr(result, "failed", None) else 0


def find_function(name: str, words: list[str]) -> tuple[Callable[..., Any] | None, list[str]]:
    """The function of a command and its words; for `reproduce`, the named experiment's own function."""
    module, _, function_name = COMMANDS[name][0].partition(":")
    function = getattr(import_module(module), function_name)
    if name != "reproduce":
        return function, words
    if not words or words[0] in ("list", "-h", "--help"):
        return function("list"), []
    return import_module(module).experiment(words[0]), words[1:]


OPTIONAL_FIRST_WORD = {"models": "--filter"}


def build_parser(name: str, function: Callable[..., Any], experiment: str | None = None) -> Any:
    """A parser whose options are the function's arguments, its help their docstrings.

    experiment: which one, for `reproduce`.
    """
    from argparse import RawDescriptionHelpFormatter

    from jsonargparse import ArgumentParser, DefaultHelpFormatter

    class Formatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
        pass

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
            raise ValueError(explain(str(message), self))

    title, examples = f"raptor {name}", EXAMPLES.get(name, [])
    if experiment is not None:
        title = f"{title} {experiment}"
        recipe = Path(__file__).parent / "recipes" / f"{experiment}.yaml"
        examples = (
            [f"{title} --config {recipe} --data DATA"] if recipe.exists() else [f"{title} --out runs/{experiment}"]
        )
    parser = Parser(
        formatter_class=Formatter,
        usage=f"{title} [OPTIONS]",
        prog=title,
        description="\n".join([f"{COMMANDS[name][1]}.", "", "examples:", *(f"  {e}" for e in examples)]),
        exit_on_error=True,
    )
    parser.add_argument("--config", action="config", help="a YAML file of options; those on the command line win")
    parser.add_function_arguments(as_typed(function), as_positional=True, fail_untyped=False)
    shared = shared_help(inspect.getdoc(function) or "")
    for action in parser._actions:
        if not action.help and action.dest in shared:
            action.help = shared[action.dest]
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def as_typed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a person at a terminal calls it: where an argument may be a string or an object, a string."""
    source = inspect.unwrap(function)
    hints = get_type_hints(source)
    objects = [name for name, kind in hints.items() if name != "return" and str in get_args(kind) and _has_object(kind)]
    if not objects:
        return function
    plain = FunctionType(source.__code__, source.__globals__, source.__name__, source.__defaults__, source.__closure__)
    plain.__kwdefaults__, plain.__doc__, plain.__module__ = source.__kwdefaults__, source.__doc__, source.__module__
    plain.__annotations__ = hints | dict.fromkeys(objects, str)
    return plain


def _has_object(kind: Any) -> bool:
    """Whether a union has a member that cannot be written in a word or a list of words."""
    simple = {str, int, float, bool, type(None), Ellipsis}
    return any(
        part not in simple and not (takes_list(part) and set(get_args(part)) <= simple) for part in get_args(kind)
    )


def shared_help(doc: str) -> dict[str, str]:
    """What a docstring says of arguments that it describes together, as in `patch, dim: ...`, by name."""
    entries = re.findall(r"^ {4}(\w+(?:, \w+)+): (.+(?:\n {5,}.+)*)", doc, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}


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
    """A parser's message as one line, with the nearest option where one was unknown."""
    line = " ".join(message.split())
    if "nrecognized arguments" in line or "does not accept" in line or "No action for" in line:
        unknown = next((w for w in line.split() if w.startswith("--")), "")
        options = [o for action in parser._actions for o in action.option_strings if o.startswith("--")]
        close = difflib.get_close_matches(unknown.split("=")[0], options, n=1)
        hint = f": did you mean {close[0]}?" if close else f"; see {parser.prog} --help"
        return f"unknown option {unknown or line}{hint}"
    return line[:300]


if __name__ == "__main__":
    sys.exit(main())
