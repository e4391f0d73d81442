"""raptor models: what can be opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raptor.config import ModelsConfig
from raptor.provenance import command
from raptor.streaming import Result
from raptor.vit.names import list_models, models_for


@dataclass
class Models(Result):
    """Names that can be opened; with `weights`, the models that this file fits."""

    names: list[str]
    weights: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"models": self.names}

    def table_rows(self) -> list[dict[str, Any]]:
        """One row per name."""
        return [{"name": name} for name in self.names]

    def text(self) -> str:
        if self.weights is not None:
            last = f"{self.weights} fits these models: open it as {self.names[0]}@{self.weights}"
            if len(self.names) > 1:
                # By their mean and deviation, for example, which no weight shows.
                last += ", or as the other that it belongs to: they may prepare images differently"
        else:
            others = "hf/REPO (transformers), hub/REPO:ENTRY (torch.hub), a run folder, your module"
            last = f"{len(self.names)} names. Also: {others}."
        return "\n".join([*self.names, "", last])


@command(ModelsConfig)
def models(config: ModelsConfig) -> Models:
    """List the names that can be opened, or the models that a weight file fits."""
    if config.for_ is not None:
        fitting = [name for name in models_for(config.for_) if config.filter in name]
        if not fitting:
            what = f"timm model that contains {config.filter!r}" if config.filter else "ViT of timm"
            raise ValueError(f"{config.for_} fits no {what}: open it with the module that it belongs to")
        return Models(fitting, config.for_)
    names = list_models(config.filter)
    if not names:
        raise ValueError(f"no model matches {config.filter!r}: try a shorter part of its name, such as dinov2")
    return Models(names)
