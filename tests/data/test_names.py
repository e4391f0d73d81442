"""Packed names are a sequence of strings like a list of them."""

from __future__ import annotations

import pickle

import pytest

from raptor.data.names import PackedNames

NAMES = ["b/1.png", "", "ü/漢字.jpg", "a\udcff.png", "b/1.png", "z" * 300]


def test_packed_names_are_the_list_they_were_packed_from() -> None:
    packed = PackedNames.pack(NAMES)
    assert len(packed) == 6 and list(packed) == NAMES and packed == NAMES and packed != NAMES[:-1]
    assert [packed[i] for i in range(-6, 6)] == NAMES * 2
    assert packed.index("a\udcff.png") == 3 and "ü/漢字.jpg" in packed and "c" not in packed
    assert PackedNames.pack(packed) is packed and list(PackedNames.pack([])) == [] and not PackedNames.pack([])
    assert list(pickle.loads(pickle.dumps(packed))) == NAMES
    with pytest.raises(IndexError):
        packed[6]


def test_a_choice_of_a_choice() -> None:
    chosen = PackedNames.pack(NAMES).take([5, 2, 2, 0])
    assert chosen == [NAMES[5], NAMES[2], NAMES[2], NAMES[0]] and chosen[-1] == NAMES[0]
    assert chosen.take([3, 1]) == [NAMES[0], NAMES[2]] and list(chosen.take([])) == []
