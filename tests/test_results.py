"""Every result of a command is short at a prompt, and a table, a data frame and a figure in a notebook."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from tiny_run import tiny_teacher

from raptor.commands import distill, dynamics, evaluate, models, phases, probe
from raptor.phases.outliers import Outliers
from raptor.streaming import Result, html_table

matplotlib.use("Agg")
FEW = {"data": "scenes", "num_images": 8, "batch_size": 8}


def check_result(result: Result, figure: bool = True) -> None:
    assert len(repr(result)) < 600 and repr(result).count("\n") < 10
    frame = result.to_dataframe()
    assert len(frame) == len(result.table_rows()) > 0
    assert "<table>" in result._repr_html_() and str(frame.columns[0]) in result._repr_html_()
    if figure:
        assert isinstance(result.plot(), Figure)
    else:
        with pytest.raises(ValueError, match="has no figure"):
            result.plot()


def test_an_opened_model_and_a_module_of_your_own_in_every_command(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    vit = tiny_teacher()
    assert len(repr(vit)) < 300
    check_result(phases(vit, k=[2], **FEW))
    check_result(phases(vit.model, k=[2], out="own", size=24, **FEW))
    check_result(dynamics(vit, sample_images=2, num_classes=0, interventions=False, **FEW))
    probed = probe(vit, data="scenes", train_images=32, num_images=8, closed_form="ridge", batch_size=8, out="probed")
    check_result(probed, figure=False)


def test_a_distillation_and_its_certificate(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = dict(phases=[2, 2], budget="2steps", batch_size=4, train_images=8, num_images=4)
    done = distill(tiny_teacher(), "scenes", out="run", **options)
    check_result(done)
    check_result(evaluate("run", teacher=tiny_teacher(), train_images=8, **FEW))


def test_names_have_no_figure() -> None:
    check_result(models("scenes"), figure=False)


class Drawn(Result):
    def plot(self) -> Figure:
        return plt.figure()


@pytest.mark.parametrize(("backend", "num_open"), [("module://matplotlib_inline.backend_inline", 0), ("agg", 1)])
def test_a_notebook_draws_a_figure_once(backend: str, num_open: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook shows the last value of a cell and all open figures; a script shows open figures only."""
    plt.close("all")
    monkeypatch.setattr(plt, "get_backend", lambda: backend)
    figure = Drawn().plot()
    assert isinstance(figure, Figure) and len(plt.get_fignums()) == num_open
    plt.close("all")


def test_a_record_with_arrays_is_short() -> None:
    zeros = np.zeros((500, 500))
    names = Outliers.__dataclass_fields__
    assert len(repr(Outliers(**dict.fromkeys(names, zeros)))) < 600


def test_cells_are_escaped_and_long_tables_cut() -> None:
    shown = html_table([{"name": "<script>"}] * 30)
    assert "<script>" not in shown and "10 more rows" in shown
