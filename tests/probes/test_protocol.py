"""`probe` end to end: the grid, the choice, precision, time, bad input."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_probe import Coloured, data_for, run

from raptor.data import DenseData, ImageData
from raptor.data.scenes.drawn import SceneFrames
from raptor.probes import probe
from raptor.probes.features import normed_tokens
from raptor.vit.trajectory import NonFiniteStates
from raptor.vit.view import ViT


@pytest.mark.parametrize("task", ["classify", "segment", "depth"])
def test_a_grid_is_its_heads_trained_one_by_one(vit: ViT, task: str) -> None:
    lrs = [1e-3, 1e-2, 0.1]
    together = run(vit, task, lrs)
    alone = [run(vit, task, [lr]) for lr in lrs]
    table = np.array(together.seeds[0].split_scores)
    assert table.shape == (2, 3)
    np.testing.assert_allclose(table, np.hstack([np.array(r.seeds[0].split_scores) for r in alone]), rtol=1e-5)
    chosen = together.seeds[0].chosen
    same = alone[lrs.index(chosen.value)].seeds[0]
    assert chosen.epoch == same.chosen.epoch
    for mine, theirs in zip(chosen.head, same.chosen.head):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert chosen.reported[together.metric] == pytest.approx(same.chosen.reported[together.metric], rel=1e-5)


def test_the_choice_is_the_best_of_the_split(vit: ViT) -> None:
    result = run(vit, "depth", [1e-4, 1e-2, 0.3], epochs=3)
    seed = result.seeds[0]
    table = np.array(seed.split_scores)
    epoch, g = np.unravel_index(table.argmin(), table.shape)
    assert (seed.chosen.value, seed.chosen.epoch) == (result.grid[g], seed.epochs[epoch])
    assert result.at_edge == (g != 1)
    assert (seed.last.value, seed.last.epoch) == (result.grid[table[-1].argmin()], 3)


def test_a_seed_that_is_repeated_is_refused(vit: ViT) -> None:
    """Its deviation would be 0, as if another seed had given the same."""
    with pytest.raises(ValueError, match="--seed 0 1 0 repeats one"):
        run(vit, "depth", [1e-2], epochs=1, seeds=[0, 1, 0])


class Scrambled(SceneFrames):
    """Validation scenes with other targets."""

    def pairs(
        self, indices: torch.Tensor, size: tuple[int, int], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        images, targets = super().pairs(indices, size, device)
        return images, targets.flip(-1, -2) if self.task == "segment" else 11.0 - targets.clamp(max=10)


@pytest.mark.parametrize("task", ["classify", "segment", "depth"])
def test_the_choice_never_sees_the_reported_set(vit: ViT, task: str) -> None:
    train, val = data_for(task)
    if not isinstance(val, DenseData):
        other: ImageData = copy.copy(val)
        other.labels = [(label + 1) % 4 for label in val.labels or []]  # type: ignore[union-attr]
    else:
        other = Scrambled(task, 24).select(range(50_000, 50_000 + len(val)))
    lrs = [1e-3, 1e-2, 0.1]
    first, second = (probe(vit, task, train, v, lrs=lrs, epochs=2, batch_size=16) for v in (val, other))
    assert first.seeds[0].split_scores == second.seeds[0].split_scores
    assert (first.seeds[0].chosen.value, first.seeds[0].chosen.epoch) == (
        second.seeds[0].chosen.value,
        second.seeds[0].chosen.epoch,
    )
    assert torch.equal(first.head[0], second.head[0])
    assert first.score != second.score


@pytest.mark.parametrize("task", ["classify", "segment", "depth"])
def test_half_precision_is_near(vit: ViT, task: str) -> None:
    exact, half = (run(vit, task, [1e-2], precision=precision) for precision in ("fp32", "bf16"))
    assert half.settings.precision == "bf16" and half.head[0].dtype == torch.float32
    difference = (half.head[0] - exact.head[0]).norm() / exact.head[0].norm()
    assert 0 < difference < 0.15
    assert half.score == pytest.approx(exact.score, rel=0.15)


def test_a_time_limit_fixes_the_steps_before_training(vit: ViT, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = sys.modules["raptor.probes.grid"]
    seconds = iter([0.0, 1.0, 1.0, 3.0])  # three steps were timed at a second each; the clock is not read again
    monkeypatch.setattr(grid, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    result = run(vit, "classify", [1e-2], epochs=10, max_seconds=20, seeds=[0, 1])
    planned = 10 * (result.num_images["fit"] // 16)
    assert [(seed.num_steps, seed.planned_steps) for seed in result.seeds] == [(20, planned)] * 2
    assert result.unfinished == f"only 20 of {planned} planned steps" == result.to_dict()["unfinished"]
    assert run(vit, "classify", [1e-2], epochs=1).unfinished is None


def test_half_an_epoch_is_half_of_its_steps(vit: ViT) -> None:
    whole = run(vit, "classify", [1e-2], epochs=3.0)
    assert whole.settings.epochs == 3 and isinstance(whole.settings.epochs, int)
    per_epoch = whole.num_images["fit"] // 16
    for epochs, num_steps in ((0.5, round(per_epoch / 2)), (2.5, round(2.5 * per_epoch)), (1e-6, 1)):
        part = run(vit, "classify", [1e-2], epochs=epochs)
        assert (part.num_steps, part.settings.epochs, part.unfinished) == (num_steps, epochs, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "sort"}, "unknown task"),
        ({"task": "depth", "closed_form": "ridge"}, "for the task classify"),
        ({"closed_form": "lasso"}, "unknown closed form"),
        ({"epochs": 0}, "epochs above 0"),
        ({"lrs": [-1.0]}, "above 0"),
        ({"size": (24, 24)}, "square"),
    ],
)
def test_bad_input_is_named(vit: ViT, options: dict, message: str) -> None:
    task = options.pop("task", "classify")
    with pytest.raises(ValueError, match=message):
        run(vit, task, options.pop("lrs", [1e-2]), **options) if task != "sort" else probe(vit, task, "scenes")


def test_features_that_are_not_finite_give_no_score(vit: ViT) -> None:
    handle = vit.blocks[0].register_forward_hook(lambda _block, _args, x_btd: x_btd * torch.nan)
    try:
        with pytest.raises(ValueError, match="not finite up to layer"):
            run(vit, "classify", [1e-2])
    finally:
        handle.remove()


@pytest.mark.parametrize(("task", "call"), [("classify", 0), ("segment", -1), ("depth", -1)])
def test_one_scored_image_that_is_not_finite_gives_no_score(vit: ViT, task: str, call: int, monkeypatch) -> None:
    """Its logits are NaN, whose argmax is class 0. Pooled features are taken first, frames are scored last."""
    calls: list[torch.Tensor] = []

    def spoiled(number: int):
        def tokens_of(*given):
            calls.append(normed_tokens(*given))
            if len(calls) - 1 == number:
                calls[-1][0] = torch.nan
            return calls[-1]

        return tokens_of

    for module in ("classify", "dense_task"):
        monkeypatch.setattr(f"raptor.probes.{module}.normed_tokens", spoiled(-1))
    run(vit, task, [1e-2])
    bad = range(len(calls))[call]
    calls.clear()
    for module in ("classify", "dense_task"):
        monkeypatch.setattr(f"raptor.probes.{module}.normed_tokens", spoiled(bad))
    with pytest.raises(NonFiniteStates, match="not finite up to layer"):
        run(vit, task, [1e-2])


class Bare(SceneFrames):
    """Scenes without any target."""

    def pairs(
        self, indices: torch.Tensor, size: tuple[int, int], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        images, targets = super().pairs(indices, size, device)
        return images, torch.full_like(targets, 255 if self.task == "segment" else 0)


@pytest.mark.parametrize("task", ["segment", "depth"])
@pytest.mark.parametrize(("side", "use"), [(0, "learn from"), (1, "score")])
def test_pictures_without_any_target_give_no_score(vit: ViT, task: str, side: int, use: str) -> None:
    pair = list(data_for(task))
    first = 50_000 * side  # the held-out scenes come after those to train on
    pair[side] = Bare(task, size=24).select(range(first, first + 24))
    with pytest.raises(ValueError, match=f"no pixel of the .* images of scenes to {use} has a target"):
        probe(vit, task, *pair, lrs=[1e-2], epochs=1, batch_size=8)


def test_data_must_fit_the_task(vit: ViT) -> None:
    train, val = data_for("depth")
    with pytest.raises(ValueError, match="not opened for segment"):
        probe(vit, "segment", train, val)
    with pytest.raises(ValueError, match="open_data"):
        probe(vit, "classify", train, val)
    with pytest.raises(ValueError, match="give val_data"):
        probe(vit, "depth", train)
    bare = Coloured("train", 20)
    bare.labels = None
    with pytest.raises(ValueError, match="no labels"):
        probe(vit, "classify", bare, bare)
    other = Coloured("val", 20)
    other.classes = ["w", "b", "g", "x"]
    with pytest.raises(ValueError, match="class x"):
        probe(vit, "classify", Coloured("train", 20), other)
    other.classes, other.labels = ["w", "b", "g", "r"], [3 - label for label in other.labels or []]
    renamed, plain = (probe(vit, "classify", Coloured("train", 80), v, closed_form="ridge") for v in (other, data_20()))
    assert renamed.score == plain.score


def data_20() -> ImageData:
    return Coloured("val", 20)
