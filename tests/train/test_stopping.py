"""How ranks tell each other of a stop signal; what deaths and signals end in is tested with the loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from raptor.train import stopping
from raptor.train.stopping import Asked


def test_ranks_answer_one_step_later_and_one_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Asked(1)
    assert [alone.by_any(*asked) for asked in ((False, True), (True, False))] == [(False, True), (True, False)]
    monkeypatch.setattr(stopping, "_host_group", lambda: "hosts")

    def all_reduce(flags: Tensor, _op: object, group: str, async_op: bool) -> Any:
        assert group == "hosts" and async_op
        return SimpleNamespace(wait=lambda: flags.logical_or_(torch.tensor([0, len(seen) == 2])))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    several = Asked(2)
    seen = []
    for asked in ((True, False), (False, False), (False, False), (False, False)):
        seen.append(several.by_any(*asked))
    assert seen == [(False, False), (True, False), (False, True), (False, False)]
