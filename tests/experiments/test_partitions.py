from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from raptor.experiments import partitions
from raptor.experiments.records import PartitionRow, Partitions


def test_partitions_against_brute_force(sweep_folder: Path, tiny: SimpleNamespace, tmp_path: Path) -> None:
    options = dict(**tiny.images, teachers=str(sweep_folder), k=[2], budget="3steps", batch_size=16, out=str(tmp_path))
    done = partitions.run(**options)
    ways = done.result.partitions[2]
    maxcut = ways.chosen["maxcut"]
    # Four layers in two phases: max-cut's and exactly the other two.
    assert {tuple(p) for p in (maxcut, *ways.random)} == {(1, 3), (2, 2), (3, 1)}
    assert maxcut not in ways.random
    distance = 1 - np.array(done.result.similarity)
    across = {n: distance[:n, n:].sum() for n in (1, 2, 3)}
    assert maxcut[0] == max(across, key=across.__getitem__)
    rows = done.result.rows
    for measure in ("r2_last", "bounded_r2_last"):
        found = done.result.statistics[2]["maxcut"][measure]
        (value,) = [row.score(measure) for row in rows if row.way == "maxcut"]
        sample = [row.score(measure) for row in rows if row.way == "random"]
        assert found.z == pytest.approx(stats.zmap([value], sample, ddof=1)[0])
    assert len(list((tmp_path / "cells").glob("*.json"))) == 3  # a partition that two ways choose is trained once
    assert (tmp_path / "partitions.png").exists()
    assert Partitions.read(tmp_path) == done.result
    with pytest.raises(ValueError, match="another plan"):
        partitions.run(**{**options, "num_random": 1})


def test_ten_random_partitions_at_k_2_of_12_layers_are_all_the_others() -> None:
    layers = np.arange(12)
    ways = partitions.choose_partitions(np.exp(-np.abs(layers[:, None] - layers) / 5.0), 2, 10, seed=0)
    assert sorted([ways.chosen["maxcut"], *ways.random]) == [[n, 12 - n] for n in range(1, 12)]
    ways = partitions.choose_partitions(np.exp(-np.abs(layers[:, None] - layers) / 5.0), 3, 10, seed=0)
    assert len({tuple(p) for p in ways.random}) == 10 and all(sum(p) == 12 for p in ways.random)


def test_a_partition_is_not_compared_with_itself() -> None:
    def row(way: str, phases: list[int], accuracy: float) -> PartitionRow:
        return PartitionRow(k=2, way=way, phases=phases, **dict.fromkeys(partitions.MEASURES, accuracy))

    random = [row("random", [1, 3], 0.1), row("random", [2, 2], 0.3), row("random", [3, 1], 0.4)]
    found = partitions.statistics([row("dp-mean", [1, 3], 0.1), *random])["dp-mean"]["accuracy"]
    assert found.num == 2 and found.mean == pytest.approx(0.35)
