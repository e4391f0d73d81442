"""The teachers of a card as points: each one's make, and the number that the claim is about.

The numbers come from the rows of claims.json and from the recorded results; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import quantities
from numpy.typing import ArrayLike
from run_claims import find_runs
from sweep import Json, entry
from verdict import ROOT, read
from witness import contrast

from raptor import smooth_matrix

PAPER = ROOT / "paper" / "results"
RESULTS = ROOT / "docs" / "results"
MAKES = {
    "dinov2s": "DINOv2-S",
    "focus": "DINOv2-S",  # trained on for another task, from the same weights: not a make of its own
    "vitb16": "ViT-B/16",
    "scenes": "scenes",
    "tiny-imagenet-100": "tiny-imagenet",
    "imagenet-20": "imagenet-20",
    "cifar10": "CIFAR-10",
}
TRAINED, UNTRAINED = "trained", "untrained"
_MODELS = {"vit_small_patch14_reg4_dinov2": "dinov2s", "vit_base_patch16_224": "vitb16"}


def point(make: str, value: float, kind: str = TRAINED, p: float | None = None) -> Json:
    """A teacher; `p` is its stochastic depth where the card is about that."""
    return {"make": make, "kind": kind, "value": value, "p": p}


def points_of(source: Json, rows: Sequence[Json]) -> list[Json]:
    """The points that a source of cards.yaml names."""
    if "rows" in source:
        found = _of_rows(source, rows)
    elif "measure" in source:
        measure = globals()[source["measure"]]
        arguments = {name: source[name] for name in ("path", "minus") if name in source}
        found = measure(**arguments)
    else:
        found = [_of_file(source)]
    if "add" in source:
        found = [{**one, "kind": source["add"]} for one in found]
    return found


def _of_rows(source: Json, rows: Sequence[Json]) -> list[Json]:
    """The rows of a claim, one a teacher or a make, and the untrained models beside them."""
    found = []
    for row in rows:
        is_named = row["says"].startswith(source["rows"]) and source.get("run", "") in row["source"]
        if not is_named or row["number"] is None or row["number"]["value"] is None:
            continue
        make = _make_of(row["on"])
        found.append(point(make, row["number"]["value"]))
        found += [point(make, twin["value"], UNTRAINED) for twin in row["untrained"]]
    return found


def _make_of(on: str) -> str:
    """The make that a row is about: `dinov2s (L = 12), imagenet-20` is DINOv2-S."""
    return MAKES[on.partition(",")[0].partition(" (")[0]]


def _of_file(source: Json) -> Json:
    saved = read(ROOT / source["file"])
    value = entry(saved, source["path"])
    if "over" in source:
        value /= entry(saved, source["over"])
    return point(source["make"], float(value))


# Stochastic depth and similarity


def _make_of_run(run: Json) -> str:
    return next(make for name, make in MAKES.items() if name in run["settings"]["data"])


def from_sweeps(path: str, minus: str | None = None) -> list[Json]:
    """A number of every teacher of the sweeps over stochastic depth."""
    found = []
    for file in find_runs(PAPER)["stochastic-depth"]:
        run = read(file)
        for row in run["rows"]:
            value = entry(row, path)
            if minus is not None:
                value -= entry(row, minus)
            found.append(point(_make_of_run(run), value, p=row["p"]))
    return found


def above_smooth() -> list[Json]:
    """The contrast of three phases minus that of a smooth matrix, for every recorded similarity of pooled tokens."""
    found = []
    for name, make in (
        ("dinov2s-pooled", "dinov2s"),
        ("focus", "focus"),
        ("vitb16", "vitb16"),
        ("scenes", "scenes"),
    ):
        (model,) = read(RESULTS / f"phases-{name}.json")["models"]
        found.append(point(MAKES[make], _contrast_above_smooth(model["similarity"]["pooled"])))
    for file in find_runs(PAPER)["stochastic-depth"]:
        run = read(file)
        for row in run["rows"]:
            matrix = row["similarity"]["matrices"]["pooled"]
            found.append(point(_make_of_run(run), _contrast_above_smooth(matrix)))
    for run in _runs_on_training():
        for row in run["rows"]:
            # The trained networks of these runs are among those of the sweeps or had too few steps.
            if row["kind"] == UNTRAINED:
                matrix = row["similarity"]["matrices"]["pooled"]
                found.append(point(_make_of_run(run), _contrast_above_smooth(matrix), UNTRAINED))
    return found


def _contrast_above_smooth(matrix: ArrayLike) -> float:
    # Each matrix has its own max-cut: a cut chosen on the model's matrix would favour the model.
    similarity = np.asarray(matrix, dtype=np.float64)
    return contrast(similarity, 3) - contrast(smooth_matrix(similarity), 3)


def similarity_by_training() -> list[Json]:
    """Similarity of layers of each trained network minus the mean of untrained ones of its make."""
    found = []
    for run in _runs_on_training():
        if quantities.is_briefly_trained(run["settings"]):
            continue
        path = "similarity/means/pooled/off_diagonal"
        untrained = [entry(row, path) for row in run["rows"] if row["kind"] == UNTRAINED]
        for row in run["rows"]:
            if row["kind"] == TRAINED:
                found.append(point(_make_of_run(run), entry(row, path) - fmean(untrained)))
    return found


def followed_untrained() -> list[Json]:
    """The bounded R2 of the last layer with which three tied blocks follow each untrained network."""
    found = []
    for run in _runs_on_training():
        for row in run["rows"]:
            if row["kind"] == UNTRAINED:
                found.append(point(_make_of_run(run), row["raptor"]["bounded_r2_last"], UNTRAINED))
    return found


def _runs_on_training() -> list[Json]:
    return [read(file) for file in find_runs(PAPER)["untrained"]]


def max_cut_of_two() -> list[Json]:
    """The share that two blocks keep of a teacher on tiny-imagenet, by the teacher's own head."""
    rows = read(PAPER / "partitions" / "partitions.json")["rows"]
    (surrogate,) = [row for row in rows if row["k"] == 2 and row["way"] == "maxcut"]
    sweep = read(PAPER / "stochastic-depth" / "stochastic-depth.json")["rows"]
    (teacher,) = [row for row in sweep if row["cell"] == "p0-s0"]
    return [point(MAKES["tiny-imagenet-100"], surrogate["accuracy"] / teacher["teacher"]["accuracy"])]


