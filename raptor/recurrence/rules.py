"""When an image has had enough of a phase.

A rule looks at the state of each image before and after one more step of a phase, and says for which images the phase
may end here. These images leave the batch, so a rule that remembers something keeps only the rows that stay.

Two of the rules are null models: `RandomSkip` ends phases by chance, and `FixedLengths` shortens them for all images
alike. A rule that does not look at its images better than these has learned nothing about them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from raptor.vit.groups import TokenGroups, image_vectors

Logits = Callable[[Tensor], Tensor]


class Rule:
    """Never ends a phase early; the base of the others."""

    def begin(self, phase: int, num_images: int) -> None:
        """A phase (0..k-1) begins with this many images."""

    def fires(self, before_btd: Tensor, after_btd: Tensor, num_steps: int) -> Tensor:
        """For each image, whether its phase may end after `num_steps` steps, the last one from `before` to `after`."""
        return torch.zeros(len(after_btd), dtype=torch.bool, device=after_btd.device)

    def keep(self, rows: Tensor) -> None:
        """Only these rows of the last batch go on."""


class Turn(Rule):
    """The image's vector (cls, or the mean patch) turned by less than `threshold` radians in this step."""

    def __init__(self, groups: TokenGroups, threshold: float):
        self.groups = groups
        self.threshold = threshold

    def fires(self, before_btd: Tensor, after_btd: Tensor, num_steps: int) -> Tensor:
        return turn(_vector(before_btd, self.groups), _vector(after_btd, self.groups)) < self.threshold


class SecondDifference(Rule):
    """Two updates in a row changed by less than `threshold`, relative to the size of the update, two times running."""

    def __init__(self, groups: TokenGroups, threshold: float):
        self.groups = groups
        self.threshold = threshold

    def begin(self, phase: int, num_images: int) -> None:
        self._last_bd: Tensor | None = None
        self._num_hits_b: Tensor | None = None

    def fires(self, before_btd: Tensor, after_btd: Tensor, num_steps: int) -> Tensor:
        update_bd = _vector(after_btd, self.groups) - _vector(before_btd, self.groups)
        if self._last_bd is None or self._num_hits_b is None:
            hit_b = torch.zeros(len(update_bd), dtype=torch.bool, device=update_bd.device)
            self._num_hits_b = hit_b.int()
        else:
            change_b = (update_bd - self._last_bd).norm(dim=-1)
            hit_b = change_b < self.threshold * update_bd.norm(dim=-1)
            self._num_hits_b = torch.where(hit_b, self._num_hits_b + 1, 0)
        self._last_bd = update_bd
        return self._num_hits_b >= 2

    def keep(self, rows: Tensor) -> None:
        if self._last_bd is not None and self._num_hits_b is not None:
            self._last_bd = self._last_bd[rows]
            self._num_hits_b = self._num_hits_b[rows]


class Entropy(Rule):
    """The class probabilities read from the state have an entropy below `threshold` nats."""

    def __init__(self, logits: Logits, threshold: float):
        self.logits = logits
        self.threshold = threshold

    def fires(self, before_btd: Tensor, after_btd: Tensor, num_steps: int) -> Tensor:
        log_p_bc = F.log_softmax(self.logits(after_btd).float(), dim=-1)
        return -(log_p_bc.exp() * log_p_bc).sum(-1) < self.threshold


class ReadOutChange(Rule):
    """KL(before || after) of the class probabilities read from two successive states is below `threshold` nats."""

    def __init__(self, logits: Logits, threshold: float):
        self.logits = logits
        self.threshold = threshold

    def fires(self, before_btd: Tensor, after_btd: Tensor, num_steps: int) -> Tensor:
        log_p_bc = F.log_softmax(self.logits(before_btd).float(), dim=-1)
        log_q_bc = F.log_softmax(self.logits(after_btd).float(), dim=-1)
        return (log_p_bc.exp() * (log_p_bc - log_q_bc)).sum(-1) < self.threshold


class RandomSkip(Rule):
    """Ends the phase of each image after each step with the same probability: a null model."""

    def __init__(self, probability: float, seed: int = 0):
        if not 0 <= probability <= 1:
            raise ValueError(f"a probability is between 0 and 1, not {probability:g}")
        self.probability = probability
        self._generator = torch.Generator().manual_seed(seed)

    def fires(self, before_btd: Tensor, after_btd: Tensor, num_steps: int) -> Tensor:
        drawn_b = torch.rand(len(after_btd), generator=self._generator)
        return (drawn_b < self.probability).to(after_btd.device)


class FixedLengths(Rule):
    """Ends each phase after the same number of steps for all images: a null model."""

    def __init__(self, lengths: Sequence[int]):
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a phase has at least one step, got lengths {list(lengths)}")
        self.lengths = tuple(lengths)
        self._length = 1

    def begin(self, phase: int, num_images: int) -> None:
        self._length = self.lengths[phase]

    def fires(self, before_btd: Tensor, after_btd: Tensor, num_steps: int) -> Tensor:
        is_done = num_steps >= self._length
        return torch.full((len(after_btd),), is_done, dtype=torch.bool, device=after_btd.device)


def parse_rule(text: str, groups: TokenGroups, logits: Logits | None = None) -> Rule:
    """The rule that `turn<.02`, `second<.1`, `entropy<.5`, `kl<.01` or `random<.3` names."""
    name, comparison, number = text.replace(" ", "").partition("<")
    try:
        threshold = float(number)
    except ValueError:
        threshold = math.nan
    if not comparison or not threshold > 0 or math.isinf(threshold):
        raise ValueError(f"cannot read the rule {text!r}: write a name and a positive threshold, such as turn<.02")
    if name == "turn":
        return Turn(groups, threshold)
    if name == "second":
        return SecondDifference(groups, threshold)
    if name == "random":
        return RandomSkip(threshold)
    if name not in ("entropy", "kl"):
        raise ValueError(f"unknown rule {name!r}: choose from turn, second, entropy, kl, random")
    if logits is None:
        raise ValueError(f"the rule {name} reads class scores, and this model has no head: use turn or second")
    return Entropy(logits, threshold) if name == "entropy" else ReadOutChange(logits, threshold)


def turn(before_bd: Tensor, after_bd: Tensor) -> Tensor:
    """Angle between two vectors in radians, exact for small angles, where arccos loses half the digits."""
    before_bd = F.normalize(before_bd.float(), dim=-1)
    after_bd = F.normalize(after_bd.float(), dim=-1)
    half_chord_b = (after_bd - before_bd).norm(dim=-1) / 2
    return 2 * torch.asin(half_chord_b.clamp(max=1.0))


def _vector(x_btd: Tensor, groups: TokenGroups) -> Tensor:
    """The vector of each image that its class is read from: cls, or the mean patch where there is no cls."""
    vectors = image_vectors(x_btd, groups, torch.float32)
    return vectors["cls"] if groups.cls else vectors["patches"]
