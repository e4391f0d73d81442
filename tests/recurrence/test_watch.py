"""The watcher against discrepancies computed one by one, and its threshold against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_models import noise_images, tiny_timm

from raptor import open_data, open_vit
from raptor.data import iterate
from raptor.data.stream import Batch
from raptor.recurrence.detection import Baselines
from raptor.recurrence.watch import WATCHER, Judge, Watcher, conformal_threshold, watch, watch_findings
from raptor.vit.view import ViT


def _scenes(teacher: ViT, num: int) -> list[Batch]:
    return list(iterate(open_data("scenes", "val", limit=num), teacher.preprocess, 16))


def test_a_score_is_the_largest_standardised_discrepancy() -> None:
    surrogate, teacher = open_vit("scenes-k3"), open_vit("scenes")
    usual = _scenes(teacher, 40)
    images = noise_images(teacher, 2)
    watcher = watch(surrogate, teacher).calibrate(usual, false_alarms=0.1)
    found = watcher.watch([Batch(images, None, [0, 1])])

    def errors(x: torch.Tensor) -> np.ndarray:
        with torch.no_grad():
            target, own = teacher.record(x)[0], surrogate.record(x)[0]
        groups = [teacher.groups.slice(name) for name in ("cls", "registers", "patches")]
        rows = [
            [[float((a[i, s] - b[i, s]).norm()) for s in groups] for a, b in zip(target, own)] for i in range(len(x))
        ]
        return np.array(rows)[:, 1:]

    calibration = np.concatenate([errors(batch.images) for batch in usual])
    fitted, held_out = calibration[0::2], calibration[1::2]
    # torch's median of an even number is the lower one of the middle pair.
    centre = np.sort(fitted, axis=0)[(len(fitted) - 1) // 2]
    deviation = np.sort(np.abs(fitted - centre), axis=0)[(len(fitted) - 1) // 2]
    held_out_scores = ((held_out - centre) / (1.4826 * deviation)).max(axis=(1, 2))
    standardised = (errors(images) - centre) / (1.4826 * deviation)
    assert found.score_n.tolist() == pytest.approx(standardised.max(axis=(1, 2)).tolist(), rel=1e-3)
    assert watcher.threshold == pytest.approx(np.sort(held_out_scores)[math.ceil(21 * 0.9) - 1], rel=1e-3)
    for i in range(2):
        layer, group = np.unravel_index(standardised[i].argmax(), standardised[i].shape)
        assert (int(found.layer_n[i]), int(found.group_n[i])) == (layer + 1, group)
    assert found.map_np.shape == (2, teacher.groups.patches) and found.map_np.median(dim=1).values.tolist() == [1, 1]
    assert found.profile_nl.flatten().tolist() == pytest.approx(standardised.max(axis=2).flatten().tolist(), rel=1e-3)
    with torch.no_grad():
        assert watcher.score(images).tolist() == pytest.approx(found.score_n.tolist())
    assert found.alarm_n.all(), "noise is not like the scenes"


def test_false_alarms_stay_below_what_was_promised() -> None:
    generator = torch.Generator().manual_seed(0)
    alarms = []
    for _ in range(2000):
        scores = torch.rand(40, generator=generator).square()
        new = float(torch.rand(1, generator=generator).square())
        alarms.append(new > conformal_threshold(scores[:39], 0.1))
    # With 39 calibration scores the rank is 36 of 40 places: the probability is exactly .1.
    assert np.mean(alarms) == pytest.approx(0.1, abs=3 * math.sqrt(0.1 * 0.9 / 2000))
    assert conformal_threshold(torch.arange(5.0), 0.1) == math.inf


def test_a_set_is_judged_batch_by_batch_and_its_strangest_images_are_kept() -> None:
    surrogate, teacher = open_vit("scenes-k3"), open_vit("scenes")
    usual = _scenes(teacher, 40)
    watcher = watch(surrogate, teacher).calibrate(usual, false_alarms=0.1)
    baselines = Baselines(teacher, teacher.finish).fit(usual)
    judge = Judge(watcher, baselines, num_shown=2, picture=lambda image: f"{float(image.mean()):.3f}")
    own = judge("scenes", usual, [f"scene {i}" for i in range(40)])
    images = noise_images(teacher, 6)
    batches = [Batch(images[:4], None, torch.arange(4)), Batch(images[4:], None, torch.arange(4, 6))]
    strange = judge("noise", batches, [f"noise {i}" for i in range(6)], fooled=0.5)
    assert judge("none", [], []).compared(own).num_images == 0
    scores = watcher.watch(batches).score_n
    assert [row[2] for row in strange.rows()] == pytest.approx(scores.tolist())
    two = scores.argsort(descending=True)[:2].tolist()
    assert [image.name for image in strange.shown] == [f"noise {i}" for i in two]
    assert strange.shown[0].picture == f"{float(images[two[0]].mean()):.3f}"
    usual_set, noise_set = own.compared(own), strange.compared(own)
    assert usual_set.scores is None and noise_set.scores is not None and len(noise_set.scores) == 6
    assert noise_set.scores[WATCHER].auroc > 0.95 and noise_set.alarms == 1
    assert noise_set.lower[0] <= noise_set.profile[0] <= noise_set.upper[0]
    lines = watch_findings([usual_set, noise_set], 0.1)
    assert "(10.0% wished)" in lines[0] and lines[1].startswith("noise (50% of the images are fooled): AUROC 0.99")


def test_what_cannot_be_watched_is_refused() -> None:
    surrogate, teacher = open_vit("scenes-k3"), open_vit("scenes")
    watcher = Watcher(surrogate, teacher)
    few = _scenes(teacher, 8)
    with pytest.raises(ValueError, match="calibrate it first"):
        watcher.watch(few)
    with pytest.raises(ValueError, match=r"8 calibration images are too few .* give at least 38"):
        watcher.calibrate(few)
    with pytest.raises(ValueError, match="between 0 and 1"):
        watcher.calibrate(few, false_alarms=5)
    with pytest.raises(ValueError, match="no images to watch"):
        watcher.calibrate(few, false_alarms=0.3).watch([])
    with pytest.raises(ValueError, match="surrogate of its own"):
        Watcher(surrogate, tiny_timm(depth=2))
