from __future__ import annotations

from pathlib import Path

import figure5
import pytest


def test_figure5_asks_for_table1(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="table1"):
        figure5.run(table=str(tmp_path))
