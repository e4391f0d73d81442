"""Two-stage distillation of a ViT into k tied blocks."""

from raptor.distill.distilled import Distilled
from raptor.distill.main import distill

__all__ = ["Distilled", "distill"]
