"""raptor models: what can be opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raptor.config import ModelsConfig
from raptor.provenance import command
from raptor.streaming import Result
from raptor.vit.names import list_models


@dataclass
class Models(Result):
    """Names that can be opened."""

    names: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {"models": self.names}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per name."""
        return [{"name": name} for name in self.names]

    def text(self) -> str:
        others = "hf/REPO (transformers), hub/REPO:ENTRY (torch.hub), a run folder, your module"
        return "\n".join([*self.names, "", f"{len(self.names)} names. Also: {others}."])


@command(ModelsConfig)
def models(config: ModelsConfig) -> Models:
    """List the names that can be opened."""
    names = list_models(config.filter)
    if not names:
        raise ValueError(f"no model matches {config.filter!r}: try a shorter part of its name, such as dinov2")
    return Models(names)
