"""Raptor: Vision Transformers as recurrent dynamical systems.

    from raptor import open_vit, find_phases, make_surrogate
    from raptor.commands import phases, distill, evaluate, probe, dynamics, report

Everything is loaded on first use, so importing raptor is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raptor.data import Preprocess, iterate, open_data
    from raptor.dynamics.measure import measure_dynamics
    from raptor.fidelity.measure import certify
    from raptor.phases import Phases, choose_k, find_phases, random_phases, study_phases
    from raptor.similarity.cosine import measure_similarity
    from raptor.surrogate.surrogate import make_surrogate
    from raptor.train import distill
    from raptor.train.teacher import train_teacher
    from raptor.vit.names import list_models, models_for
    from raptor.vit.open import open_vit
    from raptor.vit.pair import open_pair
    from raptor.vit.saved import SharedViT, save_vit
    from raptor.vit.trajectory import Trajectories, perturb, replace_block, swap_blocks
    from raptor.vit.view import TokenGroups, ViT

__all__ = [
    "Phases",
    "Preprocess",
    "SharedViT",
    "TokenGroups",
    "Trajectories",
    "ViT",
    "certify",
    "choose_k",
    "distill",
    "find_phases",
    "iterate",
    "list_models",
    "make_surrogate",
    "measure_dynamics",
    "measure_similarity",
    "models_for",
    "open_data",
    "open_pair",
    "open_vit",
    "perturb",
    "random_phases",
    "replace_block",
    "save_vit",
    "study_phases",
    "swap_blocks",
    "train_teacher",
]

_PLACES = {
    "raptor.data": ("Preprocess", "iterate", "open_data"),
    "raptor.dynamics.measure": ("measure_dynamics",),
    "raptor.fidelity.measure": ("certify",),
    "raptor.phases": ("Phases", "choose_k", "find_phases", "random_phases", "study_phases"),
    "raptor.similarity.cosine": ("measure_similarity",),
    "raptor.surrogate.surrogate": ("make_surrogate",),
    "raptor.train": ("distill",),
    "raptor.train.teacher": ("train_teacher",),
    "raptor.vit.names": ("list_models", "models_for"),
    "raptor.vit.open": ("open_vit",),
    "raptor.vit.pair": ("open_pair",),
    "raptor.vit.saved": ("SharedViT", "save_vit"),
    "raptor.vit.trajectory": ("Trajectories", "perturb", "replace_block", "swap_blocks"),
    "raptor.vit.view": ("TokenGroups", "ViT"),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("raptor-vit")
    for module, names in _PLACES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'raptor' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
