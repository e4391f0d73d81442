"""The hashed numbers of a layout, and its classes."""

from __future__ import annotations

import math

import torch

from raptor.data.scenes import layout as scene_layout
from raptor.data.scenes.layout import CLASSES


def test_every_run_of_twenty_holds_each_class_once() -> None:
    labels = scene_layout.label_images(torch.arange(2000), "train")
    assert torch.equal(labels, scene_layout.lay_out(torch.arange(2000), "train").label)
    labels = labels.view(-1, len(CLASSES))
    assert torch.equal(labels.sort(1).values, torch.arange(len(CLASSES)).expand(100, -1))
    assert len({tuple(run.tolist()) for run in labels}) > 50


def test_hash_is_splitmix64() -> None:
    """First outputs of the published generator from state 0, next to the same steps in Python integers."""
    word = 2**64 - 1
    for n in range(1, 50):
        x = n * 0x9E3779B97F4A7C15 & word
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & word
        x = (x ^ x >> 27) * 0x94D049BB133111EB & word
        x = x ^ x >> 31
        assert n != 1 or x == 0xE220A8397B1DCDAF
        state = torch.tensor(scene_layout._signed(n * 0x9E3779B97F4A7C15))
        assert int(scene_layout.mix(state)) & word == x


def test_dice_are_uniform_and_independent() -> None:
    dice = scene_layout.Dice(scene_layout.mix(torch.arange(20_000)))
    a, b = dice.uniform(), dice.uniform()
    counts = torch.histc(a, 20, 0, 1)
    assert ((counts - 1000).square() / 1000).sum() < 43.8  # chi-square, 19 degrees, p = 0.001
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 4 / math.sqrt(20_000)
