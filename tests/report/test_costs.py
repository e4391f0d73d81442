"""Costs and tables: those of the certificate, and beside every share the one of a predictor without a model."""

from __future__ import annotations

import re
from pathlib import Path

from raptor.report.charts import percent
from raptor.report.costs import tables
from raptor.report.fidelity import fidelity
from raptor.report.results import Results, read_results


def test_without_a_certificate_there_are_no_costs(committed: Results) -> None:
    assert all("ε that holds" not in str(part) for part in tables(committed))


def test_every_share_has_its_floor(full_run: Path) -> None:
    results = read_results(full_run)
    certificate = results.certificate
    assert certificate is not None and set(certificate.floors) == {"accuracy", "agreement"}
    html = fidelity(results).html
    rows = dict(re.findall(r"<th[^>]*>([^<]*?)</th>(<td>.*?)</tr>", html))
    kept = next(cells for name, cells in rows.items() if "accuracy kept" in name)
    floor = certificate.floors["accuracy"] / certificate.predictions["teacher_accuracy"].value
    assert kept.endswith(f"<td>{percent(floor)}</td>")
    shifted = next(cells for name, cells in rows.items() if name == "noise:3")
    assert shifted.endswith(f"<td>{certificate.shift[0].floor:.3f}</td>")
