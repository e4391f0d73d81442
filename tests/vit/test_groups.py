"""Token groups: their places along the token axis, and one vector per image and group."""

from __future__ import annotations

import pytest
import torch

from raptor.vit.groups import TokenGroups, image_vectors, pool


def test_token_groups() -> None:
    groups = TokenGroups(cls=1, registers=4, patches=256)
    assert groups.num_tokens == 261
    assert groups.slice("cls") == slice(0, 1)
    assert groups.slice("registers") == slice(1, 5)
    assert groups.slice("patches") == slice(5, 261)
    assert groups.slice("all") == slice(0, 261)
    assert dict(TokenGroups(0, 0, 9).present()) == {"patches": slice(0, 9)}
    assert [name for name, _ in TokenGroups(1, 0, 9).present()] == ["cls", "patches"]
    with pytest.raises(ValueError, match="choose from"):
        groups.slice("heads")


def test_vectors_of_images_of_another_size() -> None:
    x = torch.randn(2, 9, 6)
    vectors = image_vectors(x, TokenGroups(1, 2, 100))
    assert torch.equal(vectors["cls"], x[:, 0]) and torch.equal(vectors["patches"], x[:, 3:].mean(1))
    assert torch.equal(pool(x, TokenGroups(1, 2, 6)), torch.cat([x[:, 0], x[:, 3:].mean(1)], dim=-1))
    assert torch.equal(pool(x, TokenGroups(0, 4, 5)), x[:, 4:].mean(1))
    assert torch.equal(pool(x, TokenGroups(1, 8, 0)), x[:, 0])


def test_groups_of_another_number_of_tokens() -> None:
    groups = TokenGroups(1, 2, 4, ("cls", "patches", "registers"))
    assert groups.at(12).slice("registers") == slice(10, 12)
    with pytest.raises(ValueError, match="2 tokens are fewer than 1 cls and 2 registers"):
        groups.at(2)
