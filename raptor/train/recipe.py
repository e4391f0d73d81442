"""A recipe: everything that decides how a surrogate is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from raptor.data.stream import AUGMENTATIONS
from raptor.options import Option
from raptor.recipes import load_recipe
from raptor.surrogate.surrogate import BLOCKS, CONDITIONINGS, COPIES
from raptor.train.losses import NORMALISATIONS
from raptor.train.schedule import Budget


@dataclass
class Recipe:
    """The entries of a recipe, with their defaults. `recipes/paper.yaml` has the paper's values."""

    block: str = "teacher"
    conditioning: str = "table"
    copy: str = "middle"
    batch_size: int = 128
    lr: float = 1e-3
    min_lr: float = 1e-6
    weight_decay: float = 1e-4
    warmup: float = 0.032
    clip: float = 1.0
    lam: float = 0.5
    lam_until: float = 0.25
    stage1_share: float = 0.5
    last_phase_weights: dict[str, float] | None = None
    stage2_weights: dict[str, float] | None = None
    normalise: str = "layer"
    cosine: float = 0.0
    augment: str = "crop"
    crop_scale: tuple[float, float] = (0.35, 1.0)
    epoch_images: int = 0
    budget: str = "120s"


class RecipeOptions(TypedDict, total=False):
    """The entries of a recipe that are options of `distill` as well. None keeps the recipe's own value."""

    budget: Annotated[
        str | None, Option(None, "120s, 5m, 3000steps or 20epochs, in all; the recipe says how the stages share it.")
    ]
    batch_size: Annotated[int | None, Option(None, "images per step over all devices together.")]
    lr: Annotated[float | None, Option(None, "peak learning rate.")]
    block: Annotated[str | None, Option(None, "`teacher` (a copy of a block of the phase) or `paper`.", BLOCKS)]
    conditioning: Annotated[
        str | None, Option(None, "`table`, `mlp` (the paper's depth scaling) or `none`.", CONDITIONINGS)
    ]
    copy: Annotated[
        str | None, Option(None, "which teacher block of a phase is copied: middle, first or last.", COPIES)
    ]
    normalise: Annotated[
        str | None,
        Option(
            None,
            "divide each squared error by the variance of its `layer`, its layer and token `group`, or `none`.",
            NORMALISATIONS,
        ),
    ]
    augment: Annotated[
        str | None,
        Option(None, "`crop` (random resized crops and flips) or `none` (centre crops, as the paper).", AUGMENTATIONS),
    ]
    stage1_share: Annotated[float | None, Option(None, "share of the budget that stage 1 gets.")]


def resolve_recipe(name: str, given: Mapping[str, Any]) -> Recipe:
    """The named recipe, overridden by the options that are not None."""
    values = {**load_recipe(name), **{key: value for key, value in given.items() if value is not None}}
    known = {f.name for f in dataclasses.fields(Recipe)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"recipe {name} has unknown entries: {', '.join(unknown)}")
    settings = Recipe(**{key: _number(key, value) for key, value in values.items()})
    settings.crop_scale = tuple(settings.crop_scale)  # type: ignore[assignment]
    Budget.parse(settings.budget)
    if settings.batch_size < 1 or settings.lr <= 0 or not 0 <= settings.stage1_share <= 1:
        raise ValueError("--batch_size must be at least 1, --lr positive and --stage1_share between 0 and 1")
    if not 0 <= settings.warmup < 1 or not settings.lam_until >= 0:  # infinity keeps lambda as it is
        raise ValueError("warmup must be at least 0 and less than 1, lam_until at least 0")
    return settings


def _number(name: str, value: Any) -> Any:
    """A recipe's entry as a number where it should be one: YAML reads `1e-3` as a string."""
    kind = next(f.type for f in dataclasses.fields(Recipe) if f.name == name)
    if kind not in ("int", "float"):
        return value
    try:
        number = float(value)
        if kind == "int" and number == int(number):
            return int(number)
        if kind == "float" and number == number:
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{name} must be {'a whole number' if kind == 'int' else 'a number'}, not {value!r}")
