"""Teachers: mixing, and training that resumes to the last bit."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tiny_run import TEACHER as TINY
from tiny_run import metrics
from tiny_run import train_tiny as train
from torch import Tensor

from raptor.data import open_data
from raptor.files import RunError
from raptor.run import Interrupted
from raptor.train.teacher import TeacherStage, mixed_batch, smooth_targets, train_teacher
from raptor.vit.open import open_vit


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.0, 0.0), (0.4, 0.0), (0.0, 1.0), (0.4, 1.0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixed_targets_sum_to_one_and_follow_the_pixels(mixup, cutmix, smoothing):
    """An image of value i stands for class i: with no smoothing its mean value is the expected class."""
    num = 6
    side = 16
    labels = torch.arange(num)
    images = labels.float().view(num, 1, 1, 1).expand(num, 3, side, side).clone()
    mixed_once = 0
    for seed in range(20):
        out, targets = mixed_batch(images, smooth_targets(labels, num, smoothing), mixup, cutmix, seed)
        assert targets.shape == (num, num) and (targets >= 0).all()
        assert torch.allclose(targets.sum(-1), torch.ones(num), atol=1e-6)
        expected = (targets - smoothing / num) / (1 - smoothing) @ labels.float()
        assert torch.allclose(out.mean(dim=(1, 2, 3)), expected, atol=1e-4)
        mixed_once += not torch.equal(out, images)
        again, same = mixed_batch(images, smooth_targets(labels, num, smoothing), mixup, cutmix, seed)
        assert torch.equal(again, out) and torch.equal(same, targets)
    assert (mixed_once > 10) == (mixup > 0 or cutmix > 0)


def test_cutmix_pastes_one_rectangle_and_mixup_none():
    images = torch.stack([torch.zeros(3, 16, 16), torch.ones(3, 16, 16)])
    targets = torch.eye(2)
    for seed in range(10):
        cut, mixed = mixed_batch(images, targets, 0.0, 1.0, seed)
        assert set(cut.unique().tolist()) <= {0.0, 1.0}
        rows = cut[0, 0].amax(1)
        columns = cut[0, 0].amax(0)
        assert cut[0, 0].sum() == rows.sum() * columns.sum() == pytest.approx(256 * mixed[0, 1].item(), abs=1e-3)
        blend, mixed = mixed_batch(images, targets, 0.5, 0.0, seed)
        assert torch.allclose(blend[0], mixed[0, 1].expand_as(blend[0]))


def test_mixing_shares_follow_the_beta_distribution():
    targets = torch.eye(2)
    images = torch.zeros(2, 3, 4, 4)
    shares = torch.stack([mixed_batch(images, targets, 0.3, 0.0, seed)[1][0, 0] for seed in range(2000)])
    variance = 1 / (4 * (2 * 0.3 + 1))  # of Beta(a, a)
    assert shares.mean().item() == pytest.approx(0.5, abs=4 * math.sqrt(variance / 2000))
    assert shares.var().item() == pytest.approx(variance, rel=0.1)


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "teacher" / "model.safetensors")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class Killed(BaseException):
    """Stands for a process that ends without a word."""


def kill() -> None:
    raise Killed


def before_step(patch: pytest.MonkeyPatch, last: int, action: Callable[[], None]) -> None:
    """Do something before a teacher's step of this number."""
    plain = TeacherStage.losses

    def losses(self: TeacherStage, wrapped: Any, step: int, *more: Any) -> Tensor:
        if step == last:
            action()
        return plain(self, wrapped, step, *more)

    patch.setattr(TeacherStage, "losses", losses)


def test_a_teacher_resumes_to_the_last_bit(tmp_path, monkeypatch):
    random_state = torch.get_rng_state()
    whole = train(tmp_path / "whole")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not whole.model.training
    steps: list[int] = []
    for last in (4, 9):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            before_step(patch, last, kill)
            train(tmp_path / "killed", checkpoint_minutes=0)
    with monkeypatch.context() as patch:
        for last in range(12):
            before_step(patch, last, lambda last=last: steps.append(last))  # type: ignore[misc]
        train(tmp_path / "killed")
    assert steps == [9, 10, 11]  # it went on from the last step before each end
    (whole_line,) = metrics(tmp_path / "whole")
    (line,) = metrics(tmp_path / "killed")
    assert (line["step"], line["loss"]) == (11, whole_line["loss"])  # the mean over all twelve steps
    assert same(weights(tmp_path / "killed"), weights(tmp_path / "whole"))
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
    with monkeypatch.context() as patch:
        before_step(patch, 6, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Interrupted, match="stopped after step 6; the same command goes on from there"):
            train(tmp_path / "stopped")
    train(tmp_path / "stopped")
    train(tmp_path / "whole")
    assert same(weights(tmp_path / "stopped"), weights(tmp_path / "whole"))


def test_a_teacher_that_diverges_stops(tmp_path):
    with pytest.raises(RunError, match=r"the loss is not finite at step \d+: the last good checkpoint is"):
        train(tmp_path / "run", lr=1e30, checkpoint_minutes=0)
    assert not (tmp_path / "run" / "teacher").exists()


def test_wrong_input_is_one_line(tmp_path):
    (tmp_path / "flat").mkdir()
    for i in range(4):
        Image.new("RGB", (24, 24), (9 * i, 0, 0)).save(tmp_path / "flat" / f"{i}.png")
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


def test_images_passed_over_are_named_in_the_summary(tmp_path):
    for i in range(24):
        path = tmp_path / "images" / ("val" if i % 4 == 0 else "train") / "ab"[i % 2 == 0] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((24, 24), 60).convert("RGB").save(path)
        if i in (4, 7):
            path.write_bytes(b"broken")
    options = {**TINY, "budget": "2steps", "train_images": None}
    with pytest.raises(ValueError, match=r"07\.png"):
        train_teacher(data=str(tmp_path / "images"), out=str(tmp_path / "strict"), **options)
    train_teacher(data=str(tmp_path / "images"), out=str(tmp_path / "run"), skip_bad=True, **options)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [name[-6:] for name in summary["bad_images"]] == ["07.png", "04.png"]


def test_a_budget_of_seconds_is_turned_into_steps_and_what_was_timed_is_undone(tmp_path):
    train(tmp_path / "timed", budget="1s")
    lines = [json.loads(line) for line in (tmp_path / "timed" / "metrics.jsonl").read_text().splitlines()]
    train(tmp_path / "exact", budget=f"{lines[-1]['num_steps']}steps")
    assert same(weights(tmp_path / "timed"), weights(tmp_path / "exact"))


def test_opened_images_of_other_classes_are_refused(tmp_path: Path) -> None:
    for place, names in (("train", "abc"), ("other", "bcd")):
        for i, name in enumerate(names):
            picture = Image.new("RGB", (16, 16), (90 * i, 200 if place == "train" else 20, 50))
            (tmp_path / place / name).mkdir(parents=True)
            picture.save(tmp_path / place / name / "one.png")
    pair = tuple(open_data(str(tmp_path / place), "all") for place in ("train", "other"))
    with pytest.raises(ValueError, match=r"other has other classes than .*train: give images of the same ones"):
        train_teacher("vit_tiny_patch16_224", pair, out=str(tmp_path / "out"), size=16, patch=8, batch_size=2)
