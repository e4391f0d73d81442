"""Block swaps: two blocks of one phase exchanged, and two of different phases. What does each cost?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figures import figure_swaps
from surrogates import chosen_data, cut_phases, open_teacher, precision_of, read_sweep, top1_accuracy
from sweep import Cell, Json, SweepConfig, read_config, run_cells, table, write_result

from raptor import InMemory, ViT, compare_pairs, iterate, measure_swaps, pick_device, swap_blocks

FIRST = (1,)  # block 1 bears hardly any swap, so means are also given without its pairs


@dataclass(kw_only=True)
class Swaps(SweepConfig):
    """Exchange every pair of blocks of each teacher: accuracy, agreement and angle of the last state, within and
    across phases."""

    models: list[str] | None = None  # the teachers; by default all of the sweep in `teachers`
    teachers: str = "runs/stochastic-depth"  # folder of a stochastic-depth sweep
    weights: str | None = None  # a local weight file for the models
    k: int = 3  # phases, by max-cut on training images
    tokens: str = "pooled"  # the tokens whose similarity is cut: all, cls, registers, patches, pooled
    num_images: int = 512  # held-out images for agreement and angle
    out: str = "runs/swaps"


def main(config: Swaps) -> Json:
    common = config.options("models", "teachers")
    cells: dict[str, Json] = {}
    if config.models:
        for model in config.models:
            cells[model.strip("/").replace("/", "_")] = {**common, "model": model, "p": None}
    else:
        for row in read_sweep(config.teachers):
            folder = Path(config.teachers) / "teachers" / row["cell"] / "teacher"
            cells[row["cell"]] = {**common, "model": str(folder), "p": row["p"]}
    results = run_cells(config, cells, partial(_swap, config))
    rows = [{"cell": name, **result} for name, result in results.items()]
    return write_result(config, "swaps", cells, {"rows": rows}, _table(rows), partial(figure_swaps, rows))


@torch.no_grad()
def _swap(config: Swaps, options: Json) -> Json:
    """Swap every pair of blocks of one teacher."""
    vit, (train, held_out) = open_teacher(options, config)
    phases = cut_phases(vit, train, options["k"], config, options["tokens"])
    num = min(options["num_images"], len(held_out))
    batch = next(iter(iterate(held_out, vit.preprocess, num, device=vit.device, limit=num)))
    swaps = measure_swaps(vit, batch.images, phases)

    def compare(values: Any, without: Sequence[int] = ()) -> Json:
        return compare_pairs(swaps.pairs, np.asarray(values), phases, without)

    turn = swaps.angle["all"]
    compared = {group: compare(spread.mean) for group, spread in swaps.angle.items()}
    row: Json = {
        "p": options["p"],
        "phases": list(phases.lengths),
        "pairs": swaps.pairs,
        "compared": compared,
        "angle": turn.mean,
        "angle_std": turn.std,
        "finding": swaps.finding(),
        "num_images": num,
        "matched_std": swaps.matched_std,
        "without_first": compare(turn.mean, FIRST),
        # None without a head, or without labels as it numbers its classes.
        "accuracy": None,
        "swapped_accuracy": None,
        "compared_accuracy": None,
        "without_first_accuracy": None,
        "chance": None,
    }
    if swaps.agreement is not None:
        compared["agreement"] = compare(swaps.agreement.mean)
        row["without_first_agreement"] = compare(swaps.agreement.mean, FIRST)
    judged = _judged(vit, options, config)
    if judged is not None:
        accuracy = []
        for i, j in swaps.pairs:
            with swap_blocks(vit, i, j):
                accuracy.append(top1_accuracy(vit, judged, precision_of(config)))
        row["accuracy"] = top1_accuracy(vit, judged, precision_of(config))
        row["swapped_accuracy"] = accuracy
        row["compared_accuracy"] = compare(accuracy)
        row["without_first_accuracy"] = compare(accuracy, FIRST)
        row["chance"] = 1 / vit.num_classes
    return row


def _judged(vit: ViT, options: Json, config: Swaps) -> Any:
    """Held-out images with labels as the head of `vit` numbers its classes; None without a head or without labels."""
    if not vit.num_classes:
        return None
    chosen = chosen_data(options, names=vit.classes, num_classes=vit.num_classes)
    judged = chosen.judged(options["val_images"], vit.preprocess.size)
    if judged.labels is None:
        return None
    classes = list(judged.classes or ())
    if vit.classes is not None and classes != list(vit.classes):
        raise ValueError(f"{judged.name} has classes that are not those of the head of {vit.name}: give other --data")
    if len(classes) != vit.num_classes:
        raise ValueError(f"{judged.name} has {len(classes)} classes, the head {vit.num_classes}")
    return InMemory(judged, vit.preprocess, pick_device(config.device), config.num_workers)


def _table(rows: Sequence[Json]) -> str:
    measures = {
        "accuracy": "compared_accuracy",
        "turn (rad)": "compared/all",
        "accuracy without block 1,": "without_first_accuracy",
        "turn without block 1,": "without_first",
    }
    kinds = {"within": "within", "across": "across"}
    kinds |= {"within, equal distance": "within_matched", "across, equal distance": "across_matched"}
    columns: dict[str, Cell] = {"teacher": "cell", "phases": "phases", "accuracy": "accuracy"}
    for what, means in measures.items():
        for where, kind in kinds.items():
            columns[f"{what} {where}"] = f"{means}/{kind}"
    return table(rows, columns, optional=list(columns)[2:])


if __name__ == "__main__":
    main(read_config(Swaps))
