"""The sections of the page, in the order of the argument. Each is a function of `Results`."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import yaml

from raptor.report.charts import Axis, Section, Series, described, finite_values, number
from raptor.report.dynamics import basins, dynamics
from raptor.report.fidelity import fidelity
from raptor.report.interventions import interventions
from raptor.report.markup import paragraph, table
from raptor.report.overview import overview
from raptor.report.phases import phases
from raptor.report.probes import probes
from raptor.report.results import Results
from raptor.report.tool import tool

_MAX_STEPS = 400  # of a training curve; more could not be told apart


def images(results: Results) -> Section:
    """A few images through depth: patch tokens as colours, the teacher above the surrogate."""
    found = results.images
    section = Section.named("seen", found is not None and found.surrogate is not None)
    if found is None or not found.images:
        section.hint = "raptor report --num_images 4"
        section.hint_reason = results.notes.get("images", "")
        return section
    caption = f"Images of {found.data}. Look for objects that appear out of the ground."
    ends = [finite_values(row.cosine)[-1] for row in found.images if row.cosine]
    if ends:
        mean = number(sum(ends) / len(ends))
        caption += f" At the last layer the mean cosine between teacher and surrogate patches is {mean}."
    section.body = ['<div id="strip" class="strip"></div>', paragraph(caption, "caption")]
    return section


def provenance(results: Results) -> Section:
    """How it was made: commands, config, versions, time, and the training curve."""
    section = Section.named("made")
    rows = []
    files_of_versions: dict[str, list[str]] = {}
    for name, found in results.provenance().items():
        rows.append((f"{name}.json", found.command or "–", number(found.seconds), found.device or "–"))
        versions = ", ".join(f"{package} {version}" for package, version in found.versions.items())
        files_of_versions.setdefault(versions, []).append(f"{name}.json")
    # One point is no curve.
    if sum(map(len, results.losses.values())) > 1:
        series: list[Series] = []
        for i, (stage, losses) in enumerate(results.losses.items()):
            every = -(-len(losses) // _MAX_STEPS)  # rounded up, so that never more than that are drawn
            steps, values = zip(*losses[::every])
            series.append(Series(stage, steps, values, colour=f"palette-{i}", plain=True))
        # A loss in half precision may be 0, which has no place on a logarithmic axis.
        is_positive = all(min(one.y) > 0 for one in series)
        section.body.append(described("training", series, y=Axis("loss", log=is_positive)))
    section.body.append(table(("file", "command", "seconds", "device"), rows, numeric=False))
    for versions, names in files_of_versions.items():
        if versions:
            # Mostly all files come from one installation, and then their names say nothing.
            which = "" if len(files_of_versions) == 1 else f" of {', '.join(names)}"
            section.body.append(paragraph(f"Versions{which}: {versions}.", "caption"))
    if results.config:
        # Escaped, because the names of models and files in it may be a stranger's.
        text = escape(yaml.safe_dump(dict(results.config), sort_keys=False, allow_unicode=True))
        section.body.append(
            f"<details><summary>config.yaml, everything resolved</summary><pre tabindex='0'>{text}</pre></details>"
        )
    return section


SECTIONS: tuple[Callable[[Results], Section], ...] = (
    overview,
    phases,
    fidelity,
    probes,
    dynamics,
    basins,
    interventions,
    tool,
    images,
    provenance,
)
