from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from raptor.experiments import claims
from raptor.experiments.verdicts import NOT_RUN
from raptor.run import RunError

DOCS = Path(__file__).parents[2] / "docs" / "results" / "experiments"


def test_the_page_says_what_was_not_run(sweep_folder: Path, tmp_path: Path) -> None:
    results = tmp_path / "results" / "sweep"
    results.mkdir(parents=True)
    for kind in ("json", "md", "png"):
        (results / f"stochastic-depth.{kind}").write_bytes((sweep_folder / f"stochastic-depth.{kind}").read_bytes())
    (tmp_path / "results" / "other.json").write_text(json.dumps({"rows": []}))
    (tmp_path / "results" / "reading.md").write_text("All in all.\n")
    (results / "reading.md").write_text("It rises.\n")
    page = claims.run(results=str(tmp_path / "results"))
    text = (tmp_path / "results" / "experiments.md").read_text()
    places = [text.index(part) for part in ("All in all.", "## Paper says", "stochastic-depth.png", "It rises.")]
    assert places == sorted(places) and text.count("It rises.") == 1
    assert "![When block recurrence emerges](sweep/stochastic-depth.png)" in text
    assert text.count("Not run: `raptor reproduce") == 5
    by_experiment = {c.where: c.agrees for c in page.claims}
    assert by_experiment["swaps"] == NOT_RUN and by_experiment["stochastic-depth, scenes"] != NOT_RUN
    assert all(c.says in text for c in page.claims)


def test_the_page_in_the_docs_is_what_the_results_in_the_docs_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(DOCS.parents[2])
    page = claims.run(results="docs/results/experiments", out=str(tmp_path / "experiments.md"))
    written = (tmp_path / "experiments.md").read_text()
    expected = (DOCS / "experiments.md").read_text()
    # Links are relative to the page.
    links = os.path.relpath(DOCS, tmp_path)
    assert written.replace(f"{links}/", "") == expected
    assert len({claim.where for claim in page.claims}) == 7


def test_a_damaged_result_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "swaps.json").write_text(json.dumps({"experiment": "swaps", "rows": [{"phases": 3}]}))
    with pytest.raises(RunError, match=r"swaps.json cannot be read .*rows.0..phases.*run the command that made it"):
        claims.run(results=str(tmp_path))
