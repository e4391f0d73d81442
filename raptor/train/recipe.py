"""A recipe: everything that decides how a surrogate is trained."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raptor.data.stream import AUGMENTATIONS
from raptor.recipes import load_recipe
from raptor.surrogate.surrogate import BLOCKS, CONDITIONINGS, COPIES, TABLE_STARTS, check_parts
from raptor.train.losses import NORMALISATIONS
from raptor.train.optimizer import OPTIMIZERS, RATES
from raptor.train.schedule import Budget


@dataclass
class Recipe:
    """The entries of a recipe, with their defaults. `recipes/paper.yaml` has the paper's values."""

    block: str = "teacher"
    conditioning: str = "table"
    copy: str = "middle"
    adapters: int = 0
    table_start: str = "plain"
    batch_size: int = 64
    optimizer: str = "adamw"  # what a recipe without the entry means; the default recipe has muon
    lr: float = 1e-3
    min_lr: float = 1e-6
    weight_decay: float = 1e-4
    warmup: float = 0.032
    clip: float = 1.0
    lam: float = 0.5
    lam_until: float = 0.25
    stage1_share: float = 0.5
    stage1_weights: dict[str, float] | None = None
    last_phase_weights: dict[str, float] | None = None
    stage2_weights: dict[str, float] | None = None
    normalise: str = "group"
    cosine: float = 0.0
    augment: str = "crop"
    crop_scale: tuple[float, float] = (0.35, 1.0)
    mixup: float = 0.0
    sizes: list[int] | None = None
    epoch_images: int = 0
    budget: str = "120s"


_RANGES = {
    "batch_size": (1, 10**6),
    "adapters": (0, 10**5),
    "min_lr": (0, math.inf),
    "weight_decay": (0, math.inf),
    "warmup": (0, 1 - 1e-9),
    "lam": (0, 1),
    "lam_until": (0, math.inf),  # infinity keeps lambda as it is
    "stage1_share": (0, 1),
    "cosine": (0, math.inf),
    "mixup": (0, 1000),
    "epoch_images": (0, 10**12),
}
_MAX_SIDE = 4096
_CHOICES = {
    "block": BLOCKS,
    "conditioning": CONDITIONINGS,
    "copy": COPIES,
    "table_start": TABLE_STARTS,
    "normalise": NORMALISATIONS,
    "augment": AUGMENTATIONS,
    "optimizer": OPTIMIZERS,
}


def resolve_recipe(name: str, given: Mapping[str, Any]) -> Recipe:
    """The named recipe, overridden by the options that are not None.

    A rate belongs to an optimizer: where only the optimizer is changed, the recipe's rate becomes what that needs.
    """
    own, given = load_recipe(name), {key: value for key, value in given.items() if value is not None}
    values = {**own, **given}
    known = {f.name for f in dataclasses.fields(Recipe)}
    unknown = sorted(set(values) - known)
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f": did you mean {close[0]}?" if close else f": choose from {', '.join(sorted(known))}"
        raise ValueError(f"recipe {name} has unknown entries: {', '.join(unknown[:6])}{hint}")
    settings = Recipe(**{key: _entry(key, value) for key, value in values.items()})
    if "lr" not in given:
        meant_for = _entry("optimizer", own.get("optimizer", Recipe.optimizer)) if "lr" in own else Recipe.optimizer
        settings.lr *= RATES[settings.optimizer] / RATES[meant_for]
    Budget.parse(settings.budget)
    for key in ("lr", "clip"):
        if not 0 < getattr(settings, key) < math.inf:
            raise ValueError(f"--{key} must be more than 0, got {getattr(settings, key):g}")
    for key, (low, high) in _RANGES.items():
        if not low <= getattr(settings, key) <= high:
            raise ValueError(f"--{key} must be from {low} to {round(high, 6)}, got {getattr(settings, key):g}")
    check_parts(settings.block, settings.conditioning, settings.adapters, settings.table_start)
    return settings


def _entry(name: str, value: Any) -> Any:
    """A recipe's entry as what it should be; ValueError that names it."""
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise ValueError(f"unknown {name} {value!r}: choose from {', '.join(_CHOICES[name])}")
        return value
    if name == "crop_scale":
        return _crop_scale(value)
    if name.endswith("_weights"):
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{name} must give a weight to each token group, as in {{cls: 1, patches: 1}}")
        return None if value is None else {group: _number(f"{name}.{group}", w) for group, w in value.items()}
    if name == "budget":
        return str(value)
    if name == "sizes":
        return _sizes(value)
    kind = next(f.type for f in dataclasses.fields(Recipe) if f.name == name)
    return _number(name, value, whole=kind == "int")


def _crop_scale(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"crop_scale must be two numbers, such as [0.35, 1.0], not {value!r}")
    low, high = (_number("crop_scale", v) for v in value)
    return low, high


def _sizes(value: Any) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"sizes must be a list of image sizes, such as [224, 280], not {value!r}")
    sizes = [_number("sizes", side, whole=True) for side in value]
    if not all(1 <= side <= _MAX_SIDE for side in sizes):
        raise ValueError(f"sizes must be from 1 to {_MAX_SIDE} px, got {', '.join(map(str, sizes))}")
    return sizes


def _number(name: str, value: Any, whole: bool = False) -> Any:
    """A number, also where YAML reads `1e-3` as a string."""
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
        if whole and number == int(number):
            return int(number)
        if not whole and number == number:
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{name} must be {'a whole number' if whole else 'a number'}, not {str(value)[:60]!r}")
