"""Raptor: Vision Transformers as recurrent dynamical systems.

    from raptor import open_vit, find_phases, make_surrogate
    from raptor.commands import phases, distill, evaluate, probe, dynamics, report

Everything is loaded on first use, so importing raptor is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PLACES = {
    "open_vit": "raptor.open",
    "save_vit": "raptor.open",
    "list_models": "raptor.open",
    "open_data": "raptor.data",
    "iterate": "raptor.data",
    "Preprocess": "raptor.data",
    "ViT": "raptor.vit.view",
    "TokenGroups": "raptor.vit.view",
    "Trajectories": "raptor.vit.trajectory",
    "perturb": "raptor.vit.trajectory",
    "swap_blocks": "raptor.vit.trajectory",
    "replace_block": "raptor.vit.trajectory",
    "measure_similarity": "raptor.similarity.cosine",
    "Phases": "raptor.phases",
    "find_phases": "raptor.phases",
    "random_phases": "raptor.phases",
    "choose_k": "raptor.phases",
    "make_surrogate": "raptor.surrogate.surrogate",
    "certify": "raptor.fidelity.certificate",
    "train_teacher": "raptor.train.teacher",
}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'raptor' has no attribute {name!r}")
