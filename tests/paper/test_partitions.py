from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import partitions
import pytest
import torch
from records import PartitionRow, Partitions
from scipy import stats
from surrogates import best_teacher

from raptor.data import ImageData, iterate, open_data
from raptor.vit.open import open_vit
from raptor.vit.view import ViT


@torch.no_grad()
def measure_states(vit: ViT, data: ImageData) -> dict[str, np.ndarray]:
    """Mean cosine between the states of two layers, token by token, for cls and for all tokens."""
    states = torch.stack(vit.record(next(iter(iterate(data, vit.preprocess, len(data)))).images)[0][1:])
    unit = torch.nn.functional.normalize(states.double(), dim=-1)
    cosine_llbt = torch.einsum("ibtd,jbtd->ijbt", unit, unit)
    return {"cls": cosine_llbt[..., 0].mean(-1).numpy(), "all": cosine_llbt.mean((-1, -2)).numpy()}


def test_partitions_against_brute_force(sweep_folder: Path, tiny: SimpleNamespace, tmp_path: Path) -> None:
    options = dict(**tiny.images, teachers=str(sweep_folder), k=[2], budget="3steps", batch_size=16, out=str(tmp_path))
    done = partitions.run(**options, tokens="cls", maxcut_seeds=[0, 1])  # 0 is the seed of all of them
    teacher = open_vit(best_teacher(sweep_folder))
    states = measure_states(teacher, open_data("scenes", "train", limit=96, size=32))
    np.testing.assert_allclose(done.result.similarity, states["cls"], atol=1e-5)
    assert np.abs(states["cls"] - states["all"]).max() > 1e-3
    ways = done.result.partitions[2]
    maxcut = ways.chosen["maxcut"]
    # Four layers in two phases: max-cut's and exactly the other two.
    assert {tuple(p) for p in (maxcut, *ways.random)} == {(1, 3), (2, 2), (3, 1)}
    assert maxcut not in ways.random
    distance = 1 - np.array(done.result.similarity)
    across = {n: distance[:n, n:].sum() for n in (1, 2, 3)}
    assert maxcut[0] == max(across, key=across.__getitem__)
    rows = done.result.rows
    first = [row for row in rows if row.seed == 0]
    for measure in ("r2_last", "bounded_r2_last"):
        found = done.result.statistics[2]["maxcut"][measure]
        (value,) = [row.score(measure) for row in first if row.way == "maxcut"]
        sample = [row.score(measure) for row in rows if row.way == "random"]
        assert found.z == pytest.approx(stats.zmap([value], sample, ddof=1)[0])
    # A partition that two ways choose is trained once; max-cut's with a second seed.
    assert len(list((tmp_path / "cells").glob("*.json"))) == 4
    again = [row for row in rows if row.seed == 1]
    assert [(row.way, row.phases) for row in again] == [("maxcut", maxcut)] and len(done.result.maxcut_z[2]) <= 2
    assert (tmp_path / "partitions.png").exists()
    assert Partitions.read(tmp_path) == done.result
    with pytest.raises(ValueError, match="another plan"):
        partitions.run(**{**options, "num_random": 1}, tokens="cls")
    with pytest.raises(ValueError, match="another plan"):
        partitions.run(**options, tokens="patches")
    shutil.rmtree(tmp_path / "cells")  # a plan is of one teacher, also before the first cell is done
    teacher, other = (sweep_folder / "teachers" / name / "teacher" for name in ("p0-s0", "p0.5-s0"))
    given = dict(**tiny.images, k=[2], budget="3steps", batch_size=16, model=str(tmp_path / "teacher"), cells="k2-1-3")
    shutil.copytree(teacher, tmp_path / "teacher")
    partitions.run(**given, out=str(tmp_path / "named"))
    shutil.rmtree(tmp_path / "named" / "cells")
    shutil.rmtree(tmp_path / "teacher")
    shutil.copytree(other, tmp_path / "teacher")
    with pytest.raises(ValueError, match=r"plan\.json was made with another teacher under the same name"):
        partitions.run(**given, out=str(tmp_path / "named"))


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


def test_longest_phase_and_the_place_of_every_seed_by_hand() -> None:
    def row(way: str, phases: list[int], accuracy: float, seed: int = 0) -> PartitionRow:
        return PartitionRow(k=2, way=way, phases=phases, accuracy=accuracy, seed=seed)

    random = [row("random", [n, 12 - n], 0.5 - 0.01 * max(n, 12 - n) + 0.001 * n) for n in (1, 2, 3, 4, 9, 11)]
    best = [row("maxcut", [6, 6], 0.46), row("dp-cut", [6, 6], 0.46)]
    found = partitions.longest_phase([*random, *best])
    assert found.num == 7 and found.pearson is not None
    longest, accuracy = [11, 10, 9, 8, 9, 11, 6], [r.accuracy for r in random] + [0.46]
    assert found.pearson.value == pytest.approx(stats.pearsonr(longest, accuracy).statistic)
    z = partitions.maxcut_z([*random, *best, row("maxcut", [6, 6], 0.44, seed=1)])
    sample = [r.accuracy for r in random]
    assert z == pytest.approx([(a - np.mean(sample)) / np.std(sample, ddof=1) for a in (0.46, 0.44)])