# Swaps


def turn_across_minus_within() -> list[Json]:
    """The turn of the last state by a swap across phases minus that within one, at equal distance between blocks."""
    found = []
    for run, row in _swapped():
        turns = row["compared"]["all"]
        found.append(point(_make_of_swapped(run, row), turns["across_matched"] - turns["within_matched"]))
    return found


def _swapped() -> list[tuple[Json, Json]]:
    """Every model that blocks were swapped in, with its run."""
    runs = [read(file) for file in find_runs(PAPER)["swaps"]]
    return [(run, row) for run in runs for row in run["rows"]]


def _make_of_swapped(run: Json, row: Json) -> str:
    if row["p"] is not None:
        return _make_of_run(run)
    return MAKES["vitb16"] if "vit_base" in row["cell"] else MAKES["dinov2s"]


def kept_by_swaps_within() -> list[Json]:
    """The share of predictions that stay when two blocks of one phase change places."""
    found = [point(MAKES["dinov2s"], _kept_within(RESULTS / "dynamics" / "dinov2s-interventions.json", "teacher"))]
    for run, row in _swapped():
        if row["compared"].get("agreement") is not None:
            found.append(point(_make_of_swapped(run, row), row["compared"]["agreement"]["within"]))
    return found


def kept_by_surrogate() -> list[Json]:
    """The same of a surrogate, where only the rows of the depth table change places."""
    path = RESULTS / "dynamics" / "dinov2s-five-minutes-interventions.json"
    return [point(MAKES["dinov2s"], _kept_within(path, "surrogate"))]


def kept_by_its_teacher() -> list[Json]:
    path = RESULTS / "dynamics" / "dinov2s-five-minutes-interventions.json"
    return [point(MAKES["dinov2s"], _kept_within(path, "teacher"))]


def _kept_within(path: Path, model: str) -> float:
    swaps = quantities.swaps_of_interventions(read(path)[model]["swaps"])
    return float(swaps["stays"][0]["within"])


# Run time


def run_time() -> list[Json]:
    """The time of a surrogate over its teacher's, averaged over the measurements of each batch size."""
    times: dict[tuple[str, int], list[float]] = {}
    for run in read(RESULTS / "passes.json")["runs"]:
        if run["device"] != "cpu":
            key = (_MODELS[Path(run["model"]).name], run["batch_size"])
            times.setdefault(key, []).append(run["ratios"]["surrogate"])
    return [point(MAKES[name], fmean(ratios)) for (name, _), ratios in times.items()]
