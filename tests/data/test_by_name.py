"""Names that no reader knows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_images import pixels, same
from torch.utils.data import DataLoader, Subset, TensorDataset

from raptor.data import ChosenData, open_data, open_dense


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
    }
    for message, given in cases.items():
        for read in (open_data, ChosenData):
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


def test_unknown_data_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    cases = {
        "cifar-10": "did you mean cifar10",
        "scene": "did you mean scenes",
        "hf:user/set": "did you mean hf/user/set",
        str(tmp_path / "photo"): "did you mean .*photos",
        "": "give a folder",
        str(tmp_path / "photos"): "no images in folder",
        str(tmp_path / "no.zip"): "no file",
        f"wds/{tmp_path}/x-{{0..1}}.tar": "no file",
    }
    for spec, message in cases.items():
        with pytest.raises(ValueError, match=message) as caught:
            open_data(spec)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="unknown split"):
        open_data("scenes", "dev")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "task", "message"),
    [
        ("ade20", "segment", "did you mean ade20k:PATH"),
        ("scenes", "sort", "unknown dense task"),
        ("nyuv2:/nowhere/labelled.mat", "depth", "no file"),
        ("ade20k:/nowhere", "segment", "no file"),
        ("something", "depth", "give scenes"),
    ],
)
def test_bad_specs_are_named(spec: str, task: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_dense(spec, "train", task)
