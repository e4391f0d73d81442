"""Which images are held out, and samples."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from raptor.data.split import choice_split, name_share, split_word


def test_share_is_known_and_uniform() -> None:
    """The split must never change between versions: values by hand from BLAKE2b."""
    digest = hashlib.blake2b(b"cat/1.png", digest_size=8).hexdigest()
    assert name_share("cat/1.png") == name_share("train/cat/1.png") == pytest.approx(int(digest, 16) / 2**64, abs=1e-15)
    shares = np.array([name_share(f"image_{i}.jpg") for i in range(20_000)])
    assert np.abs(np.sort(shares) - np.linspace(0, 1, 20_000)).max() < 1.63 / np.sqrt(20_000)  # KS test at 1 %
    assert (shares < 0.05).mean() == pytest.approx(0.05, abs=0.005)


def test_split_words() -> None:
    assert split_word("/x/imagenet-val-0003.tar") == "val" and split_word("/x/train/0003.tar") == "train"
    assert split_word("/test_run/shard-0003.tar") is None and split_word("strain-1.tar") is None


def test_choice_split_is_a_tenth_by_name() -> None:
    names = [f"train/a/{i}.jpg" for i in range(5000)]
    fit, held = choice_split(names)
    assert sorted(fit + held) == list(range(5000))
    assert abs(len(held) - 500) < 5 * math.sqrt(5000 * 0.09)
    shuffled = names[::-1]
    assert {shuffled[i] for i in choice_split(shuffled)[1]} == {names[i] for i in held}
    assert [len(part) for part in choice_split(["x", "y"])] == [1, 1]
    with pytest.raises(ValueError, match="at least two"):
        choice_split(["x"])
