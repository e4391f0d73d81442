"""The drawer for papers: what a description says is on the axes, and nothing that it does not say."""

from __future__ import annotations

import numpy as np

from raptor.report.charts import Axis, Chart, Figure, Series, of_group
from raptor.report.paper import draw


def chart(*series: Series, **changes: object) -> Chart:
    return Chart(**{"id": "id", "kind": "lines", "title": "t", "caption": "c", "alt": "a", "series": series, **changes})  # type: ignore[arg-type]


def test_axes_have_the_labels_scales_and_lines_of_the_description() -> None:
    described = chart(
        Series("curve", [1, 2, 3], [1.0, 10.0, 100.0], lower=[1, 2, 3], upper=[2, 3, 4]),
        x=Axis("layer l", integer=True),
        y=Axis("norm", log=True),
        phases=[1, 2],
        offset=0.5,
        level=7.0,
        mark=2,
    )
    (ax,) = draw(Figure([[described]], "title")).axes
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel(), ax.get_yscale()) == ("t", "layer l", "norm", "log")
    curve, *lines = ax.get_lines()
    assert [line.get_xdata()[0] for line in lines if line.get_xdata()[0] == line.get_xdata()[1]] == [1.5, 2]
    assert [line.get_ydata()[0] for line in lines if line.get_ydata()[0] == line.get_ydata()[1]] == [7.0]
    assert list(curve.get_ydata()) == [1.0, 10.0, 100.0] and len(ax.collections) == 1


def test_one_legend_names_sides_where_there_are_two() -> None:
    series = [
        of_group(group, side, [0, 1], [0, 1]) for side in ("teacher", "surrogate") for group in ("cls", "patches")
    ]
    null = Series("null: mean", [0, 1], [0, 1], colour="null-mean", side="null")
    (legend,) = draw(Figure([[chart(null, *series)] * 2])).legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["cls", "patches", "teacher", "surrogate", "null: mean"]
    (legend,) = draw(Figure([[chart(null, *series[:2])]])).legends
    assert [text.get_text() for text in legend.get_texts()] == ["cls", "patches", "null: mean"]


def test_heat_maps_of_one_unit_share_their_colours() -> None:
    first, second, other = (
        chart(Series("m", z=np.full((2, 2), value) + np.eye(2), unit=unit), kind="heatmap")
        for value, unit in ((0.0, "rad"), (5.0, "rad"), (9.0, "%"))
    )
    figure = draw(Figure([[first, second, other], [None]]))
    limits = [ax.get_images()[0].get_clim() for ax in figure.axes[:3]]
    assert limits == [(0, 6), (0, 6), (9, 10)]
    assert [ax.get_ylabel() for ax in figure.axes[6:]] == ["rad", "%"]  # one bar each
    assert not any(ax.axison for ax in figure.axes[3:6])


def test_null_models_do_not_rule_the_scale_and_own_curves_beyond_it_are_told_of() -> None:
    own, null = Series("cls", [1, 2], [-30.0, 0.9]), Series("null", [1, 2], [-900.0, 0.0], side="null")
    (ax,) = draw(Figure([[chart(own, null, y=Axis("R²", clip=(-1, 1)))]])).axes
    low, high = ax.get_ylim()
    assert -1.2 < low < -1 < 1 < high < 1.2
    assert [text.get_text() for text in ax.texts] == ["off the axis: cls to -30"]


def test_a_long_source_is_wrapped_under_the_title() -> None:
    figure = draw(Figure([[chart(Series("a", [0], [0]))]], "title", source="model " * 40))
    assert figure.get_suptitle().startswith("title\nmodel") and figure.get_suptitle().count("\n") > 2
