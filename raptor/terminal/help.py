"""`--help`, the completion of shells, and the tables of options on the site: all read from the configs."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any

from raptor.checks import choices_of, shown
from raptor.config import COMMANDS, WORDS_FIRST, Config

EXAMPLES = {
    "demo": ["raptor demo --out runs/demo"],
    "models": ["raptor models dinov2", "raptor models '*siglip*'", "raptor models --for weights.pth"],
    "study": [
        "raptor study scenes",
        "raptor study timm/vit_small_patch14_reg4_dinov2.lvd142m --data photos/",
    ],
    "phases": [
        "raptor phases scenes --data scenes --k 2 3 4",
        "raptor phases timm/vit_base_patch14_reg4_dinov2.lvd142m timm/deit3_base_patch16_224.fb_in1k --data photos/",
    ],
    "distill": [
        "raptor distill scenes --data scenes --k 3 --budget 60s --out runs/scenes-k3",
        "raptor distill timm/vit_base_patch14_reg4_dinov2.lvd142m --data imagenet/ --k 3 --recipe paper",
    ],
    "evaluate": ["raptor evaluate runs/scenes-k3 --data scenes"],
    "head": ["raptor head runs/scenes-k3 --data scenes"],
    "probe": ["raptor probe runs/scenes-k3 --task depth --data scenes"],
    "dynamics": ["raptor dynamics scenes --data scenes", "raptor dynamics runs/scenes-k3 --data scenes"],
    "depth": ["raptor depth scenes-k3", "raptor depth runs/scenes-k3 --exit 'turn<.2' 'entropy<1'"],
    "watch": [
        "raptor watch scenes-k3 --calibrate scenes --data photos/",
        "raptor watch scenes-k3 --unusual noise blur contrast pgd pgd-aware",
    ],
    "edit": ["raptor edit scenes-k3 --to ball --at 2"],
    "correct": ["raptor correct scenes-k3 --noise .3 --extra 8"],
    "report": ["raptor report runs/scenes-k3"],
    "states": ["raptor states timm/vit_base_patch14_reg4_dinov2.lvd142m --data photos/ --layers 3 6 9"],
    "show": ["raptor show scenes cat.jpg", "raptor show runs/scenes-k3 cat.jpg --what attention --layers 3 6 12"],
    "export": [
        "raptor export runs/scenes-k3 --to onnx --weights int8",
        "raptor export runs/scenes-k3 --to blocks --weights fp16 --out shared",
    ],
    "explore": ["raptor explore runs/scenes-k3"],
    "train-teacher": ["raptor train-teacher --data scenes --size 48 --patch 8 --dim 128 --depth 12 --heads 4"],
}

_WIDTH = 110


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
    # RARE of a class hides that of its bases, so each one is read by itself.
    rare: set[str] = set()
    for base in kind.__mro__:
        rare.update(base.__dict__.get("RARE", "").split())
    found = []
    for f in fields(kind):
        declared_in = next(base for base in kind.__mro__ if f.name in inspect.get_annotations(base))
        told = _helps(declared_in)[f.name]
        default = f.default
        if f.default_factory is not MISSING:
            # A list has its default in a function only.
            default = f.default_factory()
        # A base that is no group of its own, such as `Fitting`, has the group of the class that uses it.
        group = declared_in.__dict__.get("title", kind.title)
        found.append(
            OptionText(f.name, shown(kind, f.name), kinds[f.name], _as_typed(default), told, group, f.name in rare)
        )
    # In the order of a command's work.
    order = [kind.title, "model", "images", "training", "machine"]
    return sorted(found, key=lambda option: order.index(option.group))


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
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = ["Vision Transformers as recurrent dynamical systems.", "", "usage: raptor COMMAND [OPTIONS]", ""]
    lines += [f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    last = [
        "raptor COMMAND --help shows a command's options with examples.",
        "raptor completion bash (or zsh) prints a script that completes commands and options in your shell.",
    ]
    return "\n".join([*lines, "", *last])


def usage_of(name: str) -> str:
    kind = COMMANDS[name][0]
    first = kind.POSITIONAL[0] if kind.POSITIONAL else ""
    if first not in WORDS_FIRST:
        return f"raptor {name} [OPTIONS]"
    word = first.upper().removesuffix("S")
    word = {"models": f"{word} [{word} ...]", "filter": f"[{word}]"}.get(first, word)
    if "image" in kind.POSITIONAL:
        word += " IMAGE"
    return f"raptor {name} {word} [OPTIONS]"


def help_of(name: str, everything: bool = False) -> str:
    """The options of a command in groups: a line for each of the common ones, or all of them in full.

    The common ones of every command fit a screen of 40 lines.
    """
    kind = COMMANDS[name][0]
    lines = [f"usage: {usage_of(name)}", str(kind.__doc__)]
    lines += [f"  {example}" for example in EXAMPLES[name]]
    lines.append("")
    group = ""
    for option in options_of(kind):
        if option.is_rare and not everything:
            continue
        if option.group != group:
            lines.append(f"{option.group}:")
            group = option.group
        lines += _lines(option, everything)
    lines += ["", f"  {'--config FILE.yaml':22} options from a file; those on the command line win"]
    if kind.POSITIONAL[0] in ("model", "models", "run"):
        stands_for = "a model of your own, or the teacher of a run"
        if name == "report":
            stands_for = "the run's teacher"
        lines.append(f"  --module FILE.py:NAME  {stands_for}; runs that file")
    lines.append(f"  {'--json':22} print the result as JSON")
    if not everything and any(option.is_rare for option in options_of(kind)):
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
    # One line for each option, so that the help of every command fits a screen.
    return [start + textwrap.shorten(text, _WIDTH - len(start), placeholder=" ...")]


def completion(words: Sequence[str]) -> str:
    """A script that completes commands, options and their choices: `eval "$(raptor completion bash)"`."""
    # zsh takes the script of bash with bashcompinit. Any other shell would need a script of its own.
    if list(words) not in (["bash"], ["zsh"]):
        raise ValueError("say which shell: raptor completion bash, or raptor completion zsh")
    commands: list[str] = []
    choices: dict[str, tuple[str, ...]] = {}
    for name, (kind, _) in COMMANDS.items():
        flags = [shown(kind, option) for option in kind.kinds() if option not in WORDS_FIRST]
        commands.append(f"    {name}) words='{' '.join([*flags, '--config', '--json', '--help'])}' ;;")
        choices |= {f"--{option}": choices_of(of) for option, of in kind.kinds().items() if choices_of(of)}
    lines = [
        "_raptor() {",
        "  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=",
        f"  local commands='{' '.join(COMMANDS)} completion'",
        '  if (( COMP_CWORD == 1 )); then COMPREPLY=($(compgen -W "$commands" -- "$current")); return; fi',
        '  case "${COMP_WORDS[1]}" in',
        *commands,
        "  esac",
        '  case "$before" in',
        *(f"    {flag}) words='{' '.join(values)}' ;;" for flag, values in choices.items()),
        '    *) [[ $current == -* ]] || { COMPREPLY=($(compgen -f -W scenes -- "$current")); return; } ;;',
        "  esac",
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        # `-o filenames` puts a slash behind a folder, and escapes spaces in names.
        "complete -o filenames -F _raptor raptor",
    ]
    start = ["autoload -U +X bashcompinit && bashcompinit"] if words[0] == "zsh" else []
    return "\n".join([*start, *lines])
