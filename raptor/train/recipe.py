"""A recipe: everything that decides how a surrogate is trained."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from raptor.recipes import load_recipe
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


def resolve_recipe(name: str, given: dict[str, Any]) -> Recipe:
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
        raise ValueError("batch_size must be at least 1, lr positive and stage1_share between 0 and 1")
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
