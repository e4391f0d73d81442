"""raptor distill: see raptor.train."""

from raptor.train import distill

__all__ = ["distill"]
