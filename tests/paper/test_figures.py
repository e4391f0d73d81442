from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import stochastic_depth
from figures import figure_stochastic_depth, figure_swaps
from records import Compared, GroupCurves, StochasticDepth, SwapRow

from raptor.report.style import save_figure


def test_a_raptor_that_diverged_is_still_drawn(sweep_folder: Path) -> None:
    rows = StochasticDepth.read(sweep_folder).rows
    raptor = rows[0].raptor
    curves = {
        group: GroupCurves(**{name: [*curve[:-1], None] for name, curve in vars(found).items()})
        for group, found in raptor.curves.items()
    }
    rows[0] = replace(rows[0], raptor=replace(raptor, bounded_r2_last=None, curves=curves))
    found = StochasticDepth(rows=rows, statistics=stochastic_depth.statistics(rows))
    figure = figure_stochastic_depth(found)
    assert len(save_figure(figure, sweep_folder / "diverged", ("png",))) == 1


def test_swaps_of_a_model_without_classifier_show_the_angle(tmp_path: Path) -> None:
    means = Compared(within=0.1, across=0.3, within_matched=None, across_matched=0.2)
    pairs = [(1, 2), (1, 3), (2, 3)]
    row = SwapRow(cell="model", phases=[2, 1], pairs=pairs, compared={"all": means}, angle=[0.1, 0.3, 0.2])
    figure = figure_swaps([row])
    labels = {ax.get_ylabel() for part in figure.subfigs for ax in part.axes}
    assert "turn (rad), mean over pairs" in labels
    assert len(save_figure(figure, tmp_path / "swaps", ("png",))) == 1
    long = figure_swaps([replace(row, cell="timm_vit_base_patch16_224")]).subfigs[0].axes[0].get_title(loc="left")
    assert long == "timm_vit_base_\npatch16_224"
