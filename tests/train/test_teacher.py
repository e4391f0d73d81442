"""Teachers: whole-block stochastic depth, mixing, and training that resumes to the last bit."""

from __future__ import annotations

import inspect
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from raptor.commands.train_teacher import train_teacher as verb
from raptor.open import open_vit
from raptor.run import Interrupted, RunError
from raptor.train import teacher as teachers
from raptor.train.stochastic import StochasticDepth
from raptor.train.teacher import mixed_batch, train_teacher

TINY = dict(
    size=24, patch=8, dim=32, depth=3, heads=2, registers=2, budget="12steps", batch_size=8, limit=64, val_images=16,
    device="cpu", drop=0.3, mixup=0.2, cutmix=1.0,
)  # fmt: skip


class Shift(nn.Module):
    """A block whose update is one, whatever comes in."""

    def forward(self, x_btd: Tensor) -> Tensor:
        return x_btd + 1


def kept_counts(p: float, depth: int = 6, batch: int = 50, num_steps: int = 100, **options: Any) -> Tensor:
    """How many samples each block kept over many steps, (L,), counted from what comes out of it."""
    blocks = nn.Sequential(*(Shift() for _ in range(depth))).train()
    dropped = StochasticDepth(blocks, p, batch, rescale=False, seed=0, **options)
    counts = torch.zeros(depth)
    for step in range(num_steps):
        dropped.draw(step)
        x = torch.zeros(batch, 2, 3)
        for i, block in enumerate(blocks):
            out = block(x)
            assert set((out - x).flatten().tolist()) <= {0.0, 1.0}
            assert torch.equal(out - x, (out - x)[:, :1, :1].expand_as(x))  # whole samples, all tokens
            counts[i] += (out - x)[:, 0, 0].sum()
            x = out
    return counts


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_every_depth_drops_with_the_same_probability_the_first_included(p):
    num = 5000
    counts = kept_counts(p)
    spread = math.sqrt(num * p * (1 - p))
    assert (counts - num * (1 - p)).abs().max() <= 4 * spread


def test_blocks_samples_and_steps_are_dropped_independently():
    blocks = nn.Sequential(*(Shift() for _ in range(4))).train()
    dropped = StochasticDepth(blocks, 0.5, 64, rescale=False, seed=3)
    rows = []
    for step in range(60):
        dropped.draw(step)
        rows.append(torch.stack([block.keep.flatten() for block in blocks]).float())  # type: ignore[operator, union-attr]
    keep_slb = torch.stack(rows)
    for a, b in (
        (keep_slb[:, 0], keep_slb[:, 1]),
        (keep_slb[:, 0], keep_slb[:, 3]),
        (keep_slb[1:, 0], keep_slb[:-1, 0]),
    ):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(a.numel())
    dropped.draw(7)
    again = torch.stack([block.keep.flatten() for block in blocks]).float()  # type: ignore[operator, union-attr]
    assert torch.equal(again, keep_slb[7])
    StochasticDepth(other := nn.Sequential(Shift()), 0.5, 64, rescale=False, seed=4).draw(7)
    assert not torch.equal(other[0].keep.flatten().float(), keep_slb[7, 0])  # type: ignore[operator, union-attr]


class Wild(nn.Module):
    """A block that gives NaN."""

    def forward(self, x_btd: Tensor) -> Tensor:
        return x_btd * float("nan")


def test_a_dropped_samples_output_is_its_input_exactly():
    for block in (nn.Linear(5, 5), Wild()):
        blocks = nn.Sequential(block).train()
        dropped = StochasticDepth(blocks, 0.5, 40, rescale=False, seed=0)
        dropped.draw(0)
        x = torch.randn(40, 3, 5)
        keep = blocks[0].keep.flatten().bool()  # type: ignore[union-attr, operator]
        out = blocks(x)
        assert 0 < keep.sum() < 40
        assert torch.equal(out[~keep], x[~keep])
        assert torch.equal(out[keep].nan_to_num(), block(x)[keep].nan_to_num())


def test_a_dropped_sample_has_no_gradient_through_the_block():
    linear = nn.Linear(5, 5)
    blocks = nn.Sequential(linear).train()
    dropped = StochasticDepth(blocks, 0.5, 10, rescale=False, seed=0)
    dropped.draw(0)
    keep = blocks[0].keep.flatten().bool()  # type: ignore[union-attr, operator]
    x = torch.randn(10, 2, 5, requires_grad=True)
    blocks(x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad[~keep], torch.ones_like(x[~keep]))
    assert linear.bias.grad is not None and linear.bias.grad[0] == keep.sum() * 2


