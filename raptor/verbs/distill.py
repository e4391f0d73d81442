"""raptor distill: see raptor.distill."""

from raptor.distill import distill

__all__ = ["distill"]
