from __future__ import annotations

import numpy as np

from raptor.report.charts import Axis, Chart, Section, Series, described, descriptions, number, rounded


def test_numbers_for_text_and_pages() -> None:
    assert [number(v) for v in (0.123456, 12, 1234.5, None, float("nan"), 123456)] == [
        "0.123",
        "12",
        "1,234",
        "–",
        "–",
        "123,456",
    ]
    assert rounded({"a": [1.23456789, float("inf"), 3, True, "x"]}) == {"a": [1.2346, None, 3, True, "x"]}


def test_a_chart_holds_arrays_as_lists_that_json_can_hold() -> None:
    series = Series("a", y=np.array([1.23456789, np.nan]), cuts={3: (1, 2)})
    (saved,) = Chart("id", "lines", "title", [series]).to_dict()["series"]
    assert saved["y"] == [1.2346, None] and saved["cuts"] == {"3": [1, 2]}
    assert {"x", "z", "lower", "plain", "when"}.isdisjoint(saved)  # what it does not have takes no place


def test_a_choice_keeps_the_series_that_are_on_view_with_it() -> None:
    series = [Series("a", when={"tokens": ["cls", "every"]}), Series("b", when={"tokens": ["all"]}), Series("c")]
    chart = Chart("id", "lines", "title", series)
    assert [s.name for s in chart.only(tokens="every", measure="x").series] == ["a", "c"]
    assert [s.name for s in chart.only(tokens=("cls", "all")).series] == ["a", "b", "c"]
    assert len(chart.series) == 3


def test_a_chart_is_told_in_words_with_its_numbers() -> None:
    curve, matrix = Series("cls", [0, 1, 2], np.array([np.nan, 1.5, 40.0])), Series("scenes", z=np.array([[1, 0.25]]))
    chart = Chart("id", "lines", "Norm", [curve], x=Axis("layer l"), y=Axis("mean norm"))
    assert chart.words() == "Norm: mean norm by layer l. cls from 1.5 to 40."
    assert Chart("id", "heatmap", "Map", [matrix], alt="In two").words() == "Map: scenes from 0.25 to 1. In two."


def test_the_words_of_every_chart_say_what_to_look_for() -> None:
    for name, words in descriptions().items():
        assert words["title"] and words["caption"].rstrip().endswith((".", "}")) and words["file"], name
    block = described("dynamics-speed", [Series("a", [1, 2], [0.1, 0.2])], phases=[1, 1])
    assert (block.offset, block.x.integer, block.y.from_zero, block.file) == (0.5, True, True, "dynamics.json")
    assert described("dynamics-norm", []).offset == 0
    assert "rank-4 linear map" in described("reconstruction", [], {"rank": 4}).caption


def test_a_chart_has_the_choosers_of_its_description() -> None:
    series = [Series(cost, when={"model": ["twin"], "cost": [cost]}) for cost in ("milliseconds", "gflops")]
    model, cost = described("depth", series, {"images": "4 images"}).controls
    assert (model.name, model.label, model.options, model.start) == ("model", "Model", [("twin", "twin")], "twin")
    assert cost.options == [("milliseconds", "ms per image"), ("gflops", "GFLOPs per image")]
    shares = [Series("a", when={"share": [share], "given": ["donor"]}) for share in ("0.1", "0.5")]
    share, _ = described("tangents-transplants", shares, values={"share": {"0.5": "50%"}}).controls
    assert share.options == [("0.1", "0.1"), ("0.5", "50%")] and share.start == "0.5"
    assert described("tangents-transplants", shares, starts={"share": "0.1"}).controls[0].start == "0.1"


def test_a_section_of_a_model_by_itself_does_not_speak_of_two() -> None:
    for name in ("dynamics", "probes", "seen"):
        assert {"surrogate", "teacher"}.isdisjoint(Section.named(name, has_surrogate=False).lead.split()), name
        assert Section.named(name).lead != Section.named(name, has_surrogate=False).lead
    section = Section.named("tool")
    section.add_part("edit", "body", images="8 images")
    assert section.body[1] == "body" and "Editing" in section.html and "Measured on 8 images." in section.html
