"""Training: two-stage distillation of surrogates, and small teachers to study."""

from raptor.train.distill import Distilled, DistillSummary, Scores, Validator, distill
from raptor.train.plan import Plan

__all__ = ["DistillSummary", "Distilled", "Plan", "Scores", "Validator", "distill"]
