"""Studies of whole models, and the results that are committed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from earlier_files import kept

from raptor.data import iterate, open_data
from raptor.phases.study import PhasesFile, study_phases
from raptor.vit.open import open_vit

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("phases-*.json")), ids=lambda path: path.stem)
def test_committed_results_are_read_and_written_unchanged(path):
    found = PhasesFile.read_file(path)
    saved = json.loads(path.read_text())
    assert kept(found.to_dict(), saved) == saved
    entry = found.models[0]
    assert entry.chosen is not None and entry.chosen.num_layers == entry.model.num_layers == len(
        entry.similarity["all"]
    )


def test_the_suggested_cut_has_evidence_also_where_its_k_was_not_asked_for() -> None:
    teacher = open_vit("scenes")
    images = iterate(open_data("scenes", "val", limit=16, size=48), teacher.preprocess, 8)
    asked = study_phases(teacher, images, k=[2, 3, 4], twin=False)
    found = study_phases(teacher, images, k=[2], twin=False)
    assert found.chosen_k == asked.chosen_k and found.evidence[found.chosen_k] == asked.evidence[found.chosen_k]
