"""Which change of a recipe helps? Students of the same phases, steps and images, each with one change.

Several students share a GPU best: start three of these commands at once, each with its own `--cells`, in one folder.
The last one to end writes the whole table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from surrogates import images_to_distil, open_teacher
from sweep import Json, SweepConfig, markdown, read_config, run_cells, write_result

from raptor import distill, load_recipe, pick_device

VIEWS: Json = {"mixup": 1.0, "cutmix": 0.5, "crop_scale": [0.08, 1.0], "jitter": 0.4, "grey": 0.2}
# Name of a trial -> the entries of the recipe that it changes.
TRIALS: dict[str, Json] = {
    "as-it-is": {},
    "mixup": {"mixup": 1.0},
    "cutmix": {"mixup": 1.0, "cutmix": 0.5},
    "crops": {"crop_scale": [0.08, 1.0]},
    "colours": {"jitter": 0.4, "grey": 0.2},
    "views": VIEWS,
    "small-first": {"sizes": [160, 224], "first_size_until": 0.6},
    "mlp-adapters": {"adapters": 16, "adapted": "mlp"},
    "average": {"average_last": 0.2},
}
SCORES = ("agreement", "accuracy", "r2_last", "r2_lowest")


@dataclass(kw_only=True)
class Trials(SweepConfig):
    """One change of a recipe at a time, at equal steps: agreement, top-1, R2 of the last layer and the lowest one."""

    model: str = "timm/vit_base_patch16_224"
    """The teacher."""
    weights: str | None = None
    """A local weight file for it."""
    more_data: list[str] | None = None
    """Further images to distil on, without labels."""
    size: int | None = None
    """Image size."""
    phases: list[int] = field(default_factory=lambda: [1, 4, 5, 2])
    """Lengths of the phases."""
    recipe: str = "vitb16-head"
    """The recipe that is changed."""
    budget: str = "1500steps"
    """Training of each student, in steps, so that they are equal."""
    batch_size: int = 64
    """Images per step."""
    seed: int = 0
    """Of every student."""
    out: str = "runs/trials"


def main(config: Trials) -> Json:
    if not config.budget.endswith("steps"):
        raise ValueError(f"the students must have equal steps: give --budget in steps, not {config.budget!r}")
    common = config.options()
    cells = {name: {**common, "trial": name, "changes": changes} for name, changes in TRIALS.items()}
    results = run_cells(config, cells, partial(_train, config))
    return write_result(config, "trials", cells, {"cells": results}, table(results))


def _train(config: Trials, options: Json) -> Json:
    """Distil one student; the same command goes on with one that was stopped."""
    teacher, pair = open_teacher(options, config)
    recipe = Path(config.out) / "recipes" / f"{options['trial']}.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(yaml.safe_dump({**load_recipe(options["recipe"]), **options["changes"]}))
    done: Any = distill(
        teacher,
        images_to_distil(pair, options, teacher.preprocess, config),
        phases=options["phases"],
        recipe=str(recipe),
        budget=options["budget"],
        batch_size=options["batch_size"],
        seed=options["seed"],
        out=str(Path(config.out) / "students" / options["trial"]),
        device=pick_device(config.device),
        compile=config.compile,
        num_workers=config.num_workers,
    )
    scores = done.summary.validation
    found = {name: getattr(scores, name) for name in SCORES}
    return {**found, "num_steps": done.summary.num_steps, "seconds": done.summary.seconds}


def table(results: Mapping[str, Json]) -> str:
    """A line per trial; under the recipe as it is, each score with its difference from that."""
    plain = results.get("as-it-is")
    lines = []
    for name, scores in results.items():
        line: list[str | None] = [name]
        for score in SCORES:
            line.append(shown(scores[score], None if plain is None or scores is plain else plain[score]))
        lines.append([*line, f"{scores['seconds']:.0f}"])
    return markdown(["trial", "agreement", "top-1", "R2 last", "R2 lowest", "seconds"], lines)


def shown(score: float | None, plain: float | None) -> str | None:
    """A score, and in brackets its difference from that of the recipe as it is."""
    if score is None:
        return None
    if plain is None:
        return f"{score:.3f}"
    return f"{score:.3f} ({score - plain:+.3f})"


if __name__ == "__main__":
    main(read_config(Trials))
