"""A few images through depth: patch tokens as colours, the teacher above the surrogate."""

from __future__ import annotations

from raptor.report.charts import Section, finite_values, number
from raptor.report.markup import paragraph
from raptor.report.results import Results
from raptor.report.strips import NO_IMAGES, ImagesFile

LEAD = (
    "Each patch is coloured by its state on three principal components of the teacher's patches at that layer. "
    "The same colour means the same state: scrub through depth and compare the rows."
)


def images(results: Results) -> Section:
    section = Section("seen", "Images", "What the model sees", LEAD)
    found = results.images
    if found is None or not found.images:
        has_model = (results.folder / "surrogate").is_dir() or results.config.get("model")
        options = "--images 4" if results.notes.get("images") == NO_IMAGES else "" if results.module else "--data DATA"
        again = results.on_run("report", options)
        section.hint = again if has_model else f"raptor distill MODEL --data DATA --k 3 --out {results.folder}"
        section.hint_reason = results.notes.get("images", "")
        return section
    section.html = '<div id="strip" class="strip"></div>'
    section.after = paragraph(_caption(found), "caption")
    return section


def _caption(found: ImagesFile) -> str:
    ends = [finite_values(row.cosine)[-1] for row in found.images if row.cosine]
    text = f"Images of {found.data}. Look for objects that appear out of the ground."
    if ends:
        mean = number(sum(ends) / len(ends))
        text += f" At the last layer the mean cosine between teacher and surrogate patches is {mean}."
    return text
