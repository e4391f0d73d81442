"""The command line. Each command is a typed function; its options are that function's arguments.

Only the module of the chosen command is imported, so `raptor --help` answers at once.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, TextIO, Union, cast, get_args, get_origin

from raptor.options import check_bounds, choices_of, expand_home, in_words, members_of, takes_list
from raptor.progress import started_processes

COMMANDS = {
    "demo": ("raptor.commands.demo:demo", "phases to report on the built-in model; ends with report.html"),
    "models": ("raptor.commands.models:models", "names of the models that can be opened"),
    "phases": ("raptor.commands.phases:phases", "layer-layer similarity and the phases depth falls into"),
    "distill": ("raptor.commands.distill:distill", "rewrite a ViT as k tied blocks that repeat: a surrogate"),
    "evaluate": ("raptor.commands.evaluate:evaluate", "the certificate: how faithful a surrogate is, layer by layer"),
    "probe": ("raptor.commands.probe:probe", "linear probes: classify, segment, depth"),
    "dynamics": ("raptor.commands.dynamics:dynamics", "depth as a dynamical system: norms, directions, modes, swaps"),
    "report": ("raptor.commands.report:report", "one interactive page of a run folder"),
    "states": ("raptor.commands.states:states", "save features of every image, per layer and token group"),
    "explore": ("raptor.commands.explore:explore", "a local page to try images and perturbations"),
    "train-teacher": ("raptor.commands.train_teacher:train_teacher", "train a small ViT to study"),
}

_IN_PARALLEL = ("phases", "distill", "evaluate", "probe", "dynamics", "states", "train-teacher")

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
    "states": ["raptor states timm/vit_base_patch14_reg4_dinov2.lvd142m --data photos/ --layers 3 6 9"],
    "explore": ["raptor explore runs/scenes-k3"],
    "train-teacher": ["raptor train-teacher --data scenes --size 48 --patch 8 --dim 128 --depth 12 --heads 4"],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code: 0 when the result is saved; 2 with one line when the input was
    wrong; 130 when it was stopped; 1 when an experiment's cell failed."""
    words = list(sys.argv[1:] if argv is None else argv)
    with _safe_streams():
        try:
            return _run(words)
        except KeyboardInterrupt:
            return _fail(130, "stopped")
        except Exception as error:
            if not is_users(error):
                raise
            return _fail(130 if type(error).__name__ == "Interrupted" else 2, _one_line(error))


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
    for stream in old:
        if hasattr(stream, "reconfigure"):  # what a terminal's encoding lacks is written as \\u00e9
            stream.reconfigure(errors="backslashreplace")
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
    is_machines = type(error).__name__ == "OutOfMemoryError" or _is_dead_worker(error)
    return isinstance(error, (ValueError, OSError)) or is_machines or _is_lost_rank(error)


def _is_lost_rank(error: Exception) -> bool:
    devices = sys.modules.get("raptor.devices")
    return started_processes()[1] > 1 and devices is not None and devices.is_lost_rank(error)


def _is_dead_worker(error: Exception) -> bool:
    images = sys.modules.get("raptor.data.images")
    return images is not None and images.is_dead_worker(error)


