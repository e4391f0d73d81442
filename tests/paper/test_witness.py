"""Numbers that follow from the authors' published matrix."""

from __future__ import annotations

import json
from math import cos
from pathlib import Path

import numpy as np
import pytest
from known_matrices import DISTANCE, TABLE_3
from quantities import rows_of_table_3
from witness import Witness, main, witness

SAVED = Path(__file__).parents[2] / "docs" / "results" / "dynamics" / "authors-vitb.json"


def test_gamma_and_the_last_turn_of_the_known_matrices() -> None:
    found = witness(DISTANCE)
    assert found["gamma"][-2] == pytest.approx(0.25) and found["gamma"][-1] == 1
    assert found["last_turn"] == pytest.approx(1.318, abs=1e-3) and cos(found["last_turn"]) == pytest.approx(0.25)
    assert found["last_turn_ends"][0] < found["last_turn"] < found["last_turn_ends"][1]
    assert found["phases"] == {str(k): list(lengths) for k, lengths in TABLE_3.items()}
    assert rows_of_table_3(found).value == 3
    assert found["above_smooth"]["3"] == pytest.approx(0.4555 - 0.3216, abs=1e-4)  # it has boundaries
    distance = np.abs(np.arange(12)[:, None] - np.arange(12)) / 12
    assert witness(distance)["above_smooth"]["3"] == pytest.approx(0, abs=1e-9)  # one that changes gradually has none


def test_the_committed_witness_is_that_of_the_matrix(tmp_path: Path) -> None:
    np.savetxt(tmp_path / "distance.csv", DISTANCE, delimiter=",")
    found = main(Witness(csv=str(tmp_path / "distance.csv"), out=str(tmp_path / "out.json")))
    assert json.loads(SAVED.read_text()) == json.loads((tmp_path / "out.json").read_text()) == found
    with pytest.raises(ValueError, match="must be square"):
        witness(DISTANCE[:3])
