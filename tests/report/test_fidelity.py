"""Fidelity: curves, null models, costs and tables are those of the certificate or the summary."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raptor.certificate.autonomy import Autonomy, Price
from raptor.certificate.certificate import Certificate
from raptor.certificate.verdict import Estimate
from raptor.report.fidelity import certificate_charts, fidelity, rate_charts
from raptor.report.figures import drawn, on_paper
from raptor.report.results import Results, read_results
from raptor.vit.pair import OTHER_TEACHER

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_the_certificate_gives_curves_null_models_and_costs(full_run: Path) -> None:
    results = read_results(full_run)
    certificate = results.certificate
    assert certificate is not None
    section = fidelity(results)
    charts = {chart.id: chart for chart in section.charts}
    series = charts["fidelity-r2"].series
    nulls = [s for s in series if s.side == "null"]
    assert len(series) - len(nulls) == len(certificate.curves.groups)
    assert len(nulls) == len(certificate.nulls) * len(certificate.curves.groups)
    (cls,) = (s for s in series if s.colour == "cls")
    np.testing.assert_array_equal(cls.y, certificate.curves.r2["cls"])
    teacher, surrogate = (certificate.costs[side].block_parameters / 1e6 for side in ("teacher", "surrogate"))
    row = f"block parameters (M)</th><td>{teacher:.3f}</td><td>{surrogate:.3f}</td>"
    assert row in section.html and not section.hint
    size = f"{certificate.image_size} px"
    assert f"measured on 24 held-out images of scenes at {size}, against scenes" in section.html


def test_a_summary_gives_curves_and_asks_for_the_certificate(committed: Results) -> None:
    section = fidelity(committed)
    assert committed.curves is not None
    chart = next(chart for chart in section.charts if chart.id == "fidelity-relative")
    (every,) = (s for s in chart.series if s.colour == "all")
    np.testing.assert_array_equal(every.y, committed.curves.relative["all"])
    assert section.hint == "raptor evaluate"


def test_another_teacher_is_named_with_the_images(committed: Results) -> None:
    saved = Certificate.read_file(RESULTS / "dinov2s-732-certificate.json")
    name = f"m2{OTHER_TEACHER}"
    html = fidelity(replace(committed, certificate=replace(saved, teacher=name, data="photos"))).html
    assert f"images of photos, against {name}" in html


def test_the_section_goes_from_the_verdict_to_the_tables(full_run: Path, full_page: str) -> None:
    section = fidelity(read_results(full_run))
    parts = re.findall(r'<h3 class="part">(.*?)</h3><p class="caption">(.+?)</p>', section.html)
    assert [title for title, _ in parts] == [
        "Verdict",
        "Worst images",
        "Layer by layer",
        "Where the error is made",
        "Rate and distortion",
        "Other images",
        "Scores and costs",
    ]
    assert all(chart.caption for chart in section.charts)
    certificate = read_results(full_run).certificate
    assert certificate is not None and certificate.definition is not None
    assert section.html.index(escape(certificate.definition.line())) < section.html.index("<img")
    picture = re.search(r'<img src="data:image/png;base64,([^"]+)" alt="([^"]+)">', section.html)
    assert picture is not None and picture[2] == certificate.definition.worst_image
    assert Image.open(io.BytesIO(base64.b64decode(picture[1]))).size == (48, 48)


@pytest.mark.usefixtures("drawn_figures")
def test_stitching_and_rates_are_drawn_from_their_files(full_run: Path, tmp_path: Path) -> None:
    results = read_results(full_run)
    certificate, complexity = results.certificate, results.complexity
    assert certificate is not None and certificate.stitching is not None
    assert complexity is not None and complexity.rates is not None
    charts = {chart.id: chart for chart in fidelity(results).charts}
    by_teacher, by_surrogate = charts["stitching"].series
    np.testing.assert_array_equal(by_teacher.y, certificate.stitching.by_teacher.error)
    np.testing.assert_array_equal(by_surrogate.y, certificate.stitching.by_surrogate.error)
    assert list(by_teacher.x) == list(range(13)) and len(charts["stitching-agreement"].series) == 2
    teacher, surrogate = charts["rate-error"].series
    assert teacher.text == ["int3", "int4", "int6", "int8"] and surrogate.text == ["int4", "int8", "fp16"]
    points = {(p.side, p.precision): p for p in complexity.rates.points}
    assert teacher.y == [points["teacher", name].largest for name in teacher.text]
    assert surrogate.x == [points["surrogate", name].bits / 1e6 for name in surrogate.text]
    assert {"rate-last", "rate-agreement"} <= charts.keys()
    for name, found, num in (
        ("stitching", certificate_charts(certificate), 2),
        ("rate-distortion", rate_charts(complexity), 3),
    ):
        figure = drawn(name, found, "")
        figure.savefig(tmp_path / f"{name}.png")
        assert len(figure.axes) == num
    assert on_paper("stitching", certificate_charts(replace(certificate, stitching=None))) is None
    assert rate_charts(replace(complexity, rates=None)) == []


def test_the_price_of_non_autonomy_is_a_number(full_run: Path) -> None:
    results = read_results(full_run)
    certificate = results.certificate
    assert certificate is not None and "price of non-autonomy" not in fidelity(results).html
    prices = {"r2_last": Price(0.9, 0.7, Estimate(0.2, 0.1, 0.3))}
    priced = replace(certificate, autonomy=Autonomy("runs/plain", prices))
    html = fidelity(replace(results, certificate=priced)).html
    assert "autonomous (runs/plain; how it was trained is not known)" in html
    assert "<td>0.900</td><td>0.700</td><td>0.200 [0.100, 0.300]</td>" in html
    assert "each depth has a learned row of scales and shifts, 1,024 parameters" in html


def test_the_ratio_of_bounds_says_that_it_is_no_evidence(full_run: Path) -> None:
    results = read_results(full_run)
    assert results.complexity is not None
    assert "is no evidence of compression" in fidelity(results).html
    without = replace(results, complexity=replace(results.complexity, rates=None))
    assert "is no evidence of compression" in fidelity(without).html


def test_each_null_model_is_named_once_for_all_token_groups(committed: Results) -> None:
    certificate = Certificate.read_file(RESULTS / "dinov2s-732-certificate.json")
    html = fidelity(replace(committed, certificate=certificate)).html
    groups = certificate.judged.groups
    (compared,) = [table for table in re.findall(r"<table.*?</table>", html) if "null models, last layer" in table]
    _, *rows = re.findall(r"<tr>(.*?)</tr>", compared)
    for row, group in zip(rows, groups.values(), strict=True):
        assert f"<td>{group.r2_last}</td>" in row and f"<td>{group.compared()}</td>" in row


def test_every_share_has_its_floor(full_run: Path) -> None:
    results = read_results(full_run)
    certificate = results.certificate
    assert certificate is not None and set(certificate.floors) == {"accuracy", "agreement"}
    html = fidelity(results).html
    rows = dict(re.findall(r"<th[^>]*>([^<]*?)</th>(<td>.*?)</tr>", html))
    kept = next(cells for name, cells in rows.items() if "accuracy kept" in name)
    floor = certificate.floors["accuracy"] / certificate.predictions["teacher_accuracy"].value
    assert kept.endswith(f"<td>{floor:.1%}</td>")
    shifted = next(cells for name, cells in rows.items() if name == "noise:3")
    assert shifted.endswith(f"<td>{certificate.shift[0].floor:.3f}</td>")
