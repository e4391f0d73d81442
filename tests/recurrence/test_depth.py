"""What depth on demand costs and saves, against counts of its own."""

from __future__ import annotations

import pytest
import torch
from tiny_models import noise_images

from raptor import open_vit
from raptor.certificate.complexity import count_flops
from raptor.certificate.heads import Head
from raptor.data.stream import Batch
from raptor.phases.cut import Phases
from raptor.recurrence.depth import QUANTILES, DepthPoint, Side, depth_findings, fitting_rules, measure_depth
from raptor.vit.on_demand import FixedLengths, Measured, RandomSkip, Rule, parse_rule, run_on_demand, turn
from raptor.vit.view import ViT

PHASES = Phases((3, 3, 6))


def _side(vit: ViT, **rules: Rule) -> Side:
    return Side(vit, Head("own", vit.num_classes), PHASES, dict(rules))


def test_what_a_rule_saves_and_costs_is_counted() -> None:
    surrogate, teacher = open_vit("scenes-k3"), open_vit("scenes")
    images = noise_images(teacher, 4)
    with torch.no_grad():
        wanted = teacher(images).argmax(-1)
        own = surrogate(images).argmax(-1)
        short = run_on_demand(surrogate, images, FixedLengths([1, 1, 1])).output.argmax(-1)
    labels = wanted.clone()
    labels[0] = (labels[0] + 1) % teacher.num_classes
    batches = [Batch(images[:3], labels[:3], [0, 1, 2]), Batch(images[3:], labels[3:], [3])]
    side = _side(
        surrogate, shorter=FixedLengths([1, 1, 1]), slow=parse_rule("entropy<1e-9", teacher.groups, surrogate.finish)
    )
    points = measure_depth({"surrogate": side}, _side(teacher), batches)["surrogate"]
    full, less, slow = points
    assert full.blocks == slow.blocks == 1 and less.blocks == 3 / 12
    assert full.agreement == pytest.approx(float((own == wanted).double().mean()))
    assert full.accuracy == pytest.approx(float((own == labels).double().mean())) and full.num_images == 4
    difference = (own == wanted).double() - (short == wanted).double()
    assert less.lost == pytest.approx(float(difference.mean()))
    assert less.lost_interval[1] - less.lost == pytest.approx(1.96 * float(difference.std()) / 2)
    assert full.milliseconds > 0 and full.speedup == 1
    # A forward pass is the embedding, the blocks and the head; entropies are read after all but the last of each phase.
    with torch.no_grad():
        assert full.gflops == pytest.approx(count_flops(surrogate) / 1e9)
    one_block = (full.gflops - less.gflops) / 9
    head = slow.gflops - full.gflops
    assert one_block == pytest.approx(full.gflops / 12, rel=0.05)
    assert 0 < head < 2 * one_block


def test_thresholds_fit_the_model() -> None:
    vit = open_vit("scenes-k3")
    images = noise_images(vit, 8)
    rules = fitting_rules(_side(vit), [Batch(images, None, list(range(8)))])
    turns = [name for name in rules if name.startswith("turn<")]
    blocks = [float(vit.run(images, rules[name]).num_blocks_b.double().mean()) for name in turns]
    assert len(turns) == 7 and blocks == sorted(blocks, reverse=True) and blocks[0] > blocks[-1] + 2
    assert "shorter 2|2|4" in rules and "random<0.1" in rules


def test_thresholds_are_of_the_precision_that_is_measured() -> None:
    vit = open_vit("scenes-k3")
    images = noise_images(vit, 8)
    batches = [Batch(images, None, torch.arange(8))]
    heard: list[torch.Tensor] = []

    class Heard(Rule):
        def fires(self, before_btd: torch.Tensor, after_btd: torch.Tensor, num_steps: int) -> torch.Tensor:
            heard.append(turn(before_btd[:, 0], after_btd[:, 0]).double())
            return super().fires(before_btd, after_btd, num_steps)

    with torch.autocast("cpu", torch.bfloat16):
        run_on_demand(vit, images, Heard())
    rules = fitting_rules(_side(vit), batches, precision="bf16")
    found = [rule.threshold for rule in rules.values() if isinstance(rule, Measured) and rule.name == "turn"]
    wanted = torch.cat(heard).quantile(torch.tensor(QUANTILES, dtype=torch.float64)).tolist()
    assert found == pytest.approx(wanted, rel=1e-6)


def test_every_round_skips_the_same_steps() -> None:
    """Otherwise the shortest time would be that of the round that skipped most by chance."""
    vit = open_vit("scenes-k3")
    batches = [Batch(noise_images(vit, 4, seed=n), None, torch.arange(4)) for n in (1, 2)]

    def blocks(rounds: int) -> float:
        side = _side(vit, random=RandomSkip(0.4, seed=3))
        return measure_depth({"surrogate": side}, _side(vit), batches, rounds=rounds)["surrogate"][1].blocks

    assert blocks(1) == blocks(2) == blocks(3)


def test_the_best_rule_loses_no_more_than_a_point() -> None:
    def point(rule: str, family: str, speedup: float, lost: float) -> DepthPoint:
        return DepthPoint(rule, family, 0.5, 1.0, 1.0, speedup, 0.9 - lost, lost, (0.0, 0.1), None, 100)

    points = [point("full depth", "full depth", 1.0, 0.0), point("turn<1", "turn", 3.0, 0.02)]
    points += [point("kl<1", "kl", 1.5, 0.01), point("random<0.1", "random", 1.2, 0.0)]
    (line,) = depth_findings({"surrogate": points})
    assert "kl<1 (1.50 times the throughput" in line and "random<0.1 (1.20" in line and "90.0% agreement" in line
    assert "lost with none" in depth_findings({"teacher": points[:2]})[0]
