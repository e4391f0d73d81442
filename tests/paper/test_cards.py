"""The cards: their points, their verdicts, and that page, figures and JSON say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cards
import matplotlib
import pytest
from cards import CARDS, CardVerdict, draw, make_cards, makes_of, num_on_side
from claims_page import cards_page, verdict_words
from sweep import Json, as_json
from teacher_points import point

matplotlib.use("Agg")
ROOT = Path(__file__).parents[2]
HOLDS, FAILS, UNDETERMINED, NOT_COMPARABLE, NOT_TESTED = CardVerdict


@pytest.fixture(scope="module")
def committed() -> Json:
    found: Json = json.loads((ROOT / "paper" / "results" / "claims.json").read_text())
    return found


def card_of(values: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch, **given: Any) -> Json:
    """A card about these values of each make; five other cards that no test decides stand beside it."""
    points = [point(make, value) for make, teachers in values.items() for value in teachers]
    monkeypatch.setattr(cards, "points_of", lambda source, _rows: points if source == "here" else [])
    spec = {"name": "x", "points": ["here"], "above": 0, **given}
    other = {"name": "y", "points": [], "above": 0}
    return make_cards([], [spec, *[other] * 5])[0]


def test_a_card_holds_or_fails_by_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"a": [1.0], "b": [1.01], "c": [0.99]}
    assert card_of(values, monkeypatch)["verdict"] == HOLDS
    assert card_of(values, monkeypatch, above=2)["verdict"] == FAILS
    assert card_of(values, monkeypatch, above=0.999)["verdict"] == UNDETERMINED
    assert card_of(values, monkeypatch, above=0.9, below=1.1)["verdict"] == HOLDS
    assert card_of(values, monkeypatch, above=1.1, below=1.2)["verdict"] == FAILS


def test_many_teachers_of_two_makes_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    card = card_of({"a": [1.0] * 30, "b": [1.01] * 30}, monkeypatch)
    assert card["verdict"] == UNDETERMINED and card["evidence"] is None and num_on_side(card) == 2


def test_cards_that_could_not_be_decided_count_for_holm(monkeypatch: pytest.MonkeyPatch) -> None:
    card = card_of({"a": [1.0], "b": [1.4], "c": [0.8]}, monkeypatch)
    assert card["evidence"]["holm"] == pytest.approx(6 * card["evidence"]["p"])
    assert card["evidence"]["p"] < 0.05 < card["evidence"]["holm"] and card["verdict"] == UNDETERMINED


def test_a_verdict_that_no_test_decides_is_given_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    card = card_of({"a": [1.0], "b": [1.01], "c": [0.99]}, monkeypatch, verdict="not comparable", why="Other depth.")
    assert card["verdict"] == NOT_COMPARABLE and card["evidence"] is None
    assert verdict_words(as_json(card)) == "**Not comparable.** Other depth."
    for spec in CARDS:
        assert ("verdict" in spec) == ("why" in spec), spec["name"]


def test_ratios_and_makes_that_do_not_meet_the_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    card = card_of({"a": [10.0], "b": [100.0], "c": [1000.0]}, monkeypatch, above=1, log=True)
    assert card["evidence"]["value"] == pytest.approx(100)
    card = card_of({"a": [1.0], "b": [-1.0]}, monkeypatch, only=["a"])
    assert list(makes_of(card)) == ["a"] and len(card["points"]) == 2


def test_the_committed_cards_are_what_the_recorded_results_give(committed: Json) -> None:
    found = as_json(make_cards(committed["claims"]))
    assert [card["name"] for card in found] == [card["name"] for card in committed["cards"]]
    for ours, theirs in zip(found, committed["cards"], strict=True):
        assert ours["verdict"] == theirs["verdict"], ours["name"]
        assert len(ours["points"]) == len(theirs["points"])
        for a, b in zip(ours["points"], theirs["points"], strict=True):
            assert a == {**b, "value": pytest.approx(b["value"], rel=1e-9)}
        if theirs["evidence"] is not None:
            assert ours["evidence"] == pytest.approx(theirs["evidence"], rel=1e-6)


def test_the_page_is_that_of_the_json(committed: Json) -> None:
    page = (ROOT / "docs" / "results" / "claims.md").read_text()
    assert page == cards_page(committed)
    assert len(page.split()) <= 3500
    for number, card in enumerate(committed["cards"], start=1):
        _, _, rest = page.partition(f"## {number}. {card['title']}\n")
        own = rest.partition("\n## ")[0]
        assert card["says"] in own and f"**{card['verdict'].capitalize()}.**" in own and card["changes"] in own
        assert card["command"] in own
        if card["evidence"] is not None:
            assert f"[{card['evidence']['lower']:.3g}, {card['evidence']['upper']:.3g}]" in own
        if card["figure"]:
            assert (ROOT / card["figure"]).exists() and Path(card["figure"]).name in own


def test_every_recipe_and_script_of_a_command_exists(committed: Json) -> None:
    for card in committed["cards"]:
        for word in card["command"].split():
            if word.startswith(("paper/", "benchmarks/")):
                assert (ROOT / word).exists(), card["name"]


def test_numbers_in_the_remarks_are_those_of_the_points(committed: Json) -> None:
    by_name = {card["name"]: card for card in committed["cards"]}

    def value(name: str, make: str, kind: str = "trained") -> float:
        (found,) = {p["value"] for p in by_name[name]["points"] if p["make"] == make and p["kind"] == kind}
        return float(found)

    assert "Five times steadier" in by_name["steadiness"]["note"]
    assert 1 / value("steadiness", "DINOv2-S") == pytest.approx(5, abs=0.05)
    assert value("steadiness", "DINOv2-S", "rank of the last update") == pytest.approx(1 / 3, abs=0.02)
    assert value("autonomy", "DINOv2-S") == pytest.approx(1 / 3, abs=0.04)
    assert value("direction", "ViT-B (authors)", "published") == 0.25
    assert value("direction", "DINOv2-S", "untrained") == pytest.approx(0.95, abs=0.005)
    assert round(value("peak", "imagenet-20"), 3) == 0.021
    times = sorted(p["value"] for p in by_name["run-time"]["points"])
    assert times[0] > 1 and times[1] < 1.085 and 1.35 < times[2] < times[3] < 1.55


def test_every_point_of_a_card_is_drawn(committed: Json) -> None:
    for name in ("similarity", "norms"):
        (card,) = [card for card in committed["cards"] if card["name"] == name]
        (axes,) = draw(card).axes
        drawn = [line for line in axes.lines if not line.get_label().startswith("_")]
        assert sum(len(line.get_xdata()) for line in drawn) == len(card["points"])
        cards.pyplot().close("all")
