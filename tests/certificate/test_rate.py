"""Rate and distortion: rounded weights, their errors by hand, and what counts as compression."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_certified import PHASES, all_states, image_batches, tiny_vit
from torch import nn

from raptor.certificate.complexity import levin_bound, levin_bounds
from raptor.certificate.heads import resolve_head
from raptor.certificate.rate import (
    Complexity,
    RateDistortion,
    RatePoint,
    has_matrices,
    measure_rates,
    quantised,
    rounded,
)
from raptor.surrogate.surrogate import make_surrogate
from raptor.vit.view import ViT


@pytest.mark.parametrize(("precision", "largest"), [("int8", 127), ("int6", 31), ("int4", 7), ("int3", 3)])
def test_each_row_is_rounded_to_even_steps_either_way(precision: str, largest: int) -> None:
    weight = torch.randn(5, 400, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 5)[:, None]
    stored = rounded(weight, precision)
    step = weight.abs().amax(1, keepdim=True) / largest
    assert ((stored - weight).abs() <= step / 2 * (1 + 1e-4)).all()
    levels = stored / step
    torch.testing.assert_close(levels, levels.round(), atol=1e-4, rtol=0)
    assert levels.abs().max() <= largest + 1e-3
    assert all(len(row.unique()) <= 2 * largest + 1 for row in levels.round())
    assert (rounded(torch.zeros(2, 3), precision) == 0).all()


def test_weights_beyond_fp16_stay_finite() -> None:
    assert rounded(torch.tensor([[1e6, -1e6, 2.0]]), "fp16").tolist() == [[65504, -65504, 2]]


def test_rounding_noise_is_uniform_over_a_step() -> None:
    weight = torch.randn(5, 400, generator=torch.Generator().manual_seed(0))
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((rounded(weight, "int8") - weight) / step).std().item() == pytest.approx(1 / np.sqrt(12), rel=0.1)


@pytest.mark.parametrize("precision", ["fp16", "int8", "int3"])
def test_quantised_weights_are_put_back(precision: str) -> None:
    surrogate = make_surrogate(tiny_vit(), PHASES, conditioning="none")
    before = {name: value.clone() for name, value in surrogate.model.state_dict().items()}
    with pytest.raises(RuntimeError), quantised(surrogate, precision):
        weight = surrogate.model.shared_blocks[0].block.block.attn.qkv.weight
        if precision == "fp16":
            assert torch.equal(weight, weight.half().float())
        else:
            assert not torch.equal(weight, before["shared_blocks.0.block.block.attn.qkv.weight"])
        raise RuntimeError
    for name, value in surrogate.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_each_point_is_a_model_rounded_by_hand() -> None:
    teacher = tiny_vit(num_classes=3)
    surrogate = make_surrogate(teacher, PHASES, copy="last")
    head, _ = resolve_head(teacher)
    found = measure_rates(surrogate, teacher, image_batches(1), head=head)
    assert [(p.side, p.precision) for p in found.points] == [
        ("surrogate", "fp16"),
        ("surrogate", "int8"),
        ("surrogate", "int4"),
        ("teacher", "int8"),
        ("teacher", "int6"),
        ("teacher", "int4"),
        ("teacher", "int3"),
    ]
    exact = all_states(teacher, image_batches(1))
    images = torch.cat([batch.images for batch in image_batches(1)])
    chosen = teacher(images).argmax(-1)
    for point in found.points:
        vit = {"surrogate": surrogate, "teacher": teacher}[point.side]
        with quantised(vit, point.precision):
            own = all_states(vit, image_batches(1))
            same = (vit(images).argmax(-1) == chosen).double().mean().item()
        relative = []
        for x, y in zip(exact[1:], own[1:]):
            relative.append(float(torch.linalg.matrix_norm(x - y).mean() / torch.linalg.matrix_norm(x).mean()))
        assert point.last == pytest.approx(relative[-1], rel=1e-4)
        assert point.largest == pytest.approx(max(relative), rel=1e-4)
        assert point.layer == int(np.argmax(relative)) + 1
        assert point.agreement == pytest.approx(same)
        assert point.bits == levin_bound(vit, point.precision).total_bits
    of_teacher = found.of("teacher")
    assert [p.precision for p in of_teacher] == ["int3", "int4", "int6", "int8"]  # by their bits
    assert [p.last for p in of_teacher] == sorted((p.last for p in of_teacher), reverse=True)
    for bits, point in zip((3, 4, 6, 8), of_teacher):
        matrices = [p for p in teacher.blocks.parameters() if p.ndim > 1]
        vectors = [p for p in teacher.blocks.parameters() if p.ndim == 1]
        counted = sum(bits * p.numel() + 32 * len(p) for p in matrices) + sum(16 * p.numel() for p in vectors)
        assert point.bits == pytest.approx(counted, rel=1e-3)  # beside it only the schedule and the time


def point(side: str, megabits: float, error: float) -> RatePoint:
    return RatePoint(side, "int8", 1e6 * megabits, error, 3, error)


def test_only_below_the_teachers_curve_is_compression() -> None:
    curve = [point("teacher", 10, 0.4), point("teacher", 30, 0.2)]
    rates = RateDistortion(8, [*curve, point("surrogate", 20, 0.29), point("surrogate", 20, 0.31)])
    assert [rates.is_below(p) for p in rates.of("surrogate")] == [True, False]  # the line is at .3
    assert rates.is_below(point("surrogate", 5, 0.39)) is True  # fewer bits and a smaller error than any
    assert rates.is_below(point("surrogate", 5, 0.5)) is None  # fewer bits, a larger error
    assert (
        rates.is_below(point("surrogate", 40, 0.19)) is True and rates.is_below(point("surrogate", 40, 0.21)) is False
    )
    # A point as far up as the curve is not below it; left of the curve that decides nothing.
    assert rates.is_below(point("surrogate", 30, 0.2)) is False and rates.is_below(point("surrogate", 10, 0.5)) is False
    assert rates.is_below(point("surrogate", 5, 0.4)) is None
    line = rates.line()
    assert "(20.0 Mbit, error 0.290) below the teacher's curve, which is compression" in line
    assert "(20.0 Mbit, error 0.310) above the teacher's curve, which is no compression" in line


def test_every_point_has_an_agreement_or_none() -> None:
    judged = RatePoint("teacher", "int8", 1e6, 0.1, 1, 0.1, agreement=0.5)
    assert len(RateDistortion(8, [judged, judged]).of("teacher")) == 2
    with pytest.raises(ValueError, match="the agreement of a point is missing"):
        RateDistortion(8, [judged, point("teacher", 1, 0.1)])


def test_no_images_have_no_errors() -> None:
    teacher = tiny_vit()
    with pytest.raises(ValueError, match="no images to measure errors on"):
        measure_rates(make_surrogate(teacher, PHASES), teacher, [])


def test_the_ratio_by_itself_says_that_it_is_no_evidence(teacher: ViT, surrogate: ViT) -> None:
    complexity = Complexity(**levin_bounds(surrogate, teacher))
    [line] = complexity.to_dict()["lines"]
    assert "is no evidence of compression" in line and f"({complexity.fp32.ratio:.3f} in fp32)" in line
    saved = complexity.to_dict()
    assert Complexity.from_dict(saved).to_dict() == saved


class Scaled(nn.Module):
    """A block without a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((24,), 1.1))

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        return self.gain * x_btd


def test_blocks_without_linear_layers_are_refused() -> None:
    vit = tiny_vit(depth=2)
    for layer in range(2):
        vit.blocks._modules[str(layer)] = Scaled()
    assert not has_matrices(vit)
    with pytest.raises(ValueError, match=r"the blocks of .* have no linear layers to round"):
        measure_rates(vit, vit, image_batches(1))
