"""The untrained twin: the same model with random weights, whose similarity shows what the architecture alone gives."""

from __future__ import annotations

from raptor.data.stream import ImageStream
from raptor.devices import seeded
from raptor.phases.similarity import measure_similarity
from raptor.streaming import Array
from raptor.vit.builders import build_base
from raptor.vit.structure import inspect_vit
from raptor.vit.trajectory import Trajectories
from raptor.vit.view import ViT

_TWIN_IMAGES = 64
_TWIN_SECONDS = 20


def twin_similarity(
    vit: ViT,
    batches: ImageStream,
    tokens: str,
    precision: str,
    seconds: float,
    wanted: bool | None,
    standardised: bool,
) -> tuple[Array | None, str]:
    """The similarity of the untrained twin on some of the images, and how it was measured or why it was not.

    seconds: per image. wanted: None measures the twin where that is quick.
    """
    missing = "its untrained twin was not measured"
    if wanted is False:
        return None, f"{missing} (--twin false)"
    if standardised:
        return None, f"{missing} (its coordinates are not standardised)"
    if wanted is None and seconds * _TWIN_IMAGES > _TWIN_SECONDS:
        return None, f"{missing} (it takes longer than {_TWIN_SECONDS} s: --twin true)"
    try:
        twin = untrained_twin(vit)
    except ValueError as error:
        return None, f"{missing} ({error})"
    trajectories = Trajectories(twin, batches.sample(_TWIN_IMAGES), precision)
    # Without CKA, which needs more images than the twin gets.
    measured = measure_similarity(trajectories, vit.num_layers, vit.groups, cka_features=None, model=twin.name)
    return measured.matrices[tokens], f"its untrained twin was measured on {measured.num_images} images"


def untrained_twin(vit: ViT, seed: int = 0) -> ViT:
    """The same model with random weights; ValueError for a surrogate or a module of your own, which has none."""
    if vit.phases:
        raise ValueError("a surrogate has none")
    if vit.origin.base is None:
        raise ValueError("a module of your own cannot be built anew")
    # The weights must not depend on what was drawn before: results are repeated to the last bit.
    with seeded(seed):
        model = build_base(vit.origin.base)
    name = f"untrained twin of {vit.name}"
    return inspect_vit(model, name, vit.preprocess, vit.structure(), vit.origin).to(vit.device)
