"""The arguments of a command, read from its source without importing it.

Importing a command imports torch, which takes seconds. Reading its file is enough to know its options, so that
`--help` and errors of usage answer at once. Only assignments, annotations and defaults of raptor's own files are
evaluated; a name from elsewhere (torch, numpy) stands as `Foreign`.
"""

from __future__ import annotations

import ast
import builtins
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_type_hints

_ROOT = Path(__file__).parent
_EVALUATED = ("typing", "types", "collections.abc", "pathlib", "raptor.options")  # quick to import, so really imported


class _ForeignType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, _index: Any) -> Any:
        return cls


class Foreign(metaclass=_ForeignType):
    """A type that is not imported here, such as `torch.nn.Module`."""


NO_DEFAULT = object()


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function; `help` is that of a shared option (`**given: Unpack[...]`)."""

    name: str
    kind: Any
    default: Any = NO_DEFAULT
    is_keyword_only: bool = False
    help: str = ""

    @property
    def is_required(self) -> bool:
        return self.default is NO_DEFAULT


@dataclass(frozen=True)
class Signature:
    """The parameters of a function in its order, those of its shared options last, and its docstring."""

    parameters: list[Parameter]
    doc: str


def read_signature(where: str) -> Signature:
    """The signature of the function at `where`, written `raptor.commands.phases:phases`."""
    module, _, name = where.partition(":")
    source, node = _find(_source(module), name)
    assert isinstance(node, ast.FunctionDef), where
    parameters, arguments = [], node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(positional, defaults):
        parameters.append(source.parameter(argument, default, False))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        parameters.append(source.parameter(argument, default, True))
    if arguments.kwarg is not None and isinstance(arguments.kwarg.annotation, ast.Subscript):
        for option, hint in source.group(arguments.kwarg.annotation.slice).items():
            declared = hint.__metadata__[0]
            kind: Any = Literal[declared.choices] if declared.choices else hint.__origin__
            if declared.choices and declared.default is None:
                kind = kind | None
            parameters.append(Parameter(option, kind, declared.default, True, declared.help))
    return Signature(parameters, ast.get_docstring(node) or "")


class _Source:
    """A file of raptor: its top-level names, evaluated when they are asked for."""

    def __init__(self, module: str):
        self.module = module
        path = _ROOT.joinpath(*module.split(".")[1:])
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        self.nodes: dict[str, ast.stmt] = {}
        self.imports: dict[str, tuple[str, str]] = {}  # name -> module, and the name there ("" for a module)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                self.imports |= {a.asname or a.name: (node.module, a.name) for a in node.names}
            elif isinstance(node, ast.Import):
                self.imports |= {a.asname or a.name.split(".")[0]: (a.name, "") for a in node.names}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.nodes[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.nodes[node.targets[0].id] = node
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                self.nodes[node.target.id] = node

    def parameter(self, argument: ast.arg, default: ast.expr | None, is_keyword_only: bool) -> Parameter:
        kind = Any if argument.annotation is None else self.evaluate(argument.annotation)
        value = NO_DEFAULT if default is None else self.evaluate(default)
        assert value is not Foreign, f"{self.module}: the default of {argument.arg} cannot be read without importing"
        return Parameter(argument.arg, kind, value, is_keyword_only)

    def evaluate(self, node: ast.expr) -> Any:
        code = compile(ast.Expression(node), self.module, "eval", dont_inherit=True)
        return eval(code, {"__builtins__": {}}, _Scope(self))

    def value(self, name: str) -> Any:
        node = self.nodes.get(name)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            return self.evaluate(node.value)
        if name in self.imports:
            module, inner = self.imports[name]
            if module in _EVALUATED or module in sys.builtin_module_names:
                return getattr(import_module(module), inner) if inner else import_module(module)
            if module.startswith("raptor.") and inner and _is_module(module):
                return _source(module).value(inner)
        return getattr(builtins, name) if node is None and hasattr(builtins, name) else Foreign

    def group(self, node: ast.expr) -> dict[str, Any]:
        """The hints of a group of options (a TypedDict), also those of the groups it inherits from."""
        if not isinstance(node, ast.Name) or node.id in ("TypedDict", "dict"):
            return {}
        source, found = _find(self, node.id)
        if source.module == "raptor.options":
            return get_type_hints(getattr(import_module("raptor.options"), node.id), include_extras=True)
        assert isinstance(found, ast.ClassDef), node.id
        hints: dict[str, Any] = {}
        for base in found.bases:
            hints |= source.group(base)
        for entry in found.body:
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                hints[entry.target.id] = source.evaluate(entry.annotation)
        return hints


class _Scope(dict[str, Any]):
    def __init__(self, source: _Source):
        super().__init__()
        self._source = source

    def __missing__(self, name: str) -> Any:
        return self._source.value(name)


def _find(source: _Source, name: str) -> tuple[_Source, ast.stmt]:
    """Where a name is defined, through `from raptor.x import name`."""
    while name not in source.nodes:
        module, name = source.imports[name]
        source = _source(module)
    return source, source.nodes[name]


@cache
def _source(module: str) -> _Source:
    return _Source(module)


def _is_module(module: str) -> bool:
    path = _ROOT.joinpath(*module.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()
