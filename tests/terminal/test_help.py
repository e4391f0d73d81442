"""`--help`: what comes first, a line for each common option, every option on request."""

from __future__ import annotations

import pytest

from raptor.config import COMMANDS
from raptor.terminal.help import about, help_of, options_of, usage_of


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("phases", "raptor phases MODEL [MODEL ...] [OPTIONS]"),
        ("evaluate", "raptor evaluate RUN [OPTIONS]"),
        ("models", "raptor models [FILTER] [OPTIONS]"),
        ("demo", "raptor demo [OUT] [OPTIONS]"),
    ],
)
def test_usage_shows_the_words_that_come_first(name: str, usage: str) -> None:
    assert usage_of(name) == usage and help_of(name).startswith(f"usage: {usage}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen(name: str) -> None:
    lines = help_of(name).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 120
    assert all(f"  {line}" in lines for line in about(name)[1])


@pytest.mark.parametrize("name", COMMANDS)
def test_all_options_are_shown_on_request(name: str) -> None:
    shown = help_of(name, everything=True)
    for option in options_of(COMMANDS[name]):
        assert f"  {option.shown}" in shown
        assert option.help.split()[-1] in shown  # to its end


def test_an_option_shows_its_choices_and_its_default() -> None:
    lines = help_of("phases", everything=True)
    assert "{maxcut, dp, function}" in lines and "[1000]" in lines and "[maxcut]" in lines
    assert "--twin" in lines and "--twin" not in help_of("phases")
