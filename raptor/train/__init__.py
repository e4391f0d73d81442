"""Training: two-stage distillation of surrogates, and small teachers to study."""

from raptor.train.distill import distill
from raptor.train.distilled import Distilled, DistillSummary
from raptor.train.plan import Plan
from raptor.train.validation import Scores, Validator

__all__ = ["DistillSummary", "Distilled", "Plan", "Scores", "Validator", "distill"]
