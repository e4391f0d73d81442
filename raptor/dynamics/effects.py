"""Effects of an intervention on depth: the turn of the last state by token group, and predictions that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from raptor.devices import ONE_PROCESS, Ranks
from raptor.dynamics.states import measured_groups, unit, unit_angle
from raptor.streaming import ImageMoments, Spread
from raptor.vit.view import Context, ViT, first_tensor

_BATCH = 32
HARDLY_VARIED = 0.9

Predict = Callable[[Tensor], Tensor]
"""A last state `(B, T, D)` to logits `(B, classes)`."""
_Plan = Sequence[tuple[int, int]]
"""Blocks to run, each with the layer whose arguments it gets, both numbered 1..L."""


def run_blocks(vit: ViT, x_btd: Tensor, context: Context, plan: _Plan) -> Tensor:
    """The state after running, in order, each block of `plan` at its place."""
    for block, place in plan:
        args, kwargs = context.calls[place - 1]
        x_btd = first_tensor(vit.blocks[block - 1](x_btd, *args, **kwargs))
    return x_btd


def default_predict(vit: ViT) -> Predict | None:
    """The model's own head, if it has one."""
    return vit.finish if vit.num_classes else None


class Effects:
    """Turn of the last state and agreement, collected over interventions and batches.

    Where one class takes more than `HARDLY_VARIED` of the clean predictions, "predictions stay" says nothing: there is
    no agreement then.
    """

    def __init__(self, vit: ViT, predict: Predict | None) -> None:
        self.spans = measured_groups(vit.groups)
        self.predict = predict
        self._angles, self._kept = ImageMoments(), ImageMoments()
        self._count_c: Tensor | None = None

    def clean(self, last_btd: Tensor) -> None:
        """Start a batch with its clean last state."""
        self._unit = unit(last_btd)
        logits = last_btd if self.predict is None else self.predict(last_btd)
        self._class, self._num_classes = logits.argmax(-1), logits.shape[-1]
        self._batch: list[tuple[Tensor, Tensor | None]] = []
        if self.predict is not None:
            count_c = torch.bincount(self._class, minlength=self._num_classes)
            self._count_c = count_c if self._count_c is None else self._count_c + count_c

    def turn(self, state_btd: Tensor, unit_btd: Tensor) -> Tensor:
        """Angle to a unit state by group: `(B, groups)`."""
        angle_bt = unit_angle(unit(state_btd), unit_btd)
        return torch.stack([angle_bt[:, span].mean(-1) for span in self.spans.values()], -1)

    def add(self, last_btd: Tensor) -> None:
        """One more intervention on this batch."""
        same = None if self.predict is None else self.predict(last_btd).argmax(-1).eq(self._class).float()
        self._batch.append((self.turn(last_btd, self._unit), same))

    def skip(self) -> None:
        """One more intervention on this batch, which another rank makes."""
        none_bg = self._unit.new_zeros(len(self._unit), len(self.spans))
        self._batch.append((none_bg, None if self.predict is None else none_bg[:, 0]))

    def end(self, ranks: Ranks = ONE_PROCESS) -> None:
        """End the batch; each intervention was made by one of the ranks."""
        self._angles.update(ranks.add_(torch.stack([turn for turn, _ in self._batch], -1)))
        if self.predict is not None:
            self._kept.update(ranks.add_(torch.stack([same for _, same in self._batch if same is not None], -1)))

    def angle(self) -> dict[str, Spread]:
        return by_group(self._angles, self.spans)

    def turns(self) -> np.ndarray:
        """The turn over all tokens of single images, `(images, interventions)`."""
        return self._angles.kept()[:, list(self.spans).index("all")]

    def stayed(self) -> np.ndarray:
        """Whether the prediction of single images stays, `(images, interventions)`."""
        return self._kept.kept()

    def agreement(self) -> Spread | None:
        if self._count_c is None or self._count_c.max() > HARDLY_VARIED * self._count_c.sum():
            return None
        return self._kept.result()


def by_group(moments: ImageMoments, spans: dict[str, slice]) -> dict[str, Spread]:
    spread = moments.result()
    return {name: spread[i] for i, name in enumerate(spans)}


def clean_batches(vit: ViT, images: Tensor) -> Iterator[tuple[list[Tensor], Context]]:
    """Clean states and block arguments of `images`, a few at a time."""
    for some in images.to(vit.device).split(_BATCH):
        a_0, context = vit.embed(some)
        yield vit.unroll(a_0, context), context
