"""Linear probes of a frozen view at any layer: classify, segment, depth, a grid of learning rates in one pass."""

from raptor.probes.protocol import DEFAULTS, probe
from raptor.probes.result import ProbeReport, ProbeResult, recovery

__all__ = ["DEFAULTS", "ProbeReport", "ProbeResult", "probe", "recovery"]
