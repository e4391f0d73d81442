from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import swaps
import torch
from records import StochasticDepth, Swaps

from raptor.data import iterate, open_data
from raptor.run import RunError
from raptor.vit.open import open_vit
from raptor.vit.trajectory import swap_blocks


def test_swaps_give_the_accuracy_of_the_model_with_two_blocks_exchanged(
    sweep_folder: Path, tiny: SimpleNamespace, tmp_path: Path
) -> None:
    done = swaps.run(**tiny.images, teachers=str(sweep_folder), k=2, num_images=8, out=str(tmp_path), cells="p0-s0")
    (row,) = done.result.rows
    assert done.result.missing == ["p0.5-s0", "p0.5-s1"]
    vit = open_vit(sweep_folder / "teachers" / "p0-s0" / "teacher")
    batch = next(iter(iterate(open_data("scenes", "val", limit=48, size=32), vit.preprocess, 48)))
    first, phase_of = row.phases[0], {}
    for (i, j), accuracy in zip(row.pairs, row.swapped_accuracy or [], strict=True):
        with torch.no_grad(), swap_blocks(vit, i, j):
            assert accuracy == pytest.approx((vit(batch.images).argmax(-1) == batch.labels).float().mean().item())
        phase_of.setdefault((i <= first) == (j <= first), []).append(accuracy)
    assert len(row.pairs) == len(row.angle_std or []) == 6 and min(row.angle_std or [0]) > 0
    assert row.compared_accuracy.within == pytest.approx(np.mean(phase_of[True]))
    assert row.compared_accuracy.across == pytest.approx(np.mean(phase_of[False]))
    rest = [a for (i, _), a in zip(row.pairs, row.swapped_accuracy or []) if i != 1]
    same = [(i <= first) == (j <= first) for i, j in row.pairs if i != 1]
    expected = [np.mean([a for a, s in zip(rest, same) if s is kind]) for kind in (True, False) if kind in same]
    found = [row.without_first_accuracy.within, row.without_first_accuracy.across]
    assert [value for value in found if value is not None] == pytest.approx(expected)
    assert (tmp_path / "swaps.png").exists()
    assert Swaps.read(tmp_path) == done.result


def test_accuracy_is_of_the_classes_that_the_head_names(
    sweep_folder: Path, tiny: SimpleNamespace, tmp_path: Path
) -> None:
    """The names of the head in another order give other labels; as many other names are refused."""
    named = {}
    for number, word in enumerate(("same", "turned", "other")):
        teacher = tmp_path / word
        shutil.copytree(sweep_folder / "teachers" / "p0-s0" / "teacher", teacher)
        config = json.loads((teacher / "config.json").read_text())
        classes = config["classes"]
        config["classes"] = [classes, classes[::-1], [f"not {name}" for name in classes]][number]
        (teacher / "config.json").write_text(json.dumps(config))
        options = dict(**tiny.images, models=[str(teacher)], k=2, num_images=8, out=str(tmp_path / f"{word}-swaps"))
        if word == "other":
            with pytest.raises(
                ValueError, match=r"scenes has \d+ classes, such as .*, which are not the .*: give --data"
            ):
                swaps.run(**options)
        else:
            named[word] = swaps.run(**options).result.rows[0].accuracy
    vit = open_vit(sweep_folder / "teachers" / "p0-s0" / "teacher")
    batch = next(iter(iterate(open_data("scenes", "val", limit=48, size=32), vit.preprocess, 48)))
    with torch.no_grad():
        chosen = vit(batch.images).argmax(-1)
    assert named["same"] == pytest.approx((chosen == batch.labels).float().mean().item())
    assert named["turned"] == pytest.approx((chosen == vit.num_classes - 1 - batch.labels).float().mean().item())


def test_a_cell_of_another_teacher_or_other_images_of_the_same_name_is_refused(
    sweep_folder: Path, tiny: SimpleNamespace, tmp_path: Path
) -> None:
    teacher, photos, source = tmp_path / "teacher", tmp_path / "photos", open_data("scenes", "val", limit=8, size=32)
    photos.mkdir()
    for i in range(8):
        source.load(i).save(photos / f"{i}.png")
    images = {**tiny.images, "data": str(photos), "limit": None, "val_images": None}
    options = dict(**images, models=[str(teacher)], k=2, num_images=8, out=str(tmp_path / "swaps"))
    shutil.copytree(sweep_folder / "teachers" / "p0-s0" / "teacher", teacher)
    first = swaps.run(**options).result.rows[0]
    assert swaps.run(**options).result.rows[0].angle == first.angle
    shutil.rmtree(teacher)
    assert swaps.run(**options).result.rows[0].angle == first.angle  # put together where the teacher is not
    shutil.copytree(sweep_folder / "teachers" / "p0.5-s0" / "teacher", teacher)
    with pytest.raises(RunError, match=r"\.json was made with another teacher under the same name: choose"):
        swaps.run(**options)
    shutil.rmtree(teacher)
    shutil.copytree(sweep_folder / "teachers" / "p0-s0" / "teacher", teacher)
    source.load(0).save(photos / "one more.png")
    with pytest.raises(RunError, match="was made on other images"):
        swaps.run(**options)


def test_a_cell_says_by_which_tokens_it_was_cut(sweep_folder: Path, tiny: SimpleNamespace, tmp_path: Path) -> None:
    """Teachers that are cut by other tokens are another experiment: they are not joined in one folder."""
    options = dict(**tiny.images, teachers=str(sweep_folder), k=2, num_images=8, out=str(tmp_path))
    done = swaps.run(**options, tokens="all", cells="p0-s0")
    (row,) = done.result.rows
    of_sweep = StochasticDepth.read(sweep_folder).rows[0]
    assert of_sweep.cell == row.cell and row.phases == of_sweep.similarity.phases  # the sweep cuts by all tokens
    with pytest.raises(RunError, match=r"other options .*tokens: all -> pooled"):
        swaps.run(**options)
