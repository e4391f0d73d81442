"""The untrained twin: the same model with random weights, whose similarity shows what the architecture alone gives."""

from __future__ import annotations

from raptor.devices import seeded
from raptor.vit.builders import build_base
from raptor.vit.structure import inspect_vit
from raptor.vit.view import ViT


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
