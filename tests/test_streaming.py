"""Moments, reservoir and quantiles against numpy on all rows at once; JSON against what json.dumps takes."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import on_ranks

from raptor.devices import Ranks
from raptor.streaming import (
    QUANTILES,
    Array,
    ComplexArray,
    ImageMoments,
    Moments,
    NotSaved,
    Number,
    Record,
    Reservoir,
    Spread,
    jsonable,
)


def test_moments_do_not_cancel_where_the_mean_is_far_larger_than_the_deviation() -> None:
    rows = 1e8 + torch.randn(300, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moments = Moments()
    for batch in rows.split([1, 7, 100, 192]):
        moments.add_rows(batch)
    assert moments.num == 300
    np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=1e-14)
    np.testing.assert_allclose(moments.variance, rows.numpy().var(0), rtol=1e-7)


def test_moments_of_groups_with_counts_of_their_own() -> None:
    """One merge takes groups of three and of one row per image."""
    rows = torch.randn(12, 4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    groups, moments = (slice(0, 3), slice(3, 4)), Moments()
    for batch in rows.split([5, 7]):
        parts = [batch[:, where].flatten(0, 1) for where in groups]
        mean = torch.stack([part.mean(0) for part in parts])
        squares = torch.stack([(part - part.mean(0)).square().sum(0) for part in parts])
        moments.add(mean, squares, torch.tensor([[float(len(part))] for part in parts], dtype=torch.float64))
    for g, where in enumerate(groups):
        np.testing.assert_allclose(moments.mean[g], rows[:, where].flatten(0, 1).mean(0), rtol=1e-12)
        np.testing.assert_allclose(moments.variance[g], rows[:, where].flatten(0, 1).var(0, correction=0), rtol=1e-12)


def test_moments_of_all_ranks() -> None:
    rows = 50 + torch.randn(30, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    whole, parts = Moments(), [Moments(), Moments(), Moments()]
    whole.add_rows(rows)
    for part, some in zip(parts, rows.split([4, 10, 16])):
        part.add_rows(some)
    on_ranks(3, lambda ranks: parts[ranks.rank].reduce(ranks))
    for part in parts:
        np.testing.assert_allclose(part.mean, whole.mean, rtol=1e-14)
        np.testing.assert_allclose(part.variance, whole.variance, rtol=1e-12)


def test_reservoir_is_a_uniform_sample_of_bounded_size() -> None:
    counts = np.zeros(60)
    for seed in range(300):
        reservoir = Reservoir(10, seed)
        for rows in torch.arange(60).split(7):
            reservoir.add(rows)
        kept = reservoir.values()
        assert len(kept) == 10 and kept.diff().min() > 0
        counts[kept.numpy()] += 1
    # 300 draws at 1/6: mean 50, deviation about 6.5
    assert counts.min() > 25 and counts.max() < 75
    assert abs(counts[:30].mean() - 50) < 4


@pytest.mark.parametrize("num", [5, 61])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_keep_the_rows_that_one_process_keeps(num: int, size: int) -> None:
    """Batches of 4 in turn: fewer images than the reservoir holds and more, and ranks without any batch."""
    rows = torch.arange(num, dtype=torch.float64)[:, None] ** 2
    whole = ImageMoments(reservoir=12, seed=3)
    for batch in rows.split(4):
        whole.update(batch)

    def measure(ranks: Ranks) -> Spread | None:
        own = ImageMoments(reservoir=12, seed=3)
        for start in ranks.share(range(0, num, 4)):
            own.update(rows[start : start + 4], range(start, min(num, start + 4)))
        own.reduce(ranks)
        return own.result() if ranks.is_first else None

    found, expected = on_ranks(size, measure)[0], whole.result()
    assert found.num_images == num
    np.testing.assert_array_equal(found.quantiles, expected.quantiles)
    np.testing.assert_allclose([found.mean, found.std], [expected.mean, expected.std], rtol=1e-12)


def test_image_moments_are_exact_and_their_quantiles_a_uniform_sample() -> None:
    moments = ImageMoments(reservoir=400, seed=3)
    values = torch.arange(20_000, dtype=torch.float64)[:, None] / 20_000
    for batch in values.split(64):
        moments.update(batch)
    spread = moments.result()
    assert moments._reservoir is not None and len(moments._reservoir.values()) == 400
    np.testing.assert_allclose(spread.mean, values.mean().item(), rtol=1e-12)
    np.testing.assert_allclose(spread.std, values.std(correction=0).item(), rtol=1e-12)
    assert spread.quantiles is not None
    # Standard error of a sample quantile: sqrt(q (1 - q) / n) = .025 at the median; four of them.
    np.testing.assert_allclose(spread.quantiles[:, 0], [0.05, 0.25, 0.5, 0.75, 0.95], atol=0.1)


def test_quantiles_of_few_images_are_exact() -> None:
    values = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    moments = ImageMoments()
    for batch in values.split(8):
        moments.update(batch)
    expected = np.quantile(values.numpy().astype(np.float64), QUANTILES, axis=0)
    np.testing.assert_array_equal(moments.result().quantiles, expected)


def test_image_moments_without_images_or_quantiles() -> None:
    moments = ImageMoments(reservoir=0)
    with pytest.raises(ValueError, match="no images"):
        moments.result()
    moments.update(torch.ones(2, 3))
    assert moments.result().quantiles is None


@dataclass
class Found:
    spread: Spread
    name: str


def test_jsonable() -> None:
    value = {"a": np.array([1.0, np.nan]), 3: [1 + 2j], "b": np.float32(0.5), "c": None}
    assert jsonable(value) == {"a": [1.0, None], "3": [[1.0, 2.0]], "b": 0.5, "c": None}
    assert jsonable({"x": [1.0, float("inf")], 2: (None, True, 7)}) == {"x": [1.0, None], "2": [None, True, 7]}
    found = jsonable(Found(Spread(np.array([2.0, -np.inf])), "model"))
    assert found == {
        "spread": {"mean": [2.0, None], "std": None, "quantiles": None, "num_images": 0},
        "name": "model",
    }
    json.dumps(found, allow_nan=False)


def test_jsonable_rounds_to_significant_digits() -> None:
    assert jsonable([123456.789, 0.000123456789, np.nan, 123456789, True], digits=5) == [
        123460.0,
        0.00012346,
        None,
        123456789,
        True,
    ]


@dataclass
class Measured(Record):
    name: str
    num: int
    values: Array
    roots: ComplexArray | None = None
    score: Number = 0.0
    ends: tuple[float, float] | None = None
    by_k: dict[int, Found] = field(default_factory=dict)
    cache: NotSaved[np.ndarray | None] = None


def test_a_record_comes_back() -> None:
    inner = Found(Spread(np.array([2.0, 1.0]), quantiles=np.arange(10.0).reshape(5, 2)), "model")
    values = np.array([[1.0, np.nan], [0.0, 2.5]])
    roots, nothing = np.array([1 + 2j, -0.5j]), np.ones(3)
    record = Measured("a", 3, values, roots, math.nan, (1, 2.5), {2: inner}, nothing)
    saved = record.to_dict()
    assert saved["values"] == [[1.0, None], [0.0, 2.5]] and saved["roots"] == [[1.0, 2.0], [0.0, -0.5]]
    assert saved["score"] is None and "cache" not in saved
    again = Measured.from_json(json.dumps({**saved, "unknown": 1}, allow_nan=False))
    assert again.to_dict() == saved and again.cache is None and again.ends == (1.0, 2.5)
    assert math.isnan(again.score) and again.roots is not None and again.roots.dtype == np.complex128
    np.testing.assert_array_equal(again.values, values)
    assert again.by_k[2].spread.quantiles is not None
    np.testing.assert_array_equal(again.by_k[2].spread.quantiles, np.arange(10.0).reshape(5, 2))


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"num": "3"}, "num: "),
        ({"num": True}, "num: "),
        ({"num": 2.5}, "num: "),
        ({"num": int("9" * 4000)}, None),
        ({"score": int("9" * 400)}, None),
        ({"values": [1, "x"]}, "values: "),
        ({"values": [[1], [1, 2]]}, "values: "),
        ({"values": {"a": 1}}, "values: "),
        ({"values": [int("9" * 400)]}, "values: "),
        ({"roots": [[1.0, 2.0, 3.0]]}, "roots: "),
        ({"ends": [1.0]}, "ends"),
        ({"by_k": {"two": {}}}, "by_k.two"),
        ({"by_k": {"2": {"name": "x"}}}, "by_k.2.spread: "),
        (
            {"by_k": {"2": {"name": "x", "spread": {"mean": [1.0], "quantiles": {"q05": [1]}}}}},
            "by_k.2.spread.quantiles",
        ),
        ({"name": None}, "name: "),
        ({"values": json.loads("[" * 400 + "]" * 400)}, None),
    ],
)
def test_a_wrong_entry_is_named_in_one_line(changed: dict[str, Any], path: str | None) -> None:
    saved = {"name": "a", "num": 3, "values": [1.0], **changed}
    if path is None:
        with suppress(ValueError):  # whether so large a number is taken is left to the parser, but it never crashes
            Measured.from_dict(saved)
        return
    with pytest.raises(ValueError, match=re.escape(path)) as error:
        Measured.from_dict(saved)
    assert "\n" not in str(error.value)
    assert type(error.value) is ValueError


@pytest.mark.parametrize("text", ["[" * 100_000, '{"name": ', "[]", "null", '{"name": "\\ud800"}', "{'a': 1}", ""])
def test_text_that_is_not_such_a_record_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        Measured.from_json(text)
    assert "\n" not in str(error.value)
