"""What is read from the source of a command is what its imported function takes."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import get_args, get_type_hints

import pytest

from raptor.cli import COMMANDS
from raptor.options import declared
from raptor.signatures import Foreign, read_signature


def every_function() -> list[str]:
    return [where for where, _ in COMMANDS.values()]


@pytest.mark.parametrize("where", every_function())
def test_names_defaults_and_docstring_are_those_of_the_function(where: str) -> None:
    module, _, name = where.partition(":")
    function = inspect.unwrap(getattr(import_module(module), name))
    expected = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            (group,) = get_args(get_type_hints(function)[parameter.name])
            expected |= {option: entry.default for option, entry in declared(group).items()}
        else:
            expected[parameter.name] = parameter.default
    found = read_signature(where)
    assert [p.name for p in found.parameters] == list(expected)
    assert {p.name: p.default for p in found.parameters if not p.is_required} == {
        option: default for option, default in expected.items() if default is not inspect.Parameter.empty
    }
    assert found.doc == inspect.getdoc(function)


def test_what_is_not_imported_stands_as_foreign() -> None:
    model = read_signature("raptor.train.distill:distill").parameters[0]
    assert model.name == "model" and {str, Foreign} <= set(get_args(model.kind))
