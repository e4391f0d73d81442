"""All interventions: what they share, and the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import noise_images

from raptor.dynamics.interventions import InterventionsFile
from raptor.dynamics.repetition import (
    measure_extrapolation,
    measure_repetition,
)
from raptor.dynamics.swaps import measure_swaps
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.view import ViT

NUM = 6
RESULTS = Path(__file__).parents[2] / "docs" / "results" / "dynamics"


def test_a_given_head_decides_and_none_leaves_agreement_out(teacher: ViT) -> None:
    images = noise_images(teacher, NUM)
    varied = measure_swaps(teacher, images, (2, 2), predict=lambda x: torch.eye(3)[torch.arange(len(x)) % 2])
    assert varied.agreement is not None and (varied.agreement.mean == 1).all() and "predictions" in varied.finding()
    constant = measure_swaps(teacher, images, (2, 2), predict=lambda x: torch.eye(3)[torch.zeros(len(x)).long()])
    assert constant.agreement is None and "predictions" not in constant.finding()  # they stay because they never vary
    teacher.num_classes = 0
    without = measure_repetition(teacher, images, (2, 2))
    assert without.agreement is None and "predictions" not in without.finding()
    assert measure_swaps(teacher, images, (2, 2)).agreement is None


def test_bad_input(teacher: ViT) -> None:
    images = noise_images(teacher, 2)
    with pytest.raises(ValueError, match="do not sum to the 4 blocks"):
        measure_swaps(teacher, images, (2, 3))
    with pytest.raises(ValueError, match="not a surrogate"):
        measure_extrapolation(teacher, images)
    with pytest.raises(ValueError, match="at least one extra step"):
        measure_extrapolation(make_surrogate(teacher, (2, 2)), images, num_extra=0)


def test_committed_results_are_read_and_written_unchanged() -> None:
    path = RESULTS / "dinov2s-k3-interventions.json"
    found = InterventionsFile.read_file(path)
    saved, written = json.loads(path.read_text()), found.to_dict()
    for side in ("teacher", "surrogate"):
        del saved[side]["repetition"]["exit_angle"]  # measured until version 0.1.0
        assert written[side] == saved[side]
    assert found.findings == [f"{side}: {line}" for side, parts in found.sides().items() for line in parts.findings()]
