"""The teachers of a card as points: each one's make, and the number that the claim is about.

The numbers come from the rows of claims.json and from the recorded results; nothing is measured here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import quantities
from claims import ROOT, find_runs, read
from numpy.typing import ArrayLike
from sweep import Json, column, entry, where
from witness import contrast

from raptor import smooth_matrix

PAPER = ROOT / "paper" / "results"
RESULTS = ROOT / "docs" / "results"
# Name of a model or of the data that small teachers were trained on -> make.
MAKES = {
    "dinov2s": "DINOv2-S",
    "focus": "DINOv2-S",  # trained on for another task, from the same weights: not a make of its own
    "vitb16": "ViT-B/16",
    "scenes": "scenes",
    "tiny-imagenet-100": "tiny-imagenet",
    "imagenet-20": "imagenet-20",
    "cifar10": "CIFAR-10",
}
TRAINED = "trained"
UNTRAINED = "untrained"


def point(make: str, value: float, kind: str = TRAINED, p: float | None = None) -> Json:
    """A teacher; `p` is its stochastic depth where the card is about that."""
    return {"make": make, "kind": kind, "value": value, "p": p}


def points_of(source: Json, rows: Sequence[Json]) -> list[Json]:
    """The points that a source of cards.yaml names."""
    if "rows" in source:
        found = _of_rows(source, rows)
    elif "measure" in source:
        name, *arguments = source["measure"]
        found = globals()[name](*arguments)
    else:
        saved = read(ROOT / source["file"])
        value = entry(saved, source["path"])
        if "over" in source:
            value /= entry(saved, source["over"])
        found = [point(source["make"], float(value))]
    if "add" in source:
        for one in found:
            one["kind"] = source["add"]
    return found


def _of_rows(source: Json, rows: Sequence[Json]) -> list[Json]:
    """The rows of a claim, one a teacher or a make, and the untrained models beside them."""
    found = []
    for row in rows:
        is_named = row["says"].startswith(source["rows"]) and source.get("run", "") in row["source"]
        if not is_named or row["number"] is None or row["number"]["value"] is None:
            continue
        # `dinov2s (L = 12), imagenet-20` is about DINOv2-S.
        name = row["on"].partition(",")[0].partition(" (")[0]
        found.append(point(MAKES[name], row["number"]["value"]))
        for twin in row["untrained"]:
            found.append(point(MAKES[name], twin["value"], UNTRAINED))
    return found


# Stochastic depth and similarity


def _runs_of(experiment: str) -> list[tuple[str, Json]]:
    """The runs of an experiment, each with the make of its teachers by their data."""
    found = []
    for file in find_runs(PAPER)[experiment]:
        run = read(file)
        make = next(make for name, make in MAKES.items() if name in run["settings"]["data"])
        found.append((make, run))
    return found


def from_sweeps(path: str, minus: str | None = None) -> list[Json]:
    """A number of every teacher of the sweeps over stochastic depth."""
    found = []
    for make, run in _runs_of("stochastic-depth"):
        for row in run["rows"]:
            value = entry(row, path)
            if minus is not None:
                value -= entry(row, minus)
            found.append(point(make, value, p=row["p"]))
    return found


def above_smooth() -> list[Json]:
    """The contrast of three phases minus that of a smooth matrix, for every recorded similarity of pooled tokens."""
    found = []
    for file, name in (("dinov2s-pooled", "dinov2s"), ("focus", "focus"), ("vitb16", "vitb16"), ("scenes", "scenes")):
        (model,) = read(RESULTS / f"phases-{file}.json")["models"]
        found.append(point(MAKES[name], _contrast_above_smooth(model["similarity"]["pooled"])))
    for experiment, kind in (("stochastic-depth", TRAINED), ("untrained", UNTRAINED)):
        for make, run in _runs_of(experiment):
            for row in run["rows"]:
                # The trained networks of the second are among those of the first or had too few steps.
                if row.get("kind", TRAINED) == kind:
                    matrix = row["similarity"]["matrices"]["pooled"]
                    found.append(point(make, _contrast_above_smooth(matrix), kind))
    return found


def _contrast_above_smooth(matrix: ArrayLike) -> float:
    # Each matrix has its own max-cut: a cut chosen on the model's matrix would favour the model.
    similarity = np.asarray(matrix, dtype=np.float64)
    return contrast(similarity, 3) - contrast(smooth_matrix(similarity), 3)


def similarity_by_training() -> list[Json]:
    """Similarity of layers of each trained network minus the mean of untrained ones of its run."""
    path = "similarity/means/pooled/off_diagonal"
    found = []
    for make, run in _runs_of("untrained"):
        if quantities.is_briefly_trained(run["settings"]):
            continue
        untrained = fmean(column(where(run["rows"], kind=UNTRAINED), path))
        for row in where(run["rows"], kind=TRAINED):
            found.append(point(make, entry(row, path) - untrained))
    return found


def followed_untrained() -> list[Json]:
    """The bounded R2 of the last layer with which three tied blocks follow each untrained network."""
    found = []
    for make, run in _runs_of("untrained"):
        for row in where(run["rows"], kind=UNTRAINED):
            found.append(point(make, row["raptor"]["bounded_r2_last"], UNTRAINED))
    return found


def max_cut_of_two() -> list[Json]:
    """The share that two blocks keep of a teacher on tiny-imagenet, by the teacher's own head."""
    partitions = read(PAPER / "partitions" / "partitions.json")["rows"]
    sweep = read(PAPER / "stochastic-depth" / "stochastic-depth.json")["rows"]
    (surrogate,) = where(partitions, k=2, way="maxcut")
    (teacher,) = where(sweep, cell="p0-s0")
    kept = surrogate["accuracy"] / teacher["teacher"]["accuracy"]
    return [point(MAKES["tiny-imagenet-100"], kept)]


