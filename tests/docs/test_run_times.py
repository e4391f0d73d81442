"""docs/run-times.md: a time that names a JSON file is the time in that file."""

from __future__ import annotations

import json
import re

import pytest
from pages import ROOT, read

ROWS = [line for line in read("docs/run-times.md").splitlines() if "[JSON](" in line]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_time_is_that_of_its_file(row: str) -> None:
    *_, time, link, _ = (cell.strip() for cell in row.split("|"))
    file = json.loads((ROOT / "docs" / re.findall(r"\((.+)\)", link)[0]).read_text())
    shown = float(re.match(r"[\d,.]+", time)[0].replace(",", ""))  # type: ignore[index]
    if "provenance" in file:
        assert time == f"{shown} s" and shown == file["provenance"]["seconds"]
    else:
        rates = re.findall(r"\"images_per_s\w*\": ([\d.]+)", json.dumps(file))
        assert shown in {round(float(rate)) for rate in rates}


def test_there_are_times_of_both_machines() -> None:
    assert len(ROWS) > 8 and all(name in read("docs/run-times.md") for name in ("Two CPU cores", "One NVIDIA H200"))
