"""Correction against the model's own forward pass, and disturbances of a size that is known."""

from __future__ import annotations

import pytest
import torch
from tiny_models import noise_images, tiny_timm

from raptor import open_vit
from raptor.data.stream import Batch
from raptor.recurrence.correct import Correction, Disturbance, correct_findings, disturb, measure_corrections
from raptor.vit.calls import first_tensor


def test_agreement_is_that_of_a_loop_over_blocks() -> None:
    vit = open_vit("scenes-k3")
    images = noise_images(vit, 8)
    batches = [Batch(images, None, list(range(8)))]
    (found,) = measure_corrections(vit, batches, 2, [Disturbance("noise", 2.0)], max_extra=2, seed=3)
    assert vit.phases is not None
    first, last = sum(vit.phases[:1]) + 1, sum(vit.phases[:2])
    with torch.no_grad():
        clean = vit(images).argmax(-1)
        states, _ = vit.record(images)
        x_btd = disturb(vit, states[first - 1], "noise", 2.0, torch.Generator().manual_seed(3))
        _, context = vit.embed(images)
        for layer in range(first, last + 1):
            x_btd = vit.step(layer, x_btd, context)
        expected = []
        for extra in range(3):
            if extra:
                args, kwargs = context.calls[last - 1]
                x_btd = first_tensor(vit.blocks[last - 1](x_btd, *args, **kwargs))
            out = vit.finish(vit.unroll(x_btd, context, start=last)[-1])
            expected.append(float((out.argmax(-1) == clean).double().mean()))
    assert found.agreement == pytest.approx(expected) and expected[0] < 1
    assert found.agreement_clean[0] == 1 and found.num_images == 8
    assert found.recovered is not None and found.recovered[0] == 0


def test_the_share_that_comes_back() -> None:
    found = Correction("noise", 0.3, 1, [0.6, 0.8, 0.5], [1, 1, 1], 10)
    assert found.recovered == pytest.approx([0, 0.5, -0.25])
    assert Correction("noise", 0.0, 1, [1.0], [1.0], 10).recovered is None


def test_disturbances_have_the_size_they_say() -> None:
    vit = tiny_timm(depth=2, size=64)
    x_btd = torch.randn(2, vit.groups.num_tokens, vit.dim)
    noisy = disturb(vit, x_btd, "noise", 0.3, torch.Generator().manual_seed(0))
    assert torch.allclose((noisy - x_btd).norm(dim=-1) / x_btd.norm(dim=-1), torch.tensor(0.3))
    dropped = disturb(vit, x_btd, "dropped patches", 0.25, torch.Generator().manual_seed(0))
    patches = vit.groups.slice("patches")
    is_changed = (dropped != x_btd).any(-1)
    assert is_changed.sum(1).tolist() == [4, 4] and not is_changed[:, : patches.start].any()
    assert torch.allclose(dropped[0][is_changed[0]], x_btd[0, patches].mean(0).expand(4, -1))


def test_disturbed_images_enter_with_their_own_state() -> None:
    vit = open_vit("scenes-k3")
    images, others = noise_images(vit, 6, seed=1), noise_images(vit, 6, seed=2)
    clean, changed = ([Batch(x, None, list(range(6)))] for x in (images, others))
    disturbances = [Disturbance("swapped", 1, changed), Disturbance("none", 0, clean)]
    swapped, same = measure_corrections(vit, clean, 3, disturbances, max_extra=1)
    with torch.no_grad():
        kept = (vit(images).argmax(-1) == vit(others).argmax(-1)).double().mean()
    assert swapped.agreement[0] == pytest.approx(float(kept))
    assert same.agreement == same.agreement_clean == swapped.agreement_clean


def test_the_finding_is_of_the_phase_that_brings_back_most() -> None:
    rows = [Correction("noise", 0.3, 1, [0.6, 0.5], [1, 1], 10), Correction("noise", 0.3, 2, [0.5, 0.75], [1, 1], 10)]
    (line,) = correct_findings({"surrogate": rows})
    assert (
        line.startswith("surrogate, noise 0.3: at best +50% of the lost")
        and "(5 of 10 images were lost, phase 2, further steps: 1)" in line
    )
    assert "no agreement is lost" in correct_findings({"twin": [Correction("blur", 3, 1, [1, 1], [1, 1], 9)]})[0]


def test_what_cannot_be_corrected_is_refused() -> None:
    vit = tiny_timm(depth=4)
    batches = [Batch(noise_images(vit, 2), None, [0, 1])]
    noise = [Disturbance("noise", 0.3)]
    with pytest.raises(ValueError, match="say where its phases are"):
        measure_corrections(vit, batches, 1, noise)
    with pytest.raises(ValueError, match="there is no phase 3"):
        measure_corrections(vit, batches, 3, noise, phases=[2, 2])
    with pytest.raises(ValueError, match="unknown disturbance 'blur'"):
        measure_corrections(vit, batches, 1, [Disturbance("blur", 1)], phases=[2, 2])
    with pytest.raises(ValueError, match="not possible"):
        measure_corrections(vit, batches, 1, [Disturbance("dropped patches", 1.5)], phases=[2, 2])
    with pytest.raises(ValueError, match="no images to correct"):
        measure_corrections(vit, [], 1, noise, phases=[2, 2])