# Swaps


def turn_across_minus_within() -> list[Json]:
    """The turn of the last state by a swap across phases minus that within one, at equal distance between blocks."""
    found = []
    for make, row in _swapped():
        turns = row["compared"]["all"]
        found.append(point(make, turns["across_matched"] - turns["within_matched"]))
    return found


def _swapped() -> list[tuple[str, Json]]:
    """Every model that blocks were swapped in, with its make: a teacher of a sweep has that of its data."""
    found = []
    for make, run in _runs_of("swaps"):
        for row in run["rows"]:
            own = make
            if row["p"] is None:
                own = MAKES["vitb16"] if "vit_base" in row["cell"] else MAKES["dinov2s"]
            found.append((own, row))
    return found


def kept_by_swaps_within() -> list[Json]:
    """The share of predictions that stay when two blocks of one phase change places."""
    found = kept_within("dinov2s", "teacher")
    for make, row in _swapped():
        if row["compared"].get("agreement") is not None:
            found.append(point(make, row["compared"]["agreement"]["within"]))
    return found


def kept_within(name: str, side: str) -> list[Json]:
    """The same by `raptor dynamics`. In a surrogate only the rows of the depth table change places."""
    saved = read(RESULTS / "dynamics" / f"{name}-interventions.json")
    swaps = quantities.swaps_of_interventions(saved[side]["swaps"])
    return [point(MAKES["dinov2s"], float(swaps["stays"][0]["within"]))]


# Run time


def run_time() -> list[Json]:
    """The time of a surrogate over its teacher's, averaged over the measurements of each batch size."""
    models = {"vit_small_patch14_reg4_dinov2": "dinov2s", "vit_base_patch16_224": "vitb16"}
    ratios: dict[tuple[str, int], list[float]] = defaultdict(list)
    for run in read(RESULTS / "passes.json")["runs"]:
        if run["device"] != "cpu":
            name = models[Path(run["model"]).name]
            ratios[name, run["batch_size"]].append(run["ratios"]["surrogate"])
    return [point(MAKES[name], fmean(of_batch)) for (name, _), of_batch in ratios.items()]
