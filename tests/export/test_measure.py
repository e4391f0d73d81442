"""What export.json says of a file: errors and agreement from their definitions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_certified import image_batches, tiny_vit
from tiny_surrogates import conditioned

from raptor.certificate.heads import Head
from raptor.export.measure import (
    BATCHES,
    Export,
    ExportRow,
    Runner,
    check_parity,
    in_pytorch,
    measure_runners,
    time_runners,
)
from raptor.export.weights import with_rounded_values
from raptor.subject import Subject


@torch.no_grad()
def test_errors_and_agreement(tmp_path: Path) -> None:
    teacher = tiny_vit(num_classes=3)
    surrogate = conditioned(teacher, (2, 3))
    batches = image_batches(1)
    images = torch.cat([batch.images for batch in batches])
    coarse = with_rounded_values(surrogate, "int4")
    runners = [
        in_pytorch("teacher", teacher, teacher, "fp32"),
        Runner(ExportRow("surrogate", "x", "int4", 1), in_pytorch("", coarse, surrogate, "int4").exported, surrogate),
    ]
    runners[1].same = surrogate
    assert measure_runners(runners, teacher, batches, Head("own", 3)) == len(images) == 21
    assert runners[0].row.errors == [0.0] * 6 and runners[0].row.agreement == 1.0
    states, output = surrogate.record(images)
    rough, other = coarse.record(images)
    for layer, error in enumerate(runners[1].row.errors):
        apart = (rough[layer] - states[layer]).flatten(1).norm(dim=1).sum()
        assert error == pytest.approx((apart / states[layer].flatten(1).norm(dim=1).sum()).item(), rel=1e-5)
    agreed = (other.argmax(-1) == teacher(images).argmax(-1)).double().mean().item()
    assert runners[1].row.agreement == pytest.approx(agreed)
    shares = []
    for ours, theirs in zip(other.split([8, 8, 5]), output.split([8, 8, 5])):
        shares.append(((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1)).item())
    largest = max(shares)
    assert runners[1].row.largest == pytest.approx(largest, rel=1e-4)
    check_parity(runners[1].row, 1.01 * largest)
    with pytest.raises(ValueError, match=r"the x file in int4 differs from the model by .*take another --to"):
        check_parity(runners[1].row, 0.99 * largest)

    time_runners(runners, 32, 2)
    assert all(row.p95[batch] >= row.p50[batch] > 0 for row in (one.row for one in runners) for batch in BATCHES)
    subject = Subject.of(teacher, None, surrogate)
    rows = [one.row for one in runners]
    found = Export("pt2", "int4", "use", rows, 21, "noise", "the head", 1, subject=subject)
    found.write(tmp_path)
    assert next(iter(json.loads((tmp_path / "export.json").read_text()))) == "subject"
    again = Export.read(tmp_path)
    assert again.rows == rows and "surrogate | x | int4" in again.text()


def test_output_that_is_not_a_number_is_no_parity() -> None:
    teacher = tiny_vit(num_classes=3)
    broken = in_pytorch("teacher", teacher, teacher, "fp32")
    broken.same = lambda images: torch.full((len(images), 3), torch.nan)  # type: ignore[assignment]
    measure_runners([broken], teacher, image_batches(1), None)
    assert broken.row.agreement is None
    with pytest.raises(ValueError, match="differs from the model by inf"):
        check_parity(broken.row, 1.0)