@pytest.mark.parametrize("p", [0.5, 0.9])
def test_rescaling_divides_kept_updates_by_the_keep_probability(p):
    blocks = nn.Sequential(Shift()).train()
    StochasticDepth(blocks, p, 400, rescale=True, seed=0).draw(0)
    update = (blocks(torch.zeros(400, 1, 1)) - 0).flatten()
    kept = update[update != 0]
    assert 0 < len(kept) < 400
    assert torch.allclose(kept, torch.full_like(kept, 1 / (1 - p)))


def test_eval_mode_and_removal_give_the_plain_blocks():
    plain = [nn.Linear(4, 4), nn.Linear(4, 4)]
    blocks = nn.Sequential(*plain).train()
    dropped = StochasticDepth(blocks, 0.9, 6, rescale=True, seed=0)
    dropped.draw(0)
    x = torch.randn(2, 3, 4)  # another batch than in training
    expected = plain[1](plain[0](x))
    assert torch.equal(blocks.eval()(x), expected)
    dropped.remove()
    assert list(blocks) == plain
    assert torch.equal(blocks.train()(x), expected)


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5])
def test_impossible_probabilities_are_refused(p):
    with pytest.raises(ValueError, match="drop probability"):
        StochasticDepth(nn.Sequential(Shift()), p, 4, rescale=False, seed=0)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.0, 0.0), (0.4, 0.0), (0.0, 1.0), (0.4, 1.0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixed_targets_sum_to_one_and_follow_the_pixels(mixup, cutmix, smoothing):
    """An image of value i stands for class i: with no smoothing its mean value is the expected class."""
    num, side = 6, 16
    labels = torch.arange(num)
    images = labels.float().view(num, 1, 1, 1).expand(num, 3, side, side).clone()
    mixed_once = 0
    for seed in range(20):
        out, targets = mixed_batch(images, labels, num, mixup, cutmix, smoothing, seed)
        assert targets.shape == (num, num) and (targets >= 0).all()
        assert torch.allclose(targets.sum(-1), torch.ones(num), atol=1e-6)
        expected = (targets - smoothing / num) / (1 - smoothing) @ labels.float()
        assert torch.allclose(out.mean(dim=(1, 2, 3)), expected, atol=1e-4)
        mixed_once += not torch.equal(out, images)
        again, same = mixed_batch(images, labels, num, mixup, cutmix, smoothing, seed)
        assert torch.equal(again, out) and torch.equal(same, targets)
    assert (mixed_once > 10) == (mixup > 0 or cutmix > 0)


def test_cutmix_pastes_one_square_and_mixup_none():
    images = torch.stack([torch.zeros(3, 16, 16), torch.ones(3, 16, 16)])
    labels = torch.tensor([0, 1])
    for seed in range(10):
        cut, _ = mixed_batch(images, labels, 2, 0.0, 1.0, 0.0, seed)
        assert set(cut.unique().tolist()) <= {0.0, 1.0}
        rows, columns = cut[0, 0].amax(1), cut[0, 0].amax(0)
        assert rows.sum() == columns.sum() and cut[0, 0].sum() == rows.sum() * columns.sum()
        blend, targets = mixed_batch(images, labels, 2, 0.5, 0.0, 0.0, seed)
        assert torch.allclose(blend[0], targets[0, 1].expand_as(blend[0]))


def test_mixing_shares_follow_the_beta_distribution():
    labels, images = torch.arange(2), torch.zeros(2, 3, 4, 4)
    shares = torch.stack([mixed_batch(images, labels, 2, 0.3, 0.0, 0.0, seed)[1][0, 0] for seed in range(2000)])
    variance = 1 / (4 * (2 * 0.3 + 1))  # of Beta(a, a)
    assert shares.mean().item() == pytest.approx(0.5, abs=4 * math.sqrt(variance / 2000))
    assert shares.var().item() == pytest.approx(variance, rel=0.1)


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "teacher" / "model.safetensors")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class Killed(BaseException):
    """Stands for a process that ends without a word."""


def train(out: Path, **changes: Any) -> Any:
    return train_teacher("vit_tiny_patch16_224", "scenes", out=str(out), **{**TINY, **changes})


