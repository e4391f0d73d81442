"""`--help`, the completion of shells, and the tables of options on the site: all read from the configs."""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any

from raptor.checks import choices_of, shown, takes_several
from raptor.config import COMMANDS, AtTerminal, Config, Recipe, at_terminal

_WIDTH = 110
# Of a recipe only these are in `--help`; its other entries, and the options in _RARE, are in `--help-all`.
_COMMON_ENTRIES = ("recipe", "budget", "batch_size", "optimizer", "lr", "block", "conditioning")
_RARE = (
    *("allow_other_teacher", "augment", "checkpoint_minutes", "checkpointing", "classes", "compile", "crop_scale"),
    *("cutmix", "eps", "head_file", "init_head", "mixup", "num_classes", "perturbation", "rescale", "seed", "skip_bad"),
    *("smoothing", "standardise", "stage", "tokens", "track", "trust_hub", "twin", "warmup", "weight_decay"),
)


@dataclass(frozen=True)
class OptionText:
    """What is said of one option: as it is typed, its type and default, the group it belongs to."""

    name: str
    shown: str
    kind: Any
    default: str
    help: str
    group: str
    is_rare: bool


def options_of(kind: type[Config]) -> list[OptionText]:
    """The options of a command in the order of their groups: its own first."""
    kinds = kind.kinds()
    found = []
    for f in fields(kind):
        declared_in = next(base for base in kind.__mro__ if f.name in inspect.get_annotations(base))
        told = _helps(declared_in)[f.name]
        default = f.default
        is_rare = f.name in _RARE
        if declared_in is Recipe:
            default = f.metadata.get("otherwise", f.default)
            is_rare = f.name not in _COMMON_ENTRIES
        elif f.default_factory is not MISSING:
            default = f.default_factory()
        group = declared_in.__dict__.get("title", "options")
        found.append(OptionText(f.name, shown(kind, f.name), kinds[f.name], _as_typed(default), told, group, is_rare))
    # In the order of a command's work, and first what has to be given.
    order = ["options", "model", "images", "training", "machine", "terminal"]
    return sorted(found, key=lambda option: (order.index(option.group), option.shown.startswith("--")))


@cache
def _helps(kind: type[Config]) -> dict[str, str]:
    """The text below each field that a class declares."""
    # Python keeps no text below a field at run time, so it is read from the source.
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    helps = {}
    for entry, after in zip(node.body, node.body[1:]):
        if isinstance(entry, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(entry.target, ast.Name)
            helps[entry.target.id] = " ".join(str(after.value.value).split())
    return helps


def _as_typed(value: Any) -> str:
    """A default as one would type it: lists as words, `true` for True, nothing for None."""
    if value is MISSING or value is None:
        return ""
    if isinstance(value, list | tuple):
        return " ".join(_as_typed(entry) for entry in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def about(name: str) -> tuple[str, list[str]]:
    """What a command does, and examples: both stand in the docstring of its config."""
    first, _, rest = inspect.cleandoc(str(COMMANDS[name].__doc__)).partition("\n\n")
    return " ".join(first.split()), rest.splitlines()


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = ["Vision Transformers as recurrent dynamical systems.", "", "usage: raptor COMMAND [OPTIONS]", ""]
    for name in COMMANDS:
        lines.append(f"  {name:{width}}  {about(name)[0]}")
    lines += ["", "raptor COMMAND --help shows a command's options with examples."]
    lines.append('eval "$(raptor completion bash)" (or zsh) completes commands and options in your shell.')
    return "\n".join(lines)


def usage_of(name: str) -> str:
    kind = COMMANDS[name]
    words = []
    for option in kind.POSITIONAL:
        word = option.upper().removesuffix("S")
        if takes_several(kind.kinds()[option]) and len(kind.POSITIONAL) == 1:
            word += f" [{word} ...]"
        words.append(word if kind.requires(option) else f"[{word}]")
    return f"raptor {name} {' '.join(words)} [OPTIONS]"


def help_of(name: str, everything: bool = False) -> str:
    """The options of a command in groups: a line for each of the common ones, or all of them in full.

    The common ones of every command fit a screen of 40 lines.
    """
    kind = COMMANDS[name]
    text, examples = about(name)
    lines = [f"usage: {usage_of(name)}", text, *(f"  {example}" for example in examples), ""]
    group = ""
    for option in [*options_of(kind), *options_of(AtTerminal)]:
        is_hidden = option.is_rare and not everything
        if is_hidden or option.name not in kind.kinds() | at_terminal(kind):
            continue
        if option.group != group:
            group = option.group
            lines.append(f"{group}:")
        lines += _lines(option, everything)
    if not everything:
        lines.append(f"raptor {name} --help-all shows all options in full.")
    return "\n".join(lines)


def _lines(option: OptionText, everything: bool) -> list[str]:
    """The help of one option; its first words only, where not everything is shown."""
    text = option.help
    if choices_of(option.kind):
        text = f"{{{', '.join(choices_of(option.kind))}}} {text}"
    if option.default:
        text += f" [{option.default}]"
    start = f"  {option.shown:22} "
    if everything:
        # Names such as train-teacher and numbers such as 1e-5 stay whole at the end of a line.
        return textwrap.wrap(start + text, _WIDTH, subsequent_indent=" " * len(start), break_on_hyphens=False)
    return [start + textwrap.shorten(text, _WIDTH - len(start), placeholder=" ...")]


def completion(words: Sequence[str]) -> str:
    """What a shell evaluates to complete our command; with the three words that it then gives, the candidates."""
    # It makes the shell ask `raptor completion raptor CURRENT PREVIOUS`, with the whole line in COMP_LINE.
    script = "complete -o default -C 'raptor completion' raptor"
    if list(words) == ["bash"]:
        return script
    if list(words) == ["zsh"]:
        return f"autoload -U +X bashcompinit && bashcompinit\n{script}"
    typed = os.environ.get("COMP_LINE", "").split()
    if len(words) != 3 or not typed:
        raise ValueError("say which shell: raptor completion bash, or raptor completion zsh")
    _, current, previous = words
    candidates: Sequence[str] = ()
    if previous == typed[0]:
        candidates = [*COMMANDS, "completion"]
    elif typed[1] in COMMANDS:
        kind = COMMANDS[typed[1]]
        candidates = choices_of(kind.kinds().get(previous.removeprefix("--").replace("-", "_")))
        if current.startswith("-"):
            candidates = [*(shown(kind, option) for option in kind.kinds() | at_terminal(kind)), "--help"]
    return "\n".join(word for word in candidates if word.startswith(current))
