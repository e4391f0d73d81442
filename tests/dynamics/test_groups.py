from __future__ import annotations

import torch

from raptor.dynamics.groups import group_means, measured_groups
from raptor.vit.view import TokenGroups


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
