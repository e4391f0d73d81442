"""The sections of the page, in the order of the argument. Each is a function of `Results`."""

from __future__ import annotations

from collections.abc import Callable

from raptor.report.charts import Section
from raptor.report.results import Results
from raptor.report.section_basins import basins
from raptor.report.section_dynamics import dynamics
from raptor.report.section_fidelity import fidelity
from raptor.report.section_images import images
from raptor.report.section_interventions import interventions
from raptor.report.section_overview import overview
from raptor.report.section_phases import phases
from raptor.report.section_probes import probes
from raptor.report.section_provenance import provenance

SECTIONS: tuple[Callable[[Results], Section], ...] = (
    overview,
    phases,
    fidelity,
    probes,
    dynamics,
    basins,
    interventions,
    images,
    provenance,
)