def _one_line(error: Exception) -> str:
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(str(error).split()))
    text = text or type(error).__name__
    if type(error).__name__ == "OutOfMemoryError":
        return f"the GPU's memory is full: lower --batch_size ({text[:120]})"
    if _is_lost_rank(error):
        return f"another process of this command ended ({text[:120]})"
    if _is_dead_worker(error):
        return f"a process that decodes images died: if memory is short, lower --num_workers ({text[:120]})"
    return text


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = ["Vision Transformers as recurrent dynamical systems.", "", "usage: raptor COMMAND [OPTIONS]", ""]
    lines += [f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    last = [
        "raptor COMMAND --help shows a command's options with examples.",
        "raptor completion bash (or zsh) prints a script that completes commands and options in your shell.",
    ]
    return "\n".join([*lines, "", *last])


def run_command(name: str, words: list[str]) -> int:
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f": did you mean {close[0]}?" if close else f": choose from {', '.join(COMMANDS)}"
        raise ValueError(f"unknown command {name!r}{hint}")
    if started_processes()[1] > 1 and name not in _IN_PARALLEL:
        raise ValueError(f"raptor {name} is one process: start it without torchrun, and with srun --ntasks=1")
    where = COMMANDS[name][0]
    parser = build_parser(name, where)
    words = [_with_underscores(w) for w in words]
    _check_repeated(words, parser)
    joined = join_lists(words, parser)
    if name in OPTIONAL_FIRST_WORD and joined and not joined[0].startswith("-"):
        joined[0] = f"--{OPTIONAL_FIRST_WORD[name]}={joined[0]}"
    given_module = any(word.partition("=")[0] == "--module" for word in joined)
    is_named = bool(joined) and not joined[0].startswith("-")
    if given_module and not is_named:  # the module stands for the model
        if name == "report":
            raise ValueError("raptor report shows the results of a run: name its folder before --module")
        joined = ['["own"]' if _list_options(parser)[1] else "own", *joined]
    _check_config_files(joined)
    try:
        options = expand_home(parser.parse_args(joined).as_dict())
    except ValueError as error:
        raise ValueError(f"{error}{'' if is_named else _hint_of_order(words, parser)}") from None
    as_json, own = options.pop("json"), options.pop("module", None)
    if own is not None and not is_named:
        options = {name: value for name, value in options.items() if name not in _MODEL_WORDS}
    _check_values(options, parser)
    if own is not None:
        options |= _place_module(own, is_named, parser)
        if name in _MEASURING and not is_named and options["out"] is None:
            options["out"] = _folder_of_module(name, own)
    module, _, function_name = where.partition(":")
    function = getattr(import_module(module), function_name)
    result = function(**{k: v for k, v in options.items() if k != "config"})
    if started_processes()[0] != 0:  # only rank 0 prints
        return 0
    if as_json and result is not None:
        print(json.dumps(result.to_dict() if hasattr(result, "to_dict") else result, default=str), flush=True)
    elif hasattr(result, "text"):
        print(result.text(), flush=True)
    return 1 if getattr(result, "failed", None) else 0


def _check_repeated(words: Sequence[str], parser: Any) -> None:
    """Refuse an option that is typed twice: the parser would take the last one and drop the other."""
    values: dict[str, list[str]] = {}
    for word, follows in zip(words, [*words[1:], ""]):
        name, equals, value = word.partition("=")
        if not _is_option(word) or name == "--config":  # of several files the later one wins
            continue
        if name in values:
            lists, _ = _list_options(parser)
            shown = " ".join([name, *values[name], value if equals else follows])
            remedy = f"write {shown}" if name in lists else "leave out one of them"
            raise ValueError(f"{name} is given twice: {remedy}")
        values[name] = [value] if equals else [] if _is_option(follows) else [follows]


def _hint_of_order(words: Sequence[str], parser: Any) -> str:
    """Where the word that comes first may have been read as a value of an option that takes several."""
    first = next((action.metavar for action in parser._actions if not action.option_strings), None)
    lists, _ = _list_options(parser)
    for i, word in enumerate(words):
        if first and word in lists and len(words) > i + 2 and not any(map(_is_option, words[i + 1 : i + 3])):
            return f"; put {first} before the options"
    return ""


_ONLY_TYPED = ("module", "trust_hub", "config")


def _check_config_files(words: Sequence[str]) -> None:
    """Refuse a --config file that cannot be read, and options that run code: only a person may type those."""
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name != "--config" or not (equals or words[i + 1 :]):
            continue
        path = Path(value if equals else words[i + 1]).expanduser()
        if not path.is_file():
            raise ValueError(f"--config: there is no file {path}: check its path")
        from raptor.run import read_yaml

        keys = read_yaml(path, "write option: value on each line")
        if not keys:
            raise ValueError(f"--config: {path} is empty: write option: value on each line, or leave it out")
        for key in keys:
            if key.replace("-", "_") in _ONLY_TYPED:
                raise ValueError(f"{path} gives --{key}, which is not taken from a file: type it yourself")


def find_function(name: str) -> Callable[..., Any]:
    module, _, function_name = COMMANDS[name][0].partition(":")
    function: Callable[..., Any] = getattr(import_module(module), function_name)
    return function


_MEASURING = ("phases", "probe", "dynamics", "states")
_MODEL_WORDS = ("model", "models", "run")


def _place_module(where: str, is_named: bool, parser: Any) -> dict[str, Any]:
    """The user's own model as an argument: the teacher where a run was named, else the model itself."""
    dests = {action.dest for action in parser._actions}
    model = load_module(where)
    if is_named:
        if "teacher" not in dests:
            raise ValueError("--module stands for MODEL: leave out one of them")
        return {"teacher": model}
    name = next(word for word in _MODEL_WORDS if word in dests)
    return {name: [model] if name == "models" else model}


def _folder_of_module(command: str, where: str) -> str:
    """Where results about the user's own model go: models of one class are told apart by file and function."""
    from raptor.run import slug

    file, _, function = where.rpartition(":")
    return f"runs/{command}-{slug(f'{Path(file).stem}-{function}')}"


def load_module(where: str) -> Any:
    """The model that a function of the user's own file makes; `where` is FILE.py:FUNCTION. Runs that file."""
    file, _, function = where.rpartition(":")
    if not file or not function:
        raise ValueError(f"--module {where}: write FILE.py:FUNCTION, such as mine.py:make_vit")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"--module {where}: there is no file {file}")
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    with _code_of(where, path):
        spec.loader.exec_module(module)
    if not hasattr(module, function):
        raise ValueError(f"--module {where}: {file} has no {function}")
    made = getattr(module, function)
    from torch import nn

    from raptor.provenance import note_module
    from raptor.vit.view import ViT

    note_module(where)
    with _code_of(where, path):
        made = made if isinstance(made, nn.Module | ViT) else made()
    if not isinstance(made, nn.Module | ViT):
        raise ValueError(f"--module {where} gives a {type(made).__name__}: return an nn.Module or an opened model")
    return made


