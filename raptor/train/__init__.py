"""Training: two-stage distillation of surrogates, and small teachers to study."""

from raptor.train.distill import distill
from raptor.train.distilled import Distilled

__all__ = ["Distilled", "distill"]
