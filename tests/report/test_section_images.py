"""Images on the page: the caption has the mean of the last cosines; without images there is a hint."""

from __future__ import annotations

from pathlib import Path

import pytest

from raptor.report.results import Results, read_results
from raptor.report.section_images import images


def test_the_caption_has_the_mean_cosine_of_the_last_layer(full_run: Path, full_page: str) -> None:
    results = read_results(full_run)
    assert results.images is not None
    ends = [row.cosine[-1] for row in results.images.images if row.cosine]
    assert len(ends) == 2 and f"patches is {sum(ends) / 2:.3g}." in images(results).after


@pytest.mark.parametrize(("config", "verb"), [({}, "distill MODEL"), ({"model": "scenes"}, "report")])
def test_the_hint_is_the_command_that_can_run(tmp_path: Path, config: dict[str, str], verb: str) -> None:
    section = images(Results(tmp_path, config=config, notes={"images": "why"}))
    assert section.hint is not None and section.hint.startswith(f"raptor {verb}") and section.hint_reason == "why"