@contextmanager
def _code_of(where: str, path: Path) -> Iterator[None]:
    """Inside, an exception of the user's own code shows the user's frames only, and is an error that names it."""
    try:
        yield
    except Exception as error:
        import traceback

        frames = error.__traceback__
        while frames is not None and Path(frames.tb_frame.f_code.co_filename).resolve() != path.resolve():
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        reason = (str(error).strip() or "no message").splitlines()[0][:200]
        raise ValueError(f"--module {where} raised {type(error).__name__}: {reason}") from None


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


def read_arguments(function: Callable[..., Any] | str) -> Iterator[Argument]:
    """The arguments of a function (also written `module:function`) in its order, those of its shared options last."""
    from raptor.signatures import NO_DEFAULT, read_signature

    signature = read_signature(_where(function))
    helps = _read_helps(signature.doc)
    for parameter in signature.parameters:
        default = inspect.Parameter.empty if parameter.default is NO_DEFAULT else parameter.default
        is_positional = parameter.is_required and not parameter.is_keyword_only
        told = helps.get(parameter.name, parameter.help)
        yield Argument(parameter.name, _as_typed(parameter.kind), default, told, is_positional)


def _where(function: Callable[..., Any] | str) -> str:
    return function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"


def _read_helps(doc: str) -> dict[str, str]:
    """What a docstring says about each argument, also where it describes several together: `patch, dim: ...`."""
    from docstring_parser import DocstringStyle, parse

    told = parse(doc, style=DocstringStyle.GOOGLE).params
    return {name: " ".join((entry.description or "").split()) for entry in told for name in entry.arg_name.split(", ")}


def _as_typed(kind: Any) -> Any:
    """The type of an argument at a terminal: where Python takes a string or an object, a string; where it takes one
    value or a list of them, a list."""
    from raptor.signatures import Foreign

    parts = get_args(kind)
    if get_origin(kind) in (list, Sequence) and parts:
        return list[_as_typed(parts[0])]  # type: ignore[misc]
    if get_origin(kind) not in (Union, UnionType):
        return kind
    lists = [part for part in parts if takes_list(part)]
    if str in parts and any(part is Foreign or part is Path or _holds_objects(part) for part in parts):
        several = [part for part in lists if str in members_of(get_args(part)[0])]
        return list[str] | str if several else str
    return kind


def _holds_objects(kind: Any) -> bool:
    """Whether a list, a tuple or a union has an entry that cannot be written as a word."""
    from raptor.signatures import Foreign

    return kind is Foreign or any(_holds_objects(part) for part in get_args(kind))


