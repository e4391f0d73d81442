"""Two-stage distillation of a ViT into k tied blocks."""

from raptor.distill.main import Distilled, distill

__all__ = ["Distilled", "distill"]
