"""Depth on demand against loops over single images; its rules against known angles, entropies and divergences."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from tiny_models import noise_images, tiny_timm

from raptor import open_vit
from raptor.vit.groups import TokenGroups
from raptor.vit.on_demand import (
    FixedLengths,
    Measured,
    RandomSkip,
    Rule,
    parse_rule,
    run_on_demand,
    select_images,
    turn,
)
from raptor.vit.view import Context


def test_without_a_rule_it_is_the_models_own_depth() -> None:
    vit = open_vit("scenes-k3")
    images = noise_images(vit, 3)
    run = run_on_demand(vit, images, Rule())
    with torch.no_grad():
        assert torch.equal(run.last_btd, vit.record(images)[0][-1])
    assert run.num_blocks_b.tolist() == [vit.num_layers] * 3


def test_each_image_is_as_it_would_be_alone() -> None:
    vit = open_vit("scenes-k3")
    images = noise_images(vit, 6)
    assert vit.phases is not None
    with torch.no_grad():
        states = vit.record(images)[0]
        turns_lb = torch.stack([turn(a[:, 0], b[:, 0]) for a, b in pairwise(states)])
    threshold = float(turns_lb.median())
    run = run_on_demand(vit, images, Measured("turn", threshold, vit.groups))
    assert len(set(run.num_blocks_b.tolist())) > 1, "the rule must tell images apart here"
    for i in range(len(images)):
        with torch.no_grad():
            x_btd, context = vit.embed(images[i : i + 1])
            layer, num_blocks = 0, 0
            for length in vit.phases:
                for step in range(1, length + 1):
                    before_btd = x_btd
                    x_btd = vit.step(layer + step, x_btd, context)
                    num_blocks += 1
                    cosine = torch.nn.functional.cosine_similarity(before_btd[:, 0], x_btd[:, 0]).double()
                    if float(torch.arccos(cosine.clamp(-1, 1))) < threshold:
                        break
                layer += length
        assert int(run.num_blocks_b[i]) == num_blocks
        assert torch.allclose(run.last_btd[i], x_btd[0], atol=1e-4)


def test_a_shorter_schedule_is_the_composition_of_its_blocks() -> None:
    vit = tiny_timm(depth=4)
    images = noise_images(vit, 2)
    run = run_on_demand(vit, images, FixedLengths([1, 2]), phases=[2, 2])
    with torch.no_grad():
        x_btd, context = vit.embed(images)
        for layer in (1, 3, 4):
            x_btd = vit.step(layer, x_btd, context)
    assert torch.equal(run.last_btd, x_btd) and run.num_blocks_bk.tolist() == [[1, 2], [1, 2]]


def test_a_teacher_needs_its_phases_and_a_rule_never_skips_a_whole_phase() -> None:
    vit = tiny_timm(depth=4)
    with pytest.raises(ValueError, match="say where its phases are"):
        run_on_demand(vit, noise_images(vit, 2), Rule())
    run = run_on_demand(vit, noise_images(vit, 2), RandomSkip(1.0), phases=[3, 1])
    assert run.num_blocks_bk.tolist() == [[1, 1], [1, 1]]


def test_arguments_of_single_images_go_with_their_images() -> None:
    mask_b = torch.tensor([10.0, 11.0, 12.0])
    context = Context([((mask_b,), {"depth": 7})])
    found = select_images(context, [True, False], torch.tensor([2, 0]))
    assert found.calls[0][0][0].tolist() == [12.0, 10.0] and found.calls[0][1] == {"depth": 7}


def test_states_keep_their_digits_between_phases() -> None:
    """Under autocast the embedding may be in half precision, and the stream after a block is not."""

    class Thirds:
        name = "thirds"
        groups = TokenGroups(cls=1, registers=0, patches=1)
        phases = (1, 2)
        num_classes = 0
        num_layers = 3

        def embed(self, images: torch.Tensor) -> tuple[torch.Tensor, Context]:
            return torch.ones(len(images), 2, 4, dtype=torch.bfloat16), Context([((), {})] * 3)

        def step(self, layer: int, x_btd: torch.Tensor, context: Context) -> torch.Tensor:
            return x_btd.float() / 3

        def finish(self, x_btd: torch.Tensor) -> torch.Tensor:
            return x_btd

    run = run_on_demand(Thirds(), torch.zeros(2, 3, 8, 8), Rule())
    assert run.last_btd.dtype == torch.float32
    assert torch.allclose(run.last_btd, torch.tensor(1 / 27), rtol=1e-6)


def test_a_rule_by_its_name_gives_the_models_output() -> None:
    vit = open_vit("scenes-k3")
    images = noise_images(vit, 4)
    with torch.no_grad():
        assert torch.equal(vit.run(images).output, vit(images))
    early = vit.run(images, exit="turn<10")
    assert early.num_blocks_bk.tolist() == [[1, 1, 1]] * 4 and early.num_read_outs == 0
    # An entropy is read after each step but the last one of a phase: of 4 images twice, twice and five times.
    assert vit.run(images, exit="entropy<1e-9").num_read_outs == 4 * (2 + 2 + 5)
    # The divergence needs the state before the first step of a phase as well.
    assert vit.run(images, exit="kl<1e-30").num_read_outs == 4 * (3 + 3 + 6)
    with pytest.raises(ValueError, match=r"phases \[3, 3\] do not add up to the 12 layers"):
        vit.run(images, phases=[3, 3])


GROUPS = TokenGroups(cls=1, registers=0, patches=2)


def _state(*vectors: tuple[float, float]) -> torch.Tensor:
    """States of which only cls matters."""
    x_btd = torch.zeros(len(vectors), 3, 2)
    x_btd[:, 0] = torch.tensor(vectors)
    return x_btd


def test_the_turn_is_the_angle_also_where_it_is_tiny() -> None:
    angles = torch.tensor([0.0, 1e-5, 0.3, math.pi / 2, 3.0], dtype=torch.float64)
    vectors = torch.stack([angles.cos(), angles.sin()], dim=-1).float()
    found = turn(torch.tensor([[2.0, 0.0]]).expand(5, 2), 3 * vectors)
    assert found.tolist() == pytest.approx(angles.tolist(), rel=1e-4, abs=1e-9)


def test_the_turn_rule_reads_cls() -> None:
    rule = Measured("turn", 0.1, GROUPS)
    before = _state((1, 0), (1, 0))
    after = _state((2, 0.02), (1, 1))
    assert rule.fires(before, after, 1).tolist() == [True, False]


def test_the_second_difference_has_to_be_small_twice_running() -> None:
    rule = Measured("second", 0.5, GROUPS)
    rule.begin(0)
    path = [_state((0, 0), (0, 0)), _state((1, 0), (1, 0)), _state((2, 0), (1, 1)), _state((3, 0), (1, 2))]
    fired = [rule.fires(a, b, i).tolist() for i, (a, b) in enumerate(pairwise(path), start=1)]
    # The first image repeats its update twice. The second one turned in between, so that it has one hit.
    assert fired == [[False, False], [False, False], [True, False]]
    rule.keep(torch.tensor([1]))
    assert rule.fires(path[3][1:], _state((1, 3)), 4).tolist() == [True]


def test_rules_that_read_classes() -> None:
    logits = {0.0: torch.tensor([0.0, 0.0]), 1.0: torch.tensor([5.0, 0.0])}

    def read(x_btd: torch.Tensor) -> torch.Tensor:
        return torch.stack([logits[float(v)] for v in x_btd[:, 0, 0]])

    def change(threshold: float) -> Measured:
        rule = Measured("kl", threshold, GROUPS, read)
        rule.begin(0)
        return rule

    even, sure = _state((0, 0)), _state((1, 0))
    entropy = -sum(p * math.log(p) for p in torch.tensor([5.0, 0.0]).softmax(0).tolist())
    assert Measured("entropy", entropy + 1e-4, GROUPS, read).fires(even, sure, 1).item()
    assert not Measured("entropy", entropy - 1e-4, GROUPS, read).fires(even, sure, 1).item()
    assert not Measured("entropy", math.log(2) - 1e-4, GROUPS, read).fires(sure, even, 1).item()
    p, q = [0.5, 0.5], torch.tensor([5.0, 0.0]).softmax(0).tolist()
    divergence = sum(a * math.log(a / b) for a, b in zip(p, q))
    assert change(divergence + 1e-4).fires(even, sure, 1).item()
    assert not change(divergence - 1e-4).fires(even, sure, 1).item()


def test_random_skipping_is_as_frequent_as_it_says_and_repeatable() -> None:
    x_btd = torch.zeros(20_000, 3, 2)
    share = RandomSkip(0.3, seed=1).fires(x_btd, x_btd, 1).float().mean()
    assert float(share) == pytest.approx(0.3, abs=4 * math.sqrt(0.3 * 0.7 / 20_000))
    first, again = (RandomSkip(0.3, seed=1).fires(x_btd, x_btd, 1) for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("turn", "cannot read the rule"),
        ("turn<no", "cannot read the rule"),
        ("turn<-1", "positive threshold"),
        ("entropy<.5", "has no head"),
        ("shake<.5", "unknown rule 'shake'"),
        ("random<1.5", "between 0 and 1"),
    ],
)
def test_rules_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rule(text, GROUPS)


def test_rules_by_name() -> None:
    found = parse_rule("turn < .02", GROUPS)
    assert isinstance(found, Measured) and (found.name, found.threshold) == ("turn", 0.02)
