from __future__ import annotations

import numpy as np

from raptor.report.charts import Chart, Series, number, rounded


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
    (saved,) = Chart("id", "lines", "title", "caption", "alt", [series]).to_dict()["series"]
    assert saved["y"] == [1.2346, None] and saved["cuts"] == {"3": [1, 2]}
    assert {"x", "z", "lower", "plain", "when"}.isdisjoint(saved)  # what it does not have takes no place


def test_a_choice_keeps_the_series_that_are_on_view_with_it() -> None:
    series = [Series("a", when={"tokens": ["cls", "every"]}), Series("b", when={"tokens": ["all"]}), Series("c")]
    chart = Chart("id", "lines", "title", "caption", "alt", series)
    assert [s.name for s in chart.only(tokens="every", measure="x").series] == ["a", "c"]
    assert [s.name for s in chart.only(tokens=("cls", "all")).series] == ["a", "b", "c"]
    assert chart.only(title="new").title == "new" and len(chart.series) == 3
