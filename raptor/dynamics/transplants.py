"""Transplants between images: part of image A's state put into image B's, and whose class comes out.

At layer l some tokens of the host's state (image B) are replaced by those of the donor (image A), and the rest of the
model runs on. If states are drawn to class basins, a small part has no effect and a large one carries the donor's
class over. The control replaces the same tokens by the host's own, moved as far in a random direction: what it changes
is due to the size of the change, not to the donor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raptor.data.stream import Batch
from raptor.devices import full_precision
from raptor.dynamics.effects import Predict
from raptor.dynamics.stability import seeded_generator
from raptor.dynamics.states import measured_groups
from raptor.streaming import ImageMoments, Record, Spread
from raptor.vit.trajectory import at_least_float32
from raptor.vit.view import ViT

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)


@dataclass
class TransplantResult(Record):
    """Whose class comes out, as shares of the pairs. Axes: part, layer.

    parts: token group and share of its tokens that are replaced. donor, host: the prediction is that of the donor, or
    stays that of the host. random_donor, random_host: the same for the random control.
    num_pairs: pairs of images with different predictions.
    """

    parts: list[tuple[str, float]]
    layers: list[int]
    donor: Spread
    host: Spread
    random_donor: Spread
    random_host: Spread
    num_pairs: int


def measure_transplants(
    vit: ViT,
    batches: Iterable[Batch],
    *,
    shares: Sequence[float] = SHARES,
    layers: Sequence[int] | None = None,
    predict: Predict | None = None,
    seed: int = 0,
) -> TransplantResult:
    """Transplant tokens between the images of each batch whose predictions differ.

    Args:
        batches: such as `raptor.data.iterate(...)`; memory grows with their size, not with their number. The donor of
            an image is the next one of its batch with another predicted class.
        shares: of the tokens of a group that are replaced, drawn at random. A single token (cls) is replaced whole.
        layers: where; by default 0..L.
        predict: a head; by default the model's own.
        seed: of the tokens and of the random directions.
    """
    if predict is None and vit.num_classes:
        predict = vit.finish
    if predict is None:
        raise ValueError(f"{vit.name} has no head, so no class can come out: give one")
    if not shares or min(shares) <= 0 or max(shares) > 1:
        raise ValueError(f"shares of tokens lie above 0 and up to 1, got {list(shares)}")
    chosen = list(range(vit.num_layers + 1) if layers is None else layers)
    if not chosen or not all(0 <= layer <= vit.num_layers for layer in chosen):
        raise ValueError(f"layers {chosen} are not states of {vit.name}: states are numbered 0..{vit.num_layers}")
    groups = measured_groups(vit.groups)
    parts: list[tuple[str, float]] = []
    for name, tokens in groups.items():
        # Any share of one token is that token.
        if tokens.stop - tokens.start == 1:
            parts.append((name, 1.0))
        else:
            parts += zip([name] * len(shares), shares)
    moments = ImageMoments()
    with torch.no_grad(), full_precision(vit.device):
        for number, batch in enumerate(batches):
            a_0, context = vit.embed(batch.images.to(vit.device))
            states = vit.unroll(a_0, context)
            class_b = predict(states[-1]).argmax(-1)
            hosts = []
            donors = []
            for row, donor in enumerate(choose_donors(class_b.tolist())):
                if donor is not None:
                    hosts.append(row)
                donors.append(row if donor is None else donor)  # its own donor: dropped with its row below
            donor_b = torch.tensor(donors).to(vit.device)
            by_part = []
            for p, (name, share) in enumerate(parts):
                by_layer = []
                for layer in chosen:
                    generator = seeded_generator(vit.device, seed, number, p, layer)
                    host_btd = at_least_float32(states[layer])
                    donor_btd = host_btd[donor_b]
                    control_btd = host_btd + matched_noise(donor_btd - host_btd, generator)
                    is_replaced_bt1 = choose_tokens(host_btd, groups[name], share, generator)
                    outcomes = []
                    for given_btd in (donor_btd, control_btd):
                        # The same tokens in both cases, so that only what they are replaced by differs.
                        mixed_btd = torch.where(is_replaced_bt1, given_btd, host_btd)
                        found_b = predict(vit.unroll(mixed_btd, context, layer)[-1]).argmax(-1)
                        outcomes += [found_b == class_b[donor_b], found_b == class_b]
                    by_layer.append(torch.stack(outcomes, 1))
                by_part.append(torch.stack(by_layer, 2))
            outcome_bqpl = torch.stack(by_part, 2).float()
            moments.update(outcome_bqpl[hosts])
    if moments.num_images == 0:
        raise ValueError("no two images of a batch have different predictions: take more images, or larger batches")
    spread = moments.result()
    return TransplantResult(parts, chosen, spread[0], spread[1], spread[2], spread[3], spread.num_images)


def choose_donors(classes: Sequence[int]) -> list[int | None]:
    """For each image of a batch the next one with another class, going round; None where all have the same."""
    num = len(classes)
    donors: list[int | None] = []
    for row, own in enumerate(classes):
        donor = None
        for offset in range(num - 1, 0, -1):  # from the furthest on, so that the next one stays
            other = (row + offset) % num
            if classes[other] != own:
                donor = other
        donors.append(donor)
    return donors


def choose_tokens(state_btd: Tensor, tokens: slice, share: float, generator: torch.Generator) -> Tensor:
    """A random share of `tokens` (at least one), drawn for each image: a mask `(B, T, 1)`."""
    num_images = len(state_btd)
    num_tokens = tokens.stop - tokens.start
    # Rounding of the product, as of .1 * 30, must not add a token.
    num_chosen = math.ceil(share * num_tokens - 1e-9)
    order = torch.rand(num_images, num_tokens, generator=generator, device=state_btd.device).argsort(1)
    mask_bt = torch.zeros(state_btd.shape[:2], dtype=torch.bool, device=state_btd.device)
    mask_bt[:, tokens].scatter_(1, order[:, :num_chosen], True)
    return mask_bt[..., None]


def matched_noise(difference_btd: Tensor, generator: torch.Generator) -> Tensor:
    """For each token a random direction as long as its difference."""
    shape = difference_btd.shape
    noise_btd = torch.randn(shape, generator=generator, device=difference_btd.device, dtype=difference_btd.dtype)
    # A change as large as the donor's may break a state by its size alone, whatever its direction.
    length = torch.linalg.vector_norm(difference_btd, dim=-1, keepdim=True)
    return noise_btd * (length / torch.linalg.vector_norm(noise_btd, dim=-1, keepdim=True))
