from __future__ import annotations

import pytest

from raptor.experiments.outcome import data_label, markdown


def test_tables() -> None:
    assert markdown(("a", "b"), [[0.12345, None]]) == "| a | b |\n|---|---|\n| 0.123 | – |"
    assert markdown(("a", "b", "c"), [[1, None, None], [2, None, 3]], optional=("b", "c")) == (
        "| a | c |\n|---|---|\n| 1 | – |\n| 2 | 3 |"
    )


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        ("shared/data/tiny-imagenet-100-*.zip", "tiny-imagenet-100"),
        ("x/imagenet-20-train-0.zip,x/imagenet-20-val.zip", "imagenet-20"),
        ("cifar10:/somewhere/package", "cifar10"),
        ("photos/", "photos"),
        ("scenes", "scenes"),
    ],
)
def test_data_labels(spec: str, label: str) -> None:
    assert data_label(spec) == label
