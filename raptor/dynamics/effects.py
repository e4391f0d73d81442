"""Effects of an intervention on depth: the turn of the last state by token group, and predictions that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from raptor.devices import ONE_PROCESS, Ranks
from raptor.dynamics.states import by_group, mean_by_group, measured_groups, unit, unit_angle
from raptor.streaming import ImageMoments, Spread
from raptor.vit.calls import first_tensor
from raptor.vit.view import Context, ViT

BATCH = 32
HARDLY_VARIED = 0.9

Predict = Callable[[Tensor], Tensor]
"""A last state `(B, T, D)` to logits `(B, classes)`."""
_Plan = Sequence[tuple[int, int]]
"""Blocks to run, each with the layer whose arguments it gets, both numbered 1..L."""


def run_blocks(vit: ViT, x_btd: Tensor, context: Context, plan: _Plan) -> Tensor:
    """The state after running, in order, each block of `plan` at its place."""
    for block, place in plan:
        # The arguments belong to the place, as rotary positions or a depth's row do, and the weights to the block.
        args, kwargs = context.calls[place - 1]
        x_btd = first_tensor(vit.blocks[block - 1](x_btd, *args, **kwargs))
    return x_btd


def clean_batches(vit: ViT, images: Tensor) -> Iterator[tuple[list[Tensor], Context]]:
    """Clean states and block arguments of `images`, a few at a time."""
    for some in images.to(vit.device).split(BATCH):
        a_0, context = vit.embed(some)
        yield vit.unroll(a_0, context), context


class Effects:
    """Turn of the last state and agreement, collected over interventions and batches.

    For each batch: `clean`, then `add` for each intervention, then `end`. Predictions are those of the model's own
    head, or of `predict`.

    Attributes:
        turns: angles to the clean last state, `(groups, interventions)` per image.
        stayed: whether the prediction stays, `(interventions,)` per image; empty without a head.
    """

    def __init__(self, vit: ViT, predict: Predict | None = None) -> None:
        self.spans = measured_groups(vit.groups)
        self.predict = predict
        if predict is None and vit.num_classes:
            self.predict = vit.finish
        self.turns = ImageMoments()
        self.stayed = ImageMoments()
        self._count_c: Tensor | int = 0

    def clean(self, last_btd: Tensor) -> None:
        """Start a batch with its clean last state."""
        self._unit = unit(last_btd)
        self._turns: list[Tensor] = []
        self._same: list[Tensor] = []
        if self.predict is not None:
            logits = self.predict(last_btd)
            # Judged against the model itself, not against labels: an intervention may also repair a mistake.
            self._class = logits.argmax(-1)
            self._count_c = self._count_c + torch.bincount(self._class, minlength=logits.shape[-1])

    def add(self, last_btd: Tensor | None) -> None:
        """One more intervention on this batch; None where another rank makes it."""
        if last_btd is None:
            # Ranks add up what they have, so a rank that makes no intervention has to give zeros.
            none_bg = self._unit.new_zeros(len(self._unit), len(self.spans))
            self._turns.append(none_bg)
            self._same.append(none_bg[:, 0])
            return
        self._turns.append(mean_by_group(unit_angle(unit(last_btd), self._unit), self.spans))
        if self.predict is not None:
            self._same.append(self.predict(last_btd).argmax(-1).eq(self._class).float())

    def end(self, ranks: Ranks = ONE_PROCESS) -> None:
        """End the batch; each intervention was made by one of the ranks."""
        self.turns.update(ranks.add_(torch.stack(self._turns, -1)))
        if self.predict is not None:
            self.stayed.update(ranks.add_(torch.stack(self._same, -1)))

    def result(self) -> tuple[dict[str, Spread], Spread | None]:
        """The turn by group and the share of predictions that stay, both `(interventions,)`.

        The share is None without a head, or where clean predictions hardly vary.
        """
        turns = by_group(self.turns.result(), self.spans)
        # Where one class takes nearly all clean predictions, "predictions stay" says nothing.
        if isinstance(self._count_c, int) or self._count_c.max() > HARDLY_VARIED * self._count_c.sum():
            return turns, None
        return turns, self.stayed.result()
