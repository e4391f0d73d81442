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
    section = Section("seen", "Images", "What the model sees", LEAD)
    images = results.get("images")
    if not images or not images.get("images"):
        has_model = (results.folder / "surrogate").is_dir() or results.config.get("model")
        verb = "report {} --data DATA" if has_model else "distill MODEL --data DATA --k 3 --out {}"
        section.hint = f"raptor {verb.format(results.folder)}"
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
        mean = number(sum(ends) / len(ends))
        text += f" At the last layer the mean cosine between teacher and surrogate patches is {mean}."
    return text
