"""Raptor: Vision Transformers as recurrent dynamical systems.

    from raptor import open_vit, find_phases, make_surrogate
    from raptor.commands import phases, distill, evaluate, probe, dynamics, report

Everything is loaded on first use, so importing raptor is quick.
"""

from __future__ import annotations

from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

# `X as X` tells a type checker that the name is exported.
if TYPE_CHECKING:
    from raptor.certificate.error_curves import ErrorCurves as ErrorCurves
    from raptor.certificate.measure import certify as certify
    from raptor.certificate.null_models import fit_null_models as fit_null_models
    from raptor.data import (
        ChosenData as ChosenData,
        InMemory as InMemory,
        Preprocess as Preprocess,
        iterate as iterate,
        open_data as open_data,
        open_dense as open_dense,
    )
    from raptor.devices import pick_device as pick_device, pick_precision as pick_precision
    from raptor.dynamics.measure import measure_dynamics as measure_dynamics
    from raptor.dynamics.swaps import compare_pairs as compare_pairs, measure_swaps as measure_swaps
    from raptor.phases.cut import (
        Phases as Phases,
        choose_k as choose_k,
        find_phases as find_phases,
        within_and_across as within_and_across,
    )
    from raptor.phases.evidence import smooth_matrix as smooth_matrix
    from raptor.phases.partitions import (
        num_partitions as num_partitions,
        random_phases as random_phases,
        sample_partitions as sample_partitions,
    )
    from raptor.phases.similarity import measure_similarity as measure_similarity
    from raptor.phases.study import check_cuts as check_cuts, study_phases as study_phases
    from raptor.probes import probe as probe
    from raptor.recipes import load_recipe as load_recipe
    from raptor.recurrence.watch import Watcher as Watcher, watch as watch
    from raptor.surrogate.at_speed import at_speed as at_speed
    from raptor.surrogate.surrogate import block_parameters as block_parameters, make_surrogate as make_surrogate
    from raptor.train import distill as distill
    from raptor.train.teacher import train_teacher as train_teacher
    from raptor.vit.groups import TokenGroups as TokenGroups
    from raptor.vit.names import list_models as list_models, models_for as models_for
    from raptor.vit.open import open_vit as open_vit
    from raptor.vit.pair import open_pair as open_pair
    from raptor.vit.saved import save_vit as save_vit
    from raptor.vit.shared import SharedViT as SharedViT
    from raptor.vit.trajectory import (
        Trajectories as Trajectories,
        perturb as perturb,
        replace_block as replace_block,
        swap_blocks as swap_blocks,
    )
    from raptor.vit.view import ViT as ViT

__version__ = "0.2.0"

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

__all__ = sorted(chain.from_iterable(_PLACES.values()))


def __getattr__(name: str) -> Any:
    for module, names in _PLACES.items():
        if name in names:
            return getattr(import_module(module), name)
    commands = import_module("raptor.commands")
    if name == "commands":
        return commands
    hint = ""
    # `raptor.phases` is a part of the library, so that the command of that name cannot stand here too.
    if name in dir(commands):
        hint = f": the command is raptor.commands.{name}"
    raise AttributeError(f"module 'raptor' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "commands"])
