"""The sections of the page, in the order of the argument. Each is a function of `Results`."""

from __future__ import annotations

from collections.abc import Callable

from raptor.report.charts import Section
from raptor.report.results import Results
from raptor.report.sections.basins import basins
from raptor.report.sections.dynamics import dynamics
from raptor.report.sections.fidelity import fidelity
from raptor.report.sections.glance import glance
from raptor.report.sections.interventions import interventions
from raptor.report.sections.made import made
from raptor.report.sections.probes import probes
from raptor.report.sections.seen import seen
from raptor.report.sections.similarity import similarity

SECTIONS: tuple[Callable[[Results], Section], ...] = (
    glance, similarity, fidelity, probes, dynamics, basins, interventions, seen, made,
)  # fmt: skip
