"""Raptor: Vision Transformers as recurrent dynamical systems.

    from raptor import open_vit, find_phases, make_surrogate
    from raptor.commands import phases, distill, evaluate, probe, dynamics, report

Everything is loaded on first use, so importing raptor is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raptor.certificate.error_curves import ErrorCurves
    from raptor.certificate.measure import certify
    from raptor.certificate.null_models import fit_null_models
    from raptor.data import ChosenData, InMemory, Preprocess, iterate, open_data, open_dense
    from raptor.devices import pick_device, pick_precision
    from raptor.dynamics.measure import measure_dynamics
    from raptor.dynamics.swaps import compare_pairs, measure_swaps
    from raptor.phases.cut import Phases, choose_k, find_phases, within_and_across
    from raptor.phases.evidence import smooth_matrix
    from raptor.phases.partitions import num_partitions, random_phases, sample_partitions
    from raptor.phases.similarity import measure_similarity
    from raptor.phases.study import check_cuts, study_phases
    from raptor.probes import probe
    from raptor.recipes import load_recipe
    from raptor.recurrence.watch import Watcher, watch
    from raptor.surrogate.at_speed import at_speed
    from raptor.surrogate.surrogate import block_parameters, make_surrogate
    from raptor.train import distill
    from raptor.train.teacher import train_teacher
    from raptor.vit.groups import TokenGroups
    from raptor.vit.names import list_models, models_for
    from raptor.vit.open import open_vit
    from raptor.vit.pair import open_pair
    from raptor.vit.saved import save_vit
    from raptor.vit.shared import SharedViT
    from raptor.vit.trajectory import Trajectories, perturb, replace_block, swap_blocks
    from raptor.vit.view import ViT

__version__ = "0.2.0"

__all__ = [
    "ChosenData",
    "ErrorCurves",
    "InMemory",
    "Phases",
    "Preprocess",
    "SharedViT",
    "TokenGroups",
    "Trajectories",
    "ViT",
    "Watcher",
    "at_speed",
    "block_parameters",
    "certify",
    "check_cuts",
    "choose_k",
    "compare_pairs",
    "distill",
    "find_phases",
    "fit_null_models",
    "iterate",
    "list_models",
    "load_recipe",
    "make_surrogate",
    "measure_dynamics",
    "measure_similarity",
    "measure_swaps",
    "models_for",
    "num_partitions",
    "open_data",
    "open_dense",
    "open_pair",
    "open_vit",
    "perturb",
    "pick_device",
    "pick_precision",
    "probe",
    "random_phases",
    "replace_block",
    "sample_partitions",
    "save_vit",
    "smooth_matrix",
    "study_phases",
    "swap_blocks",
    "train_teacher",
    "watch",
    "within_and_across",
]

_PLACES = {
    "raptor.data": ("ChosenData", "InMemory", "Preprocess", "iterate", "open_data", "open_dense"),
    "raptor.devices": ("pick_device", "pick_precision"),
    "raptor.dynamics.measure": ("measure_dynamics",),
    "raptor.dynamics.swaps": ("compare_pairs", "measure_swaps"),
    "raptor.certificate.error_curves": ("ErrorCurves",),
    "raptor.certificate.measure": ("certify",),
    "raptor.certificate.null_models": ("fit_null_models",),
    "raptor.phases.cut": ("Phases", "choose_k", "find_phases", "within_and_across"),
    "raptor.phases.evidence": ("smooth_matrix",),
    "raptor.phases.partitions": ("num_partitions", "random_phases", "sample_partitions"),
    "raptor.phases.study": ("check_cuts", "study_phases"),
    "raptor.probes": ("probe",),
    "raptor.recipes": ("load_recipe",),
    "raptor.recurrence.watch": ("Watcher", "watch"),
    "raptor.phases.similarity": ("measure_similarity",),
    "raptor.surrogate.at_speed": ("at_speed",),
    "raptor.surrogate.surrogate": ("block_parameters", "make_surrogate"),
    "raptor.train": ("distill",),
    "raptor.train.teacher": ("train_teacher",),
    "raptor.vit.groups": ("TokenGroups",),
    "raptor.vit.names": ("list_models", "models_for"),
    "raptor.vit.open": ("open_vit",),
    "raptor.vit.pair": ("open_pair",),
    "raptor.vit.saved": ("save_vit",),
    "raptor.vit.shared": ("SharedViT",),
    "raptor.vit.trajectory": ("Trajectories", "perturb", "replace_block", "swap_blocks"),
    "raptor.vit.view": ("ViT",),
}


def __getattr__(name: str) -> Any:
    for module, names in _PLACES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'raptor' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
