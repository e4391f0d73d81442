from __future__ import annotations

import numpy as np

from raptor.report.charts import Chart, number, rounded


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
    series = {"name": "a", "y": np.array([1.23456789, np.nan]), "cuts": {3: (1, 2)}}
    saved = Chart("id", "lines", "title", "caption", "alt", [series]).to_dict()
    assert saved["series"] == [{"name": "a", "y": [1.2346, None], "cuts": {"3": [1, 2]}}]
