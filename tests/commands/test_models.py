"""raptor models: names as text and as JSON."""

from __future__ import annotations

import json

import pytest

from raptor.cli import main
from raptor.commands.models import models


def test_models_as_text_and_as_json(capsys):
    assert main(["models", "scenes"]) == 0
    text = capsys.readouterr().out
    assert main(["models", "scenes", "--json"]) == 0
    names = json.loads(capsys.readouterr().out)["models"]
    assert names == ["scenes", "scenes-k2", "scenes-k3"] == text.splitlines()[:3]
    assert "3 names" in text


def test_a_filter_without_a_match_says_what_to_try() -> None:
    with pytest.raises(ValueError, match="no model matches 'no-such-model'"):
        models("no-such-model")
