"""Many small factorisations on the CPU, in parallel, with one core each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
_HOST_SIZE = 1024


def on_host_if_small(matrix: Tensor) -> Tensor:
    """`matrix` on the device that factorises it fastest: the CPU up to 1,024 rows, since it does several at once."""
    return matrix.cpu() if matrix.shape[-1] <= _HOST_SIZE else matrix


def parallel_map(function: Callable[..., Result], *arguments: Iterable[Any]) -> list[Result]:
    """`map` on as many threads as torch may use, each with one core for its own linear algebra.

    LAPACK factorises small matrices one by one on one core, and torch releases the GIL during each call.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        return list(map(function, *arguments))
    try:
        with ThreadPoolExecutor(num_threads, initializer=partial(torch.set_num_threads, 1)) as pool:
            return list(pool.map(function, *arguments))
    finally:
        torch.set_num_threads(num_threads)


def eigenvalues(matrices: Tensor) -> Tensor:
    """Eigenvalues of symmetric matrices `(n, D, D)` on the host, ascending: `(n, D)`.

    This makes few large calls, because a thread that often takes the GIL delays the one that feeds a GPU.
    """
    return torch.cat(parallel_map(torch.linalg.eigvalsh, matrices.cpu().chunk(torch.get_num_threads())))
