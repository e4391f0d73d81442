from __future__ import annotations

import numpy as np
import pytest
import torch

from raptor.dynamics.states import (
    angle,
    eigenvalues,
    group_means,
    measured_groups,
    on_host_if_small,
    parallel_map,
)
from raptor.vit.groups import TokenGroups


def test_group_means_are_raw_means_then_normalised() -> None:
    groups = TokenGroups(cls=1, registers=2, patches=5)
    states = [torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(l)) for l in range(4)]
    means = group_means(states, groups)
    x = torch.stack(states, 1).double()
    for name, tokens in {"all": x, "cls": x[:, :, :1], "registers": x[:, :, 1:3], "patches": x[:, :, 3:]}.items():
        expected = torch.nn.functional.normalize(tokens.mean(2), dim=-1)
        torch.testing.assert_close(means[name].double(), expected, atol=1e-6, rtol=0)


def test_absent_groups_are_left_out() -> None:
    groups = TokenGroups(cls=0, registers=0, patches=4)
    assert list(measured_groups(groups)) == ["all", "patches"]
    assert set(group_means([torch.randn(2, 4, 6)] * 2, groups)) == {"all", "patches"}


def rotated_pair(theta: float, dim: int = 384, num: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 vectors at exactly `theta`, of norms 3 and 7."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(num, dim, 2, generator=generator, dtype=torch.float64)).Q
    x, v = basis[..., 0], basis[..., 1]
    return 3 * x, 7 * (np.cos(theta) * x + np.sin(theta) * v)


def test_small_angle_in_float32() -> None:
    x, y = rotated_pair(1e-4)
    x, y = x.float(), y.float()
    assert torch.allclose(angle(x, y), torch.tensor(1e-4), rtol=1e-3)
    cosine = torch.nn.functional.cosine_similarity(x, y, dim=-1)
    naive = torch.arccos(cosine.clamp(max=1))
    assert (naive - 1e-4).abs().max() > 5e-5, "the naive form would do: the test shows nothing"


def test_angle_over_the_whole_range() -> None:
    for theta in (0.0, 1e-6, 0.3, np.pi / 2, 3.0, np.pi - 1e-6):
        x, y = rotated_pair(theta)
        assert torch.allclose(angle(x, y), torch.tensor(theta, dtype=torch.float64), atol=1e-12)


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
    small, large = (torch.empty(n, n, device="meta") for n in (1024, 1025))
    assert on_host_if_small(large).device.type == "meta"
    with pytest.raises(NotImplementedError):  # a meta tensor has no data to copy: the copy was tried
        on_host_if_small(small)
