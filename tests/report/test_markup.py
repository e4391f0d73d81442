from __future__ import annotations

import json

import pytest

from raptor.report.markup import safe_json, table


def test_safe_json_closes_no_script() -> None:
    value = {"</script><!--": "a\u2028b & <b>"}
    text = safe_json(value)
    assert "<" not in text and "\u2028" not in text and json.loads(text) == value
    with pytest.raises(ValueError):
        safe_json(float("nan"))


def test_tables_escape_their_cells() -> None:
    assert "<b>" not in table(("<b>",), [("<b>", "<b>")])
