from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_images import write_tree

from raptor.data import ChosenData, InMemory, Preprocess, TrainStream, open_data
from raptor.data.images import JoinedInMemory
from raptor.experiments import raptors
from raptor.experiments.cells import Cell
from raptor.experiments.raptors import Machine, best_teacher, describe_pair, images_to_distil, load_pair, with_contents
from raptor.experiments.records import RaptorScores, StochasticDepth
from raptor.open import open_vit
from raptor.run import RunError
from raptor.vit.view import ViT


def test_the_best_teacher_is_the_most_accurate_one(sweep_folder: Path) -> None:
    rows = {row.cell: row for row in StochasticDepth.read(sweep_folder).rows}
    best = Path(best_teacher(sweep_folder)).parent.name
    assert rows[best].teacher.accuracy == max(row.teacher.accuracy for row in rows.values())


def test_without_null_models_there_is_no_best_one() -> None:
    assert RaptorScores(phases=[2, 2], curves={}).best_null() is None


def test_images_of_a_cell_may_be_joined_and_judged_elsewhere(tmp_path: Path) -> None:
    names = [f"{folder}/train/{label}/{folder}.png" for folder in ("one", "two") for label in "ab"]
    names += ["one/val/a/7.png", "two/val/a/8.png", "other/b/5.png", "other/a/6.png"]
    for i, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (40 * i, 9, 9)).save(tmp_path / name)
    parts = [str(tmp_path / "one"), str(tmp_path / "two")]
    options = {"data": parts, "val": str(tmp_path / "other"), "limit": None, "val_images": None}
    machine = Machine(tmp_path, "cpu")
    train, held_out = load_pair(options, Preprocess(size=16, resize=16), machine)
    assert len(train) == 4 and train.labels == [0, 1, 0, 1]
    assert [Path(name).stem for name in held_out.names] == ["6", "5"] and held_out.labels == [0, 1]
    assert load_pair({**options, "data": list(parts)}, Preprocess(size=16, resize=16), machine)[0] is train  # kept


@pytest.mark.parametrize("limit", [None, 6])
def test_more_images_stand_beside_those_in_memory(tmp_path: Path, limit: int | None) -> None:
    """The batches are those of all sets decoded anew."""
    names = [f"one/train/{label}/{i}.png" for label in "ab" for i in range(3)] + ["one/val/a/9.png"]
    write_tree(tmp_path, names + [f"more/m{i}.png" for i in range(5)])
    one, more = str(tmp_path / "one"), str(tmp_path / "more")
    options = {"data": one, "more_data": [more, more], "limit": limit}
    preprocess, machine = Preprocess(size=6, resize=8), Machine(tmp_path, "cpu")
    pair = load_pair(options, preprocess, machine)
    images, held_out, labelled = images_to_distil(pair, options, preprocess, machine)
    old = InMemory(ChosenData([one, more, more]).training(limit), preprocess)
    assert (images.keys, images.specs, images.name, images.labels) == (old.keys, old.specs, old.name, None)
    assert (held_out, labelled) == (pair[1], pair[0]) and images.fingerprint() == old.fingerprint()
    streams = [TrainStream(data, preprocess, 4, augment="crop") for data in (images, old)]
    for step in range(7):
        assert torch.equal(*(stream.batch(step) for stream in streams))
    few = images.select([1, len(images) - 1, 0])
    assert torch.equal(few.batch([2, 1], preprocess, "cpu"), old.batch([0, len(old) - 1], preprocess, "cpu"))
    if limit is None:
        assert isinstance(images, JoinedInMemory) and images.kept[0] is pair[0] and len(images.kept[1].images) == 4


def test_the_images_of_a_cell_are_described_by_option(tmp_path: Path) -> None:
    further = ["one/val/8.png", "more/train/m.png", "more/val/n.png"]
    write_tree(tmp_path, [*(f"one/train/{i}.png" for i in range(4)), *further])
    options = {"data": str(tmp_path / "one"), "more_data": [str(tmp_path / "more")], "limit": None}
    first = describe_pair(options)
    counts = {option: {part: of["num_images"] for part, of in both.items()} for option, both in first.items()}
    assert counts == {"data": {"train": 4, "val": 1}, "more_data": {"train": 5, "val": 1}}
    Image.new("RGB", (9, 9)).save(tmp_path / "more" / "train" / "m.png")
    second = describe_pair(options)
    assert second["data"] == first["data"] and second["more_data"]["train"] != first["more_data"]["train"]


