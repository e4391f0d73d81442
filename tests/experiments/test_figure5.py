from __future__ import annotations

from pathlib import Path

import pytest

from raptor.experiments import figure5


def test_figure5_asks_for_table1(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run raptor reproduce table1"):
        figure5.run(table=str(tmp_path))
