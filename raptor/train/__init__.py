"""Training: two-stage distillation of surrogates, and small teachers to study."""

from raptor.train.distill import Distilled, DistillSummary, Scores, Validator, distill

__all__ = ["DistillSummary", "Distilled", "Scores", "Validator", "distill"]
