"""Shared options: defaults are filled in, unknown names are refused, every default has the type it declares."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypedDict, get_args, get_origin, get_type_hints

import pytest

from raptor import options
from raptor.options import Opening, Running, check_numbers, declared, part, takes_paths, with_defaults

GROUPS = [kind for kind in vars(options).values() if type(kind) is type(Opening) and kind is not TypedDict]


class OpeningRunning(Opening, Running, total=False):
    pass


def test_given_options_win_over_defaults():
    filled = with_defaults(OpeningRunning, {"device": "cpu", "size": 48})
    assert filled["device"] == "cpu" and filled["size"] == 48 and filled["weights"] is None
    assert filled.keys() == get_type_hints(OpeningRunning).keys()


def test_an_unknown_name_is_a_type_error_as_in_any_function():
    with pytest.raises(TypeError, match="unexpected argument 'devce': did you mean 'device'"):
        with_defaults(Running, {"devce": "cpu"})  # type: ignore[typeddict-unknown-key]


def test_part_keeps_only_the_options_of_a_group():
    filled = with_defaults(OpeningRunning, {})
    assert part(Running, filled).keys() == declared(Running).keys()
    assert part(Opening, {"size": 3, "other": 4}) == {"size": 3}


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_every_option_has_help_and_a_default_of_its_type(group):
    kinds = get_type_hints(group)
    for name, option in declared(group).items():
        assert option.help.endswith("."), name
        choices = get_args(kinds[name]) if get_origin(kinds[name]) is Literal else None
        if option.default is not None:
            assert option.default in choices if choices else isinstance(option.default, kinds[name]), name


def test_a_command_takes_paths_of_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")

    @takes_paths
    def command(*args: object, **options: object) -> list[object]:
        return [*args, *options.values()]

    told = command("~/run", ["~/a", "b~"], out=Path("~/x"), k=[2], data=("a", 3), name=None)
    assert told == ["/home/me/run", ["/home/me/a", "b~"], Path("/home/me/x"), [2], ("a", 3), None]


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (list[int] | None, "2", "--x must be whole numbers, got '2'"),
        (list[int] | None, [2, "3"], r"--x must be whole numbers, got \[2, '3'\]"),
        (int, "2", "--x must be a whole number, got '2'"),
        (float | None, "2", "--x must be a number, got '2'"),
        (bool, "false", "--x must be true or false, got 'false'"),
    ],
)
def test_text_is_no_number(kind: object, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_numbers({"x": kind}, {"x": value})
    check_numbers({"x": int | str, "y": kind, "z": str | None}, {"x": value, "y": 2, "z": "2", "other": "2"})
