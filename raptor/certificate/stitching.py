"""Stitching: at which layers a surrogate makes its error, and where it only passes on what was made before.

At every layer l one model hands its state over to the other. The teacher finishes the surrogate's state,
`T_(l..L)(ã_l)`: what is missing then was made before l, and the teacher does not repair it. The surrogate finishes the
teacher's, `S_(l..L)(a_l)`: what is missing then is made after l. At l = 0 the surrogate does all, or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raptor.certificate.bootstrap import statistic_interval
from raptor.certificate.follow import check_pair
from raptor.certificate.heads import Head
from raptor.data.stream import Batch, sharing
from raptor.progress import track
from raptor.streaming import Array, Record, Rows, reduce_all
from raptor.vit.pair import check_teacher
from raptor.vit.trajectory import autocast
from raptor.vit.view import ViT


@dataclass
class HandOver(Record):
    """A state of one model, finished by the other one, for a hand-over at each of the layers 0..L.

    Attributes:
        error: E |a_L - x|_F / E |a_L|_F of the last state x that comes out, (L + 1,).
        interval: its 95 % bootstrap interval over images, (2, L + 1).
        agreement: the share of images with the teacher's class, (L + 1,); None without a head.
    """

    error: Array
    interval: Array
    agreement: Array | None = None


@dataclass
class Stitching(Record):
    """Both directions.

    Attributes:
        num_images: of the sample that they were measured on.
        by_teacher: T_(l..L)(ã_l), from 0 at l = 0 to the surrogate's own error at l = L.
        by_surrogate: S_(l..L)(a_l), from the surrogate's own error at l = 0 to 0 at l = L.
    """

    num_images: int
    by_teacher: HandOver
    by_surrogate: HandOver

    def line(self) -> str:
        """The block that adds most, in one line."""
        # Squares, because errors of different blocks are nearly orthogonal: their squares add up, their norms do not.
        # Only this direction: what the surrogate does to an exact state of its teacher it may never meet.
        square = self.by_teacher.error**2
        if not square[-1] > 0:
            return "no error is made in any block"
        added = np.diff(square) / square[-1]
        block = int(added.argmax()) + 1
        return (
            f"most error that the teacher does not repair is made in block {block}: {added[block - 1]:.0%} of the "
            f"squared error of the last state, whose relative error is {self.by_teacher.error[-1]:.3f}"
        )


@torch.no_grad()
def stitch(
    surrogate: ViT,
    teacher: ViT,
    batches: Iterable[Batch],
    *,
    head: Head | None = None,
    precision: str = "fp32",
    bootstrap: int = 1000,
    seed: int = 0,
) -> Stitching:
    """Stitch at every layer over a stream of images; of all ranks that share the batches.

    Costs about L + 3 forward passes per image. A teacher that the surrogate was not made from is refused: its blocks
    never saw such states, so that the error would say nothing of the surrogate.
    """
    check_pair(surrogate, teacher)
    check_teacher(surrogate, teacher, surrogate.name)
    norms = Rows()
    errors = Rows()
    agrees = Rows()
    ranks = sharing(batches)

    for batch in track(batches, "stitching", quiet=True):
        images = batch.images.to(teacher.device, non_blocking=True)
        with autocast(precision, teacher.device):
            # Block by block, not by hooks: a hand-over begins in the middle of a model.
            first_btd, context = teacher.embed(images)
            states = teacher.unroll(first_btd, context)
            own_first_btd, own_context = surrogate.embed(images)
            own_states = surrogate.unroll(own_first_btd, own_context)
            # One head for all: norm and head of a surrogate are its teacher's.
            chosen_b = None if head is None else head.logits(teacher, states[-1]).argmax(-1)
            error_bdl = images.new_zeros(len(images), 2, teacher.num_layers + 1)
            agrees_bdl = torch.zeros_like(error_bdl)
            for layer in range(teacher.num_layers + 1):
                by_teacher = teacher.unroll(own_states[layer], context, start=layer)[-1]
                by_surrogate = surrogate.unroll(states[layer], own_context, start=layer)[-1]
                for direction, last_btd in enumerate((by_teacher, by_surrogate)):
                    error_bdl[:, direction, layer] = _norms(last_btd.float() - states[-1].float())
                    if head is not None:
                        agrees_bdl[:, direction, layer] = head.logits(teacher, last_btd).argmax(-1) == chosen_b
        norms.add(_norms(states[-1]), batch.places)
        errors.add(error_bdl, batch.places)
        if head is not None:
            agrees.add(agrees_bdl, batch.places)
    if not any(ranks.gather(len(norms))):
        raise ValueError("no images to stitch on: the held-out data is empty")
    reduce_all(ranks, norms, errors, agrees)

    def finish() -> Stitching:
        error_ndl = errors.values().double().cpu().numpy()
        norm_n = norms.values().double().cpu().numpy()
        norm_ndl = np.broadcast_to(norm_n[:, None, None], error_ndl.shape)
        ends_2dl = statistic_interval([error_ndl, norm_ndl], lambda e, n: e / n, bootstrap, seed)
        error_dl = error_ndl.mean(0) / norm_n.mean()  # a ratio of means, as in Definition 1
        sides = []
        for direction in range(2):
            found = HandOver(error_dl[direction], ends_2dl[:, direction])
            if head is not None:
                found.agreement = agrees.values()[:, direction].double().mean(0).cpu().numpy()
            sides.append(found)
        return Stitching(len(norm_n), *sides)

    return ranks.first(finish)


def _norms(x_btd: Tensor) -> Tensor:
    """|x|_F of each image, in float32."""
    return x_btd.float().flatten(1).norm(dim=1)
