"""Charts of dynamic mode decomposition: eigenvalues, singular spectra, reconstruction, the sweep over ranks."""

from __future__ import annotations

from typing import Any

from raptor.report.charts import EVERY, Chart, number, series_name

GROUPS = ("all", "cls", "registers", "patches")
MAX_POINTS = 96  # eigenvalues drawn for one group of one side


def mode_charts(sides: dict[str, Any], phases: list[int] | None) -> list[Chart]:
    found = {
        side: {g: measures["modes"][g] for g in GROUPS if g in measures["modes"]}
        for side, measures in sides.items()
        if measures.get("modes")
    }
    return [_eigenvalues(found), _spectrum(found), _reconstruction(found, phases), _sweep(found)] if found else []


def _each(found: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(side, group, modes) for side, groups in found.items() for group, modes in groups.items()]


def _eigenvalues(found: dict[str, Any]) -> Chart:
    series = []
    for side, group, modes in _each(found):
        flat = [v for row in modes["eigenvalues"] for v in row if v and v[0] is not None and v[1] is not None]
        flat = flat[:: -(-len(flat) // MAX_POINTS) or 1]
        series.append({
            **series_name(group, side), "x": [v[0] for v in flat], "y": [v[1] for v in flat],
            "when": {"tokens": [group, EVERY]},
        })  # fmt: skip
    side, group, first = _each(found)[0]
    radius, modulus = first["spectral_radius"]["mean"], first["median_modulus"]["mean"]
    return Chart(
        id="eigenvalues", kind="points", title="DMD eigenvalues", series=series,
        caption="Inside the circle contracts, the angle rotates. Look for a cluster near +1.",
        alt=f"Eigenvalues on the complex plane; {series_name(group, side)['name']}: mean spectral radius "
        f"{number(radius)}, median modulus {number(modulus)}.",
        x={"label": "real part"}, y={"label": "imaginary part"}, extra={"circle": True},
    )  # fmt: skip


def _spectrum(found: dict[str, Any]) -> Chart:
    series = []
    for side, group, modes in _each(found):
        spread = modes["singular_values"]
        values = spread["mean"]
        top = values[0] or 1.0
        series.append({
            **series_name(group, side), "x": list(range(1, len(values) + 1)),
            "y": [None if v is None else v / top for v in values], "when": {"tokens": [group, EVERY]},
        })  # fmt: skip
    return Chart(
        id="singular-values", kind="lines", title="Singular spectrum", series=series,
        caption="Look for a fast fall: few directions carry the whole path through depth.",
        alt="Singular values of the trajectory matrix, relative to the largest, by token group.",
        x={"label": "index", "integer": True}, y={"label": "relative singular value", "log": True},
    )  # fmt: skip


def _reconstruction(found: dict[str, Any], phases: list[int] | None) -> Chart:
    series = []
    for side, group, modes in _each(found):
        values = modes["reconstruction_error"]["mean"]
        layers = list(range(len(values)))
        when = {"tokens": [group, EVERY]}
        series.append({**series_name(group, side), "x": layers, "y": values, "when": when})
        if side == "teacher":
            pooled = {"name": "one pooled fit", "base": "one pooled fit", "colour": group, "side": "null"}
            values = modes["pooled"]["reconstruction_error"]["mean"]
            series.append({**pooled, "x": layers, "y": values, "when": {"tokens": [group]}})
    rank = _each(found)[0][2].get("rank")
    return Chart(
        id="reconstruction", kind="lines", title="Rebuilt by a linear operator", series=series, phases=phases,
        caption=f"Error of t steps of a rank-{rank} linear map. Small is nearly linear, but a high rank fits anything.",
        alt=f"Reconstruction error of exact DMD at rank {rank} over depth, by token group.",
        x={"label": "layer", "integer": True}, y={"label": "relative error", "from_zero": True},
    )  # fmt: skip


def _sweep(found: dict[str, Any]) -> Chart:
    series = []
    for side, group, modes in _each(found):
        sweep = modes.get("sweep") or {}
        ranks = sorted(sweep, key=int)
        if ranks:
            series.append({
                **series_name(group, side), "x": [int(r) for r in ranks],
                "y": [sweep[r]["median_modulus"]["mean"] for r in ranks],
                "when": {"tokens": [group, EVERY]},
            })  # fmt: skip
    return Chart(
        id="rank-sweep", kind="lines", title="Does the rank decide it?", series=series,
        caption="Trust a modulus that stays as the rank grows; one that drifts is an artefact of the fit.",
        alt="Median modulus of the DMD eigenvalues against the rank of the fit, by token group.",
        x={"label": "rank r of the fit", "integer": True}, y={"label": "median |λ|", "from_zero": True},
    )  # fmt: skip
