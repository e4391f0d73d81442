"""Data that a program holds: the same images as from files, or one line that says what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_images import pixels, same
from torch.utils.data import DataLoader, Subset, TensorDataset

from raptor.commands.phases import phases
from raptor.data import ChosenData, Preprocess, iterate, open_data
from raptor.data.by_name import as_spec


class _Labelled:
    """A set with labels of its own."""

    def __init__(self, targets: Any, items: Any = None, classes: Any = None) -> None:
        self.targets = targets
        self.items = items
        self.classes = classes

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, number: int) -> Any:
        return Image.fromarray(pixels(number)) if self.items is None else self.items[number]


def test_labels_that_a_set_keeps() -> None:
    """Classes as files have them; targets that are not classes are not labels."""
    names = open_data(_Labelled(["cat", "ant", "cat"]), "all")
    assert names.labels == [1, 0, 1] and names.classes == ["ant", "cat"]
    assert open_data(_Labelled(torch.tensor([True, False])), "all").labels == [1, 0]
    assert open_data(_Labelled([0, 1], classes=["a", "b"]), "all").classes == ["a", "b"]
    assert open_data(_Labelled([0, 1], classes=2), "all").classes == ["0", "1"]
    for targets in ([0, None, 1], [0, -1, 1], [0.5, 1.0, 0.1], [[0], [1, 2], []], torch.eye(3)):
        assert open_data(_Labelled(targets), "all").labels is None
    some = as_spec(_Labelled([0, None, 10]))
    assert some.labels == [0, -1, 10] and some.select([0, 2]).labels == [0, 10]


def test_data_that_is_no_name_is_refused(tmp_path: Path) -> None:
    """In one line that says what was given."""

    class Endless:
        """Read as a list, it would never end."""

        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> int:
            return i

    cases = {
        "item 0 of the data is of type int": Endless(),
        "data must be a name, a folder, .* got generator": (i for i in range(3)),
        "data must be a name, a folder, .* got dict": {"a": 1},
        r"the shape \(N, 3, H, W\), this one has \(3, 8, 8\)": torch.zeros(3, 8, 8),
        r"has the shape \(5, 8, 8\)": torch.zeros(2, 5, 8, 8),
        r"values from -2.* before any normalisation": torch.full((2, 3, 8, 8), -2.0),
        "is torch.int64: give uint8": torch.zeros(2, 3, 8, 8, dtype=torch.int64),
        "that was given as data is empty": torch.zeros(0, 3, 8, 8),
        "no data is given": [],
        "no data is given: name a folder": "[]",
        "a list of files and other things": [tmp_path / "0.png", Image.new("RGB", (8, 8))],
        "item 0 of the data cannot be read: KeyError": _Labelled([0], {}),
    }
    for message, given in cases.items():
        for read in (open_data, ChosenData, lambda data: iterate(data, Preprocess(), 2)):
            with pytest.raises(ValueError, match=message) as caught:
                read(given)  # type: ignore[operator]
            assert "\n" not in str(caught.value)
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    assert len(open_data(tmp_path, "all")) == 1


def test_what_a_program_holds_is_data(tmp_path: Path) -> None:
    """A tensor, an array, pictures, files, a Dataset with labels, a part of it, and a loader: the same images."""
    arrays = np.stack([pixels(i) for i in range(6)])
    images = torch.from_numpy(arrays).permute(0, 3, 1, 2)
    labels = torch.tensor([2, 0, 1, 2, 0, 0])
    for i, array in enumerate(arrays):
        Image.fromarray(array).save(tmp_path / f"{i}.png")
    dataset = TensorDataset(images, labels)
    given = {
        "tensor": images,
        "real numbers": images.float() / 255,
        "array": arrays,
        "pictures": [Image.fromarray(array) for array in arrays],
        "files": sorted(tmp_path.glob("*.png")),
        "dataset": dataset,
        "part": Subset(TensorDataset(images.flip(0), labels.flip(0)), [5, 4, 3, 2, 1, 0]),
        "loader": DataLoader(dataset, batch_size=4, shuffle=True),
    }
    for kind, source in given.items():
        data = open_data(source, "all")
        assert len(data) == 6 and all(same(data.load(i), arrays[i]) for i in range(6)), kind
        assert data.labels == (labels.tolist() if kind in ("dataset", "part", "loader") else None)
        assert open_data(source, "all").fingerprint() == data.fingerprint()
        assert ChosenData(source).training().names == open_data(source, "train").names
    changed = images.clone()
    changed[3, 0, 0, 0] += 1
    assert open_data(changed, "all").fingerprint() != open_data(images, "all").fingerprint()


def test_commands_take_what_a_program_holds(tmp_path: Path) -> None:
    """The same similarity as of the files."""
    for i in range(12):
        Image.fromarray(pixels(i, 48)).save(tmp_path / f"{i:02d}.png")
    options: dict[str, Any] = dict(split="all", device="cpu", k=2, twin=False)
    images = torch.stack([torch.from_numpy(pixels(i, 48)).permute(2, 0, 1) for i in range(12)])
    found = [
        phases("scenes", data=data, out=str(tmp_path / f"out{number}"), **options)
        for number, data in enumerate((str(tmp_path), images, TensorDataset(images)))
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(other.models[0].similarity["all"], found[0].models[0].similarity["all"])


def test_two_sets_that_a_program_holds_are_two_however_many_images_they_have() -> None:
    """Their names are equal, and a twentieth of the second set was judged."""
    train, val = torch.rand(40, 3, 8, 8), torch.rand(40, 3, 8, 8)
    assert len(ChosenData(train, val).judged()) == 40
    assert len(ChosenData(train, train).judged()) == len(ChosenData(train).judged()) < 40
    assert len(open_data([open_data(val, "all")] * 2, "all")) == 40 == len(open_data(val, "all"))
