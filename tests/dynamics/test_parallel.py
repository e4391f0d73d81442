"""Factorisations on many threads give what one thread gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raptor.dynamics.parallel import eigenvalues, on_host_if_small, parallel_map


@pytest.mark.parametrize("num_threads", [1, 2])
def test_eigenvalues_are_numpys(num_threads: int) -> None:
    half = torch.randn(7, 5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrices = half.mT @ half
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        found = eigenvalues(matrices)
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    np.testing.assert_allclose(found, np.linalg.eigvalsh(matrices.numpy()), atol=1e-10)


def test_a_parallel_map_keeps_the_order_and_passes_errors_on() -> None:
    assert parallel_map(lambda a, b: a - b, range(20), [1] * 20) == [i - 1 for i in range(20)]
    with pytest.raises(ZeroDivisionError):
        parallel_map(lambda a: 1 // a, [1, 0])


def test_small_matrices_go_to_the_host() -> None:
    small, large = (torch.empty(n, n, device="meta") for n in (1, 1025))
    assert on_host_if_small(large).device.type == "meta"
    with pytest.raises(NotImplementedError):  # a meta tensor has no data to copy: the copy was tried
        on_host_if_small(small)