def build_parser(name: str, function: Callable[..., Any] | str) -> Any:
    """A parser whose options are the function's arguments; their help is in its docstring.

    function: the function itself, or where it is, as `module:function`; then it is not imported.
    """
    from argparse import RawDescriptionHelpFormatter

    from jsonargparse import ArgumentParser, DefaultHelpFormatter

    class Formatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
        pass

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
            raise ValueError(explain(str(message), self))

    title = f"raptor {name}"
    arguments = list(read_arguments(function))
    words = [argument.usage for argument in arguments if argument.is_positional]
    if name in OPTIONAL_FIRST_WORD:
        words.append(f"[{OPTIONAL_FIRST_WORD[name].upper()}]")
    from raptor.signatures import read_signature

    summary = read_signature(_where(function)).doc.split("\n\n")[0]
    parser = Parser(
        formatter_class=Formatter,
        usage=" ".join([title, *words, "[OPTIONS]"]),
        prog=title,
        description="\n".join([summary, "", "examples:", *(f"  {e}" for e in EXAMPLES[name])]),
        exit_on_error=True,
    )
    parser.add_argument("--config", action="config", help="a YAML file of options; those on the command line win")
    for argument in arguments:
        argument.add_to(parser)
    if any(argument.name in _MODEL_WORDS for argument in arguments):
        stands_for = (
            "the run's teacher" if name == "report" else "a model of your own instead of MODEL, or a run's teacher"
        )
        told = f"{stands_for}: FILE.py:FUNCTION; runs that file"
        parser.add_argument("--module", type=str, help=told)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


# Options that name a file, with the words that they take instead.
FILE_OPTIONS = {"weights": (), "head_file": (), "classes": (), "init_head": ("own", "random")}
_MODEL_PREFIXES = ("timm/", "hf/", "hub/")
_DATA_NAMES = ("scenes", "cifar10", "cifar100", "imagenet")


def _check_values(options: dict[str, Any], parser: Any) -> None:
    """Refuse what no command can use before anything is imported: empty words, and what is not there."""
    words = {a.dest: f"--{a.dest}" if a.option_strings else a.metavar for a in parser._actions}
    for name, value in options.items():
        values = [str(v) for v in (value if isinstance(value, list | tuple) else [value]) if v is not None]
        if any(not v.strip() for v in values) and value != parser.get_default(name):
            raise ValueError(f"{words[name]} is empty: give a value, or leave it out")
        known = FILE_OPTIONS.get(name)
        if known is not None and value and value not in known and not Path(value).expanduser().exists():
            other = f", or choose from {', '.join(known)}" if known else ""
            raise ValueError(f"--{name}: there is no file {value}: check its path{other}")
        if name in ("model", "models", "run", "teacher", "start"):
            for word in values:
                _check_model(word, is_run=name == "run")
        if name in ("data", "val"):
            for word in values:
                _check_data(word)
    _check_out(options)
    check_bounds(options)
    if any(str(v).startswith(("timm/", "hf/")) for value in options.values() for v in _as_list(value)):
        _fail_fast_offline()


def _check_out(options: Mapping[str, Any]) -> None:
    """Refuse a folder of images as --out: the figures written there would be read as images."""
    out = options.get("out")
    if out is None:
        return
    for word in (*_as_list(options.get("data")), *_as_list(options.get("val"))):
        folder = Path(str(word)).expanduser()
        if folder.is_dir() and folder.resolve() == Path(out).resolve():
            raise ValueError(f"--out {out} is the folder of the images: choose another --out")


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _check_model(word: str, is_run: bool) -> None:
    """Refuse a path or a plain word that is not there; other names are looked up when the model is opened."""
    name, _, weights = word.partition("@")
    if weights and not Path(weights).expanduser().exists():
        raise ValueError(f"{word}: there is no weight file {weights}")
    if name.startswith(_MODEL_PREFIXES) or Path(name).expanduser().exists():
        return
    built_in = [path.name for path in (Path(__file__).parent / "assets").iterdir()]
    if name in built_in:
        return
    near = _near_folder(name)
    if is_run:
        raise ValueError(f"there is no run folder {word}: {near or 'give the --out of an earlier command'}")
    if near or "/" in name.rstrip("/") or name.startswith((".", "~")):
        other = near or "there is no such folder; or write timm/NAME, hf/REPO, hub/REPO:ENTRY"
        raise ValueError(f"unknown model {word!r}: {other}")
    close = difflib.get_close_matches(name, built_in, n=1)
    if not close and re.fullmatch(r"[a-z]+\w*[_\d][\w.]*", name):
        close = [f"timm/{name}"]
    hint = f"did you mean {close[0]!r}?" if close else "write timm/NAME, hf/REPO, hub/REPO:ENTRY, scenes or a folder"
    raise ValueError(f"unknown model {word!r}: {hint}")


