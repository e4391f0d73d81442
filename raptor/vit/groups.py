"""Token groups: cls, registers and patches along the token axis, and one vector per image and group."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raptor.run import Record

GROUP_NAMES = ("cls", "registers", "patches")
POOLED = ("cls", "patches")  # the groups of which `image_vectors` makes vectors


@dataclass(frozen=True)
class TokenGroups(Record):
    """The numbers of cls tokens (0 or 1), registers and patches of one image; any of them may be 0.

    `order` is the order of the groups along the token axis.
    """

    cls: int
    registers: int
    patches: int
    order: tuple[str, ...] = GROUP_NAMES

    @property
    def num_tokens(self) -> int:
        return self.cls + self.registers + self.patches

    def slice(self, name: str) -> slice:
        """The place of the group `name` (or `all`) along the token axis; an empty slice if the group is absent."""
        if name == "all":
            return slice(0, self.num_tokens)
        if name not in GROUP_NAMES:
            raise ValueError(f"unknown token group {name!r}: choose from all, {', '.join(GROUP_NAMES)}")
        start = 0
        for before in self.order[: self.order.index(name)]:
            start += getattr(self, before)
        return slice(start, start + getattr(self, name))

    def at(self, num_tokens: int) -> TokenGroups:
        """The groups of an image of another size, which has other patches."""
        # Only patches depend on the size of an image.
        num_patches = num_tokens - self.cls - self.registers
        if num_patches < 0:
            raise ValueError(f"{num_tokens} tokens are fewer than {self.cls} cls and {self.registers} registers")
        return replace(self, patches=num_patches)

    def present(self) -> Iterator[tuple[str, builtins.slice]]:
        """Name and slice of each group that has tokens."""
        for name in GROUP_NAMES:
            where = self.slice(name)
            if where.stop > where.start:
                yield name, where


def pool(x_btd: Tensor, groups: TokenGroups) -> Tensor:
    """The image vectors concatenated: `(B, D)` or `(B, 2 D)`."""
    return torch.cat(list(image_vectors(x_btd, groups).values()), dim=-1)


def image_vectors(x_btd: Tensor, groups: TokenGroups, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The cls token (`cls`) and the mean patch (`patches`) of each image, each (B, D); absent groups are left out.

    All tokens except cls and registers count as patches, so the image size may differ from the size of `groups`.
    """
    groups = groups.at(x_btd.shape[1])
    vectors: dict[str, Tensor] = {}
    if groups.cls:
        cls_bd = x_btd[:, groups.slice("cls").start]
        vectors["cls"] = cls_bd.to(dtype or x_btd.dtype)
    if groups.patches:
        patches_bpd = x_btd[:, groups.slice("patches")]
        vectors["patches"] = patches_bpd.mean(1, dtype=dtype)
    return vectors
