"""raptor models: what can be opened."""

from __future__ import annotations

from raptor.open import list_models


def models(filter: str = "") -> None:
    """List the names that can be opened.

    Args:
        filter: a part of the name, or a pattern with `*`.
    """
    names = list_models(filter)
    if not names:
        raise ValueError(f"no model matches {filter!r}: try a shorter part of its name, such as dinov2")
    print("\n".join(names))
    print(f"\n{len(names)} names. Also: hf/REPO (transformers), hub/REPO:ENTRY (torch.hub), a run folder, your module.")