def _near_folder(word: str) -> str:
    """`did you mean ...?` for a path whose last part is misspelt; empty where nothing beside it is near."""
    path = Path(word).expanduser()
    try:
        beside = [other.name for other in path.parent.iterdir() if other.is_dir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.8)
    return f"did you mean {path.parent / close[0]}?" if close else ""


def _check_data(word: str) -> None:
    """Refuse a plain word that is neither a folder nor a known name; other data is checked when it is opened."""
    plain = re.fullmatch(r"[\w~. /-]+", word) and not word.startswith(("hf/", "wds/"))
    if not plain or word.endswith((".zip", ".tar")) or word in _DATA_NAMES or Path(word).expanduser().exists():
        return
    close = difflib.get_close_matches(word, _DATA_NAMES, n=1, cutoff=0.7)
    known = "a folder, a .zip, scenes, cifar10, hf/NAME or wds/PATTERN"
    other = _near_folder(word) or f"there is no such folder; give {known}"
    hint = f"did you mean {close[0]}?" if close else other
    raise ValueError(f"unknown data {word!r}: {hint}")


def _fail_fast_offline() -> None:
    """Without a network, let the Hugging Face hub use only its cache: else it tries again for a minute."""
    from urllib.parse import urlparse
    from urllib.request import getproxies

    host = urlparse(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    if host is None or getproxies() or "HF_HUB_OFFLINE" in os.environ:
        return
    found: list[Any] = []

    def look_up() -> None:
        with suppress(OSError):
            found.extend(socket.getaddrinfo(host, 443))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(3)
    if not found:
        os.environ["HF_HUB_OFFLINE"] = "1"


def completion(words: Sequence[str]) -> str:
    """A script that completes commands, options and their choices: `eval "$(raptor completion bash)"`."""
    if list(words) not in (["bash"], ["zsh"]):
        raise ValueError("say which shell: raptor completion bash, or raptor completion zsh")
    options: list[str] = []
    choices: dict[str, tuple[str, ...]] = {}
    for name in COMMANDS:
        arguments = list(read_arguments(COMMANDS[name][0]))
        flags = [f"--{a.name}" for a in arguments if not a.is_positional]
        options.append(f"    {name}) words='{' '.join([*flags, '--config', '--json', '--help'])}' ;;")
        choices |= {f"--{a.name}": choices_of(a.kind) for a in arguments if choices_of(a.kind)}
    lines = [
        "_raptor() {",
        "  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=",
        f"  local commands='{' '.join(COMMANDS)} completion'",
        '  if (( COMP_CWORD == 1 )); then COMPREPLY=($(compgen -W "$commands" -- "$current")); return; fi',
        '  case "${COMP_WORDS[1]}" in',
        *options,
        "  esac",
        '  case "$before" in',
        *(f"    {flag}) words='{' '.join(values)}' ;;" for flag, values in choices.items()),
        '    *) [[ $current == -* ]] || { COMPREPLY=($(compgen -f -W scenes -- "$current")); return; } ;;',
        "  esac",
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o filenames -F _raptor raptor",
    ]
    return "\n".join(["autoload -U +X bashcompinit && bashcompinit"] * (words[0] == "zsh") + lines)


def _list_options(parser: Any) -> tuple[list[str], bool]:
    """Options that take several values, and whether the positional argument does."""
    names, positional = [], False
    for action in parser._actions:
        if takes_list(getattr(action, "_typehint", None)):
            names += [o for o in action.option_strings if o.startswith("--")]
            positional = positional or not action.option_strings
    return names, positional


def join_lists(words: list[str], parser: Any) -> list[str]:
    """Words as the parser takes them: `--k 2 3 4` as `--k=[2,3,4]`, a bare `--skip_bad` as true, and the words that
    belong to no option first, as one list where the command takes several."""
    names, several = _list_options(parser)
    switches = [o for a in parser._actions if _is_switch(getattr(a, "_typehint", None)) for o in a.option_strings]
    alone = [o for a in parser._actions if a.nargs == 0 for o in a.option_strings]
    of_words = [o for a in parser._actions if _is_words(getattr(a, "_typehint", None)) for o in a.option_strings]
    takes_word = any(not a.option_strings for a in parser._actions)
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
            if not values:
                raise ValueError(f"{word} has no value: give one, or leave it out")
            takes_one = not several and takes_word
            if word in ("--data", "--val") and len(values) > 1 and takes_one and not positional and i == len(words):
                positional.append(values.pop())  # `--data photos/ MODEL`
            joined.append(f"{word}={json.dumps(values)}" if word in of_words else f"{word}=[{','.join(values)}]")
        elif not _is_option(word):
            positional.append(word)
        elif word in switches and (not follows or (takes_word and not positional and not _is_truth(words[i]))):
            joined.append(f"{word}=true")
        elif follows and "=" not in word and word not in alone:
            joined += [word, words[i]]
            i += 1
        else:
            name, _, value = word.partition("=")
            is_list = name in names and name not in of_words and value and value[0] != "["
            joined.append(f"{name}=[{value}]" if is_list else word)  # `--k=2,3`
    return [json.dumps(positional)] * bool(positional) + joined if several else positional + joined


def _is_truth(word: str) -> bool:
    return word.lower() in ("true", "false", "yes", "no", "on", "off")


def _is_words(kind: Any) -> bool:
    return list[str] in (kind, *get_args(kind))


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
    ambiguous = re.match(r"ambiguous option: (\S+) could match (\S+?),? ", line + " ")
    if ambiguous is not None:
        return f"unknown option {ambiguous[1]}: did you mean {ambiguous[2]}?"
    bare = re.match(r"argument (--\w+)\S*: expected one argument", line)
    if bare is not None:
        return f"{bare[1]} has no value: give one, as {bare[1]}=VALUE where it starts with a dash"
    missing = re.search(r"arguments are required: (.+)", line)
    if missing is not None:
        words = {a.dest: a.metavar if not a.option_strings else f"--{a.dest}" for a in parser._actions}
        names = [words.get(name, name) for name in missing[1].split(", ")]
        return f"give {' and '.join(names)}; see {parser.prog} --help"
    wrong = re.match(r'Parser key "(\w+)": .*(?:Got value|Given value):\s?(.*)$', line)
    if wrong is not None:
        kind = next((getattr(a, "_typehint", a.type) for a in parser._actions if a.dest == wrong[1]), None)
        got = re.sub(r"^\[(.*)\]$", lambda found: re.sub("['\",]", "", found[1]), wrong[2])  # of a list, as typed
        return f"--{wrong[1]} must be {in_words(kind)}, got {got or 'nothing'}"
    return re.sub(r'^Parser key "(\w+)"', r"--\1", line)[:300]


_ALIKE = {"--num_images": "--limit", "--limit": "--num_images"}  # what a command measures; what it fits on


def _explain_unknown(line: str, parser: Any) -> str:
    """The word or option that no command knows, with the nearest option."""
    quoted = re.search(r"Option '([\w.]+)' is not accepted", line)  # of a --config file
    words = line.partition(": ")[2].split() if quoted is None else [f"--{quoted[1]}"]
    unknown = next((w for w in words if w.startswith("--")), "")
    if not unknown:
        return f"unexpected {' '.join(words)}; see {parser.prog} --help"
    options = [o for action in parser._actions for o in action.option_strings if o.startswith("--")]
    name = unknown.split("=")[0]
    alike = [_ALIKE[name]] if _ALIKE.get(name) in options else []
    others = [] if alike else _commands_with(name)
    if others:
        return f"unknown option {unknown}: it is an option of {', '.join(others)}; see {parser.prog} --help"
    close = alike or [f"--{o}" for o in difflib.get_close_matches(name[2:], [o[2:] for o in options], n=1)]
    return f"unknown option {unknown}" + (f": did you mean {close[0]}?" if close else f"; see {parser.prog} --help")


def _commands_with(option: str) -> list[str]:
    """The commands that have an option."""
    places = {name: where for name, (where, _) in COMMANDS.items()}
    return [name for name, where in places.items() if option[2:] in {a.name for a in read_arguments(where)}]


if __name__ == "__main__":
    sys.exit(main())
