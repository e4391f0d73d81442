"""The page: one self-contained file from a run folder, with no need of a network."""

from __future__ import annotations

import base64
import gzip
from dataclasses import asdict
from functools import lru_cache
from html import escape
from itertools import groupby
from pathlib import Path

from raptor.report.charts import Chart, Section, rounded
from raptor.report.markup import paragraph, safe_json
from raptor.report.results import Results
from raptor.report.sections import SECTIONS

_HERE = Path(__file__).parent
_MAX_DATA = 2_000_000
_MAX_PAGE = 6_000_000
# Nothing may be fetched; plotly's WebGL code makes functions from text.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; "
    "font-src data:"
)


def build_page(results: Results) -> str:
    """The whole HTML page of `results`; ValueError where its data would be too large."""
    sections = []
    charts = {}
    for make in SECTIONS:
        section = make(results)
        sections.append(section)
        for chart in section.charts:
            charts[chart.id] = chart.to_dict()
    data = safe_json(
        {
            "charts": charts,
            "sections": {section.id: [chart.id for chart in section.charts] for section in sections},
            "controls": {section.id: [asdict(control) for control in section.controls] for section in sections},
            "images": rounded(results.images),
            "phases": results.phase_lengths,
            "name": results.folder.resolve().name,
        }
    )
    if len(data.encode()) > _MAX_DATA:
        raise ValueError(
            f"the page's data would take {len(data) / 1e6:.1f} MB of 2: use fewer models or fewer --num_images"
        )
    page = _page(results, sections, data)
    # The data is limited above, so only the parts that we ship could make it larger.
    assert len(page.encode()) < _MAX_PAGE, "the page is too large"
    return page


def _page(results: Results, sections: list[Section], data: str) -> str:
    title = results.folder.resolve().name
    if results.facts:
        title = results.facts.name
    links = ""  # the sections in the bar, in the order of the page
    body = ""
    for section in sections:
        links += f'<a href="#{section.id}">{escape(section.nav)}</a>'
        body += _section(section)
    scripts = ""
    for name in ("draw.js", "strip.js", "page.js"):
        scripts += f"<script>{_text(name)}</script>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(str(title))} · depth as a dynamical system</title>"
        f"<style>{_text('page.css')}</style><script>{_text('theme.js')}</script></head><body>"
        '<a class="skip" href="#glance">Skip to the results</a>'
        f'<header class="bar"><span class="brand">raptor</span><nav aria-label="Sections">{links}</nav>'
        '<button id="theme" type="button" aria-label="Switch between light and dark">◐</button></header>'
        f'<main><div class="title"><p class="kicker">Depth as a dynamical system</p><h1>{escape(str(title))}</h1></div>'
        f"{body}</main>"
        "<footer>One file, no network. Colours of Okabe and Ito.</footer>"
        '<noscript><p class="hint">The figures need JavaScript.</p></noscript>'
        f'<script type="application/json" id="data">{data}</script>'
        f'<script type="application/octet-stream" id="plotly">{_plotly_packed()}</script>{scripts}</body></html>'
    )


def _section(section: Section) -> str:
    parts = [f'<section id="{section.id}"><h2>{escape(section.title)}</h2>']
    # Without a body only a hint is left, and the lead speaks of what is not there.
    if section.lead and section.body:
        parts.append(paragraph(section.lead, "lead"))
    if section.controls:
        parts.append(f'<div class="controls" data-section="{section.id}"></div>')  # page.js fills it
    # Charts that follow each other share a grid, and text between them ends it.
    for is_chart, body in groupby(section.body, key=lambda one: isinstance(one, Chart)):
        pieces = "".join(_chart(one) if isinstance(one, Chart) else one for one in body)
        parts.append(f'<div class="grid">{pieces}</div>' if is_chart else pieces)
    if section.hint:
        reason = escape(section.hint_reason or "Not measured in this run.")
        parts.append(f'<p class="hint">{reason} Add it with <code>{escape(section.hint)}</code></p>')
    elif section.hint_reason:
        parts.append(paragraph(section.hint_reason, "caption"))
    return f"{''.join(parts)}</section>"


def _chart(chart: Chart) -> str:
    buttons = ""
    for kind in ("PNG", "SVG", "CSV"):
        words = f"Download {escape(chart.title)} as {kind}"
        buttons += f'<button type="button" data-download="{kind.lower()}" aria-label="{words}">{kind}</button>'
    kind = "chart wide" if chart.wide else "chart"
    readout = ""
    if chart.kind in ("heatmap", "paths"):
        readout = '<p class="readout" aria-live="polite"></p>'
    return (
        f'<figure class="{kind}" id="chart-{chart.id}" data-chart="{chart.id}"><div class="chart-head">'
        f'<h3>{escape(chart.title)}</h3><div class="downloads">{buttons}</div></div>'
        f'<div class="controls" data-controls="{chart.id}"></div>'
        f'<div class="plot {chart.kind}" role="img" aria-label="{escape(chart.words())}"></div>{readout}'
        f"<figcaption>{escape(chart.caption)}</figcaption>"
        '<details class="data"><summary>Data table</summary><div class="scroll" tabindex="0"></div></details></figure>'
    )


def _text(name: str) -> str:
    """A file of this folder; a script must not hold the end of a script."""
    text = (_HERE / name).read_text(encoding="utf-8")
    assert "</script" not in text and "</style" not in text
    return text


@lru_cache(maxsize=1)
def _plotly_packed() -> str:
    """plotly.min.js, gzip then base64: 2.0 MB instead of 4.8; the page unpacks it with DecompressionStream."""
    from plotly.offline import get_plotlyjs

    # gzip writes the time into its header: without one the same results give the same page.
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()