def test_a_teacher_resumes_to_the_last_bit(tmp_path, monkeypatch):
    random_state = torch.get_rng_state()
    whole = train(tmp_path / "whole")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not whole.model.training
    plain = teachers._stepper
    for last in (4, 9):

        def killed_at(*args: Any, last: int = last) -> Any:
            step_once = plain(*args)

            def step(number: int, num_steps: int) -> Tensor:
                if number == last:
                    raise Killed
                return step_once(number, num_steps)

            return step

        monkeypatch.setattr(teachers, "_stepper", killed_at)
        with pytest.raises(Killed):
            train(tmp_path / "killed")
    monkeypatch.setattr(teachers, "_stepper", plain)
    train(tmp_path / "killed")
    assert same(weights(tmp_path / "killed"), weights(tmp_path / "whole"))
    lines = [json.loads(line)["step"] for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert len(set(lines)) == len(lines) and lines[-1] == 11
    images = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        again = train(tmp_path / "whole")
        opened = open_vit(tmp_path / "whole")
        assert torch.equal(again(images), whole(images))
        assert torch.equal(opened(images), whole(images))
    assert opened.groups.registers == 2 and opened.groups.cls == 1


def test_drop_and_seed_decide_the_weights(tmp_path):
    first = train(tmp_path / "a", budget="3steps")
    assert not same(first.model.state_dict(), train(tmp_path / "b", budget="3steps", drop=0.0).model.state_dict())
    assert not same(first.model.state_dict(), train(tmp_path / "c", budget="3steps", seed=1).model.state_dict())
    assert same(first.model.state_dict(), train(tmp_path / "d", budget="3steps").model.state_dict())


def test_a_stop_signal_saves_a_teacher(tmp_path, monkeypatch):
    import signal

    plain = teachers._stepper

    def interrupted(*args: Any) -> Any:
        step_once = plain(*args)

        def step(number: int, num_steps: int) -> Tensor:
            if number == 6:
                signal.raise_signal(signal.SIGTERM)
            return step_once(number, num_steps)

        return step

    monkeypatch.setattr(teachers, "_stepper", interrupted)
    monkeypatch.setattr(teachers, "NUM_CHECKPOINTS", 1)
    with pytest.raises(Interrupted, match="stopped after step 6; the same command goes on from there"):
        train(tmp_path / "stopped")
    monkeypatch.setattr(teachers, "_stepper", plain)
    train(tmp_path / "stopped")
    train(tmp_path / "whole")
    assert same(weights(tmp_path / "stopped"), weights(tmp_path / "whole"))


def test_a_teacher_that_diverges_stops(tmp_path):
    with pytest.raises(RunError, match=r"the loss is not finite near step \d+"):
        train(tmp_path / "run", lr=1e30)
    assert not (tmp_path / "run" / "teacher").exists()


def test_wrong_input_is_one_line(tmp_path):
    (tmp_path / "flat").mkdir()
    for i in range(4):
        Image.new("RGB", (24, 24)).save(tmp_path / "flat" / f"{i}.png")
    with pytest.raises(ValueError, match="has no labels"):
        train_teacher(data=str(tmp_path / "flat"), out=str(tmp_path / "run"), device="cpu")
    with pytest.raises(ValueError, match="drop probability"):
        train(tmp_path / "other", drop=1.0)
    with pytest.raises(ValueError, match="cannot read the budget"):
        train(tmp_path / "third", budget="long")


def test_a_finished_teacher_is_given_back_without_its_checkpoints(tmp_path):
    first = train(tmp_path / "run", budget="3steps").model.state_dict()
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    assert same(train(tmp_path / "run", budget="3steps").model.state_dict(), first)


def test_scenes_are_48_pixels_unless_a_size_is_given(tmp_path):
    vit = train(tmp_path / "run", budget="1steps", size=None)
    assert vit.preprocess.size == 48 and vit.grid == (6, 6)


def test_the_verb_says_accuracy_and_folder(tmp_path):
    done = verb("vit_tiny_patch16_224", out=str(tmp_path / "run"), **{**TINY, "budget": "2steps"})
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert done.to_dict() == {"folder": str(tmp_path / "run"), **summary}
    assert f"accuracy {summary['accuracy']:.1%}" in done.text() and str(tmp_path / "run") in done.text()
    assert inspect.signature(verb) == inspect.signature(train_teacher)


def test_images_passed_over_are_named_in_the_summary(tmp_path):
    for i in range(24):
        path = tmp_path / "images" / ("val" if i % 4 == 0 else "train") / "ab"[i % 2 == 0] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((24, 24), 60).convert("RGB").save(path)
        if i in (4, 7):
            path.write_bytes(b"broken")
    options = {**TINY, "budget": "2steps", "limit": None}
    with pytest.raises(ValueError, match=r"07\.png"):
        train_teacher(data=str(tmp_path / "images"), out=str(tmp_path / "strict"), **options)
    train_teacher(data=str(tmp_path / "images"), out=str(tmp_path / "run"), skip_bad=True, **options)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [name[-6:] for name in summary["bad_images"]] == ["07.png", "04.png"]
