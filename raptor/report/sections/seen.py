"""What the model sees: patch tokens as colours, through depth, teacher above surrogate."""

from __future__ import annotations

from raptor.report.charts import Section, finite_values, number
from raptor.report.markup import paragraph
from raptor.report.results import Results

LEAD = (
    "Each patch is coloured by its state on three principal components of the teacher's patches at that layer. "
    "The same colour means the same state: scrub through depth and compare the rows."
)


def seen(results: Results) -> Section:
    section = Section("seen", "What the model sees", LEAD)
    images = results.get("images")
    if not images or not images.get("images"):
        section.hint = f"raptor report {results.folder} --data DATA"
        section.hint_reason = results.notes.get("images", "")
        return section
    section.html = '<div id="strip" class="strip"></div>'
    section.after = paragraph(_caption(images), "caption")
    return section


def _caption(images: dict[str, object]) -> str:
    rows = images["images"]
    assert isinstance(rows, list)
    ends = [finite_values(row["cosine"])[-1] for row in rows if row.get("cosine")]
    text = f"Images of {images.get('data', 'the data')}. Look for objects that appear out of the ground."
    if ends:
        text += f" At the last layer the mean cosine between teacher and surrogate patches is {number(sum(ends) / len(ends))}."
    return text