class Planned(Exception):
    pass


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("table1", {"model": "scenes", "tokens": "cls"}),
        ("ablation", {"model": "scenes", "tokens": "cls"}),
        ("partitions", {"model": "scenes", "tokens": "cls", "k": [2], "limit": 8, "val_images": 8}),
        ("swaps", {"models": ["scenes"], "tokens": "cls"}),
        ("stochastic_depth", {"tokens": "cls"}),
        ("untrained", {"tokens": "cls"}),
        ("budgets", {}),
    ],
)
def test_every_cell_gets_the_images_and_tokens_that_are_asked_for(name, options, tmp_path, monkeypatch) -> None:
    """As the command line gives them: one word as a list of one, as cells of earlier versions have it."""
    module, seen, described = import_module(f"raptor.experiments.{name}"), [], {}

    def stop(sweep: Any, _work: Any, images: Any, **_options: Any) -> None:
        seen.extend(sweep.cells)
        described.update(images())
        raise Planned

    monkeypatch.setattr(module, "run_sweep", stop)
    with pytest.raises(Planned):
        module.run(data=["scenes"], val=["scenes"], out=str(tmp_path), device="cpu", **options)
    assert seen and all((cell.options["data"], cell.options["val"]) == ("scenes", "scenes") for cell in seen)
    num_val = seen[0].options["val_images"] or len(open_data("scenes", "val"))
    assert described["data"]["val"]["num_images"] == num_val  # what notices other images later
    cut = [cell for cell in seen if cell.name != "teacher"]  # the one of table1 has no surrogate
    assert cut and all(cell.options.get("tokens") == options.get("tokens") for cell in cut)
    # A cell of a version whose default recipe had AdamW names no optimizer, and so is no cell of today's default.
    trained = [cell.options for cell in cut if {"recipe", "base"} & cell.options.keys()]
    assert bool(trained) is (name != "swaps")
    for given in trained:
        assert given.get("optimizer") == (None if given.get("recipe") == "paper" else "muon")


def test_cells_of_several_recipes_open_their_teacher_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def counted(source: str, **options: Any) -> ViT:
        opened.append(source)
        return open_vit(source, **options)

    monkeypatch.setattr(raptors, "open_vit", counted)
    plan = [
        Cell(f"{recipe}-{model}", {"model": model, "weights": None, "recipe": recipe})
        for model in ("scenes", "scenes-k2")
        for recipe in ("default", "paper", "nowhere.yaml")
    ]
    made = with_contents(plan, Machine(tmp_path, "cpu", 0))
    assert opened == ["scenes", "scenes-k2"]
    of_model = [["recipe", "teacher"], ["recipe", "teacher"], ["teacher"]]
    assert [sorted(cell.made_of) for cell in made] == [*of_model, *of_model]
    by_name = {cell.name: cell.made_of for cell in made}
    assert by_name["paper-scenes"]["teacher"] == by_name["default-scenes"]["teacher"]
    assert by_name["paper-scenes"]["recipe"] == by_name["paper-scenes-k2"]["recipe"]
    assert len({repr(contents) for contents in by_name.values()}) == 6


@pytest.mark.parametrize("name", ["table1", "ablation", "partitions", "swaps", "budgets", "figure1"])
def test_hub_code_runs_only_when_it_is_trusted(name: str, tmp_path: Path) -> None:
    given = {"swaps": "models", "figure1": "models"}.get(name, "model")
    entry = f"hub/{tmp_path}:entry"
    options = {given: [entry] if given == "models" else entry, "out": str(tmp_path / "out"), "device": "cpu"}
    run = import_module(f"raptor.experiments.{name}").run
    with pytest.raises((ValueError, RunError), match="add --trust_hub"):
        run(data="scenes", **options)
    with pytest.raises((ValueError, RunError, FileNotFoundError), match="hubconf"):  # trusted, but there is none
        run(data="scenes", **{**options, "out": str(tmp_path / "trusted")}, trust_hub=True)
