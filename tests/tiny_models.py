"""Small models with random weights, and what the tests compare them with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from raptor.devices import Ranks
from raptor.vit.open import open_vit
from raptor.vit.view import ViT


def shake(model: nn.Module, seed: int = 0, size: float = 0.1) -> nn.Module:
    """Move every parameter, so that layer scales of 1e-5, zero heads and zero tokens cannot hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=size)
    return model


def noise_images(vit: ViT, num: int = 3, seed: int = 1) -> Tensor:
    """`num` noise images of the size the view takes."""
    size = vit.preprocess.size
    return torch.randn(num, 3, size, size, generator=torch.Generator().manual_seed(seed))


def tiny_timm(name: str = "vit_tiny_patch16_224", depth: int = 4, shaken: bool = True, **kwargs) -> ViT:
    """A timm model of dim 48 and a 2x2 grid with random weights."""
    patch = 14 if "patch14" in name else 16
    options = dict(pretrained=False, embed_dim=48, num_heads=3, depth=depth, size=2 * patch) | kwargs
    vit = open_vit(f"timm/{name}", **options)
    if shaken:
        shake(vit.model)
    return vit


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class ThreadRanks(Ranks):
    """Ranks that are threads of this process: every one calls the same methods and waits for the others."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, size)
        object.__setattr__(self, "board", board)
        object.__setattr__(self, "barrier", barrier)

    def gather(self, value: Any) -> list[Any]:
        self.board[self.rank] = value  # type: ignore[attr-defined]
        self.barrier.wait(timeout=10)  # type: ignore[attr-defined]
        values = list(self.board)  # type: ignore[attr-defined]
        self.barrier.wait(timeout=10)  # type: ignore[attr-defined]
        return values

    def sum(self, value: Tensor | None) -> Tensor:
        return sum(torch.zeros(()) if part is None else part for part in self.gather(value))

    def fill(self, whole: Tensor, own: Tensor) -> None:
        for rank, rows in enumerate(self.gather(own)):
            whole[rank :: self.size] = rows

    def rows(self, rows: Tensor | None) -> list[Tensor]:
        found = [part for part in self.gather(rows) if part is not None]
        return found if self.is_first else []


def on_ranks(size: int, function: Callable[[Ranks], Any]) -> list[Any]:
    """`function` called once per rank, at the same time; what it returns on each."""
    board: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: function(ThreadRanks(rank, size, board, barrier)), range(size)))
