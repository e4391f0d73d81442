"""When an image has had enough of a phase: the rules of depth on demand.

A rule looks at the state of each image before and after one more step of a phase, and says for which images the phase
may end here. These images leave the batch, and what a rule remembers of them leaves with them.

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

ReadOut = Callable[[Tensor], Tensor]
"""Class scores (B, C) of a state (B, T, D)."""
RULES = ("turn", "second", "entropy", "kl")
"""The rules that look at images, by name; each fires below a threshold."""


class Rule:
    """Never ends a phase early; the base of the others.

    Attributes:
        num_read_outs: how many states the rule has read class scores of, which takes time too.
        memory: what it remembers of the images within a phase, with a row for each.
    """

    def __init__(self) -> None:
        self.num_read_outs = 0
        self.memory: dict[str, Tensor] = {}

    def begin(self, phase: int) -> None:
        """A phase (0..k-1) begins, with all images."""
        self.memory = {}

    def fires(self, before_btd: Tensor, after_btd: Tensor, num_steps: int) -> Tensor:
        """For each image, whether its phase may end after `num_steps` steps, the last one from `before` to `after`."""
        return torch.zeros(len(after_btd), dtype=torch.bool, device=after_btd.device)

    def keep(self, rows: Tensor) -> None:
        """Only these rows of the last batch go on."""
        for name, kept in self.memory.items():
            self.memory[name] = kept[rows]

    def rewind(self) -> None:
        """The last batch comes again: decide as for its first time."""


class Measured(Rule):
    """Fires where a number that is measured in each step is below a threshold."""

    def __init__(self, threshold: float):
        super().__init__()
        self.threshold = threshold

    def value(self, before_btd: Tensor, after_btd: Tensor) -> Tensor:
        """The number of each image, (B,)."""
        raise NotImplementedError

    def fires(self, before_btd: Tensor, after_btd: Tensor, num_steps: int) -> Tensor:
        return self.value(before_btd, after_btd) < self.threshold


class Turn(Measured):
    """The angle in radians by which the image's vector (cls, or the mean patch) turned in this step."""

    def __init__(self, groups: TokenGroups, threshold: float):
        super().__init__(threshold)
        self.groups = groups

    def value(self, before_btd: Tensor, after_btd: Tensor) -> Tensor:
        return turn(_vector(before_btd, self.groups), _vector(after_btd, self.groups))


class SecondDifference(Measured):
    """The change between two updates of the image's vector relative to the later update. Two hits in a row fire."""

    def __init__(self, groups: TokenGroups, threshold: float):
        super().__init__(threshold)
        self.groups = groups

    def value(self, before_btd: Tensor, after_btd: Tensor) -> Tensor:
        update_bd = _vector(after_btd, self.groups) - _vector(before_btd, self.groups)
        # A phase has no update before its first one: without it the difference is infinite.
        last_bd = self.memory.get("update", torch.full_like(update_bd, torch.inf))
        self.memory["update"] = update_bd
        # Without an update it is infinite or NaN, and neither is below a threshold.
        return (update_bd - last_bd).norm(dim=-1) / update_bd.norm(dim=-1)

    def fires(self, before_btd: Tensor, after_btd: Tensor, num_steps: int) -> Tensor:
        hit_b = super().fires(before_btd, after_btd, num_steps)
        last_hit_b = self.memory.get("hit", torch.zeros_like(hit_b))
        self.memory["hit"] = hit_b
        return hit_b & last_hit_b


class Entropy(Measured):
    """The entropy in nats of the class probabilities that are read from the state."""

    def __init__(self, read_out: ReadOut, threshold: float):
        super().__init__(threshold)
        self.read_out = read_out

    def value(self, before_btd: Tensor, after_btd: Tensor) -> Tensor:
        log_p_bc = self.log_probabilities(after_btd)
        return -(log_p_bc.exp() * log_p_bc).sum(-1)

    def log_probabilities(self, x_btd: Tensor) -> Tensor:
        self.num_read_outs += len(x_btd)
        return F.log_softmax(self.read_out(x_btd).float(), dim=-1)


class ReadOutChange(Entropy):
    """KL(before || after) in nats of the class probabilities that are read from two successive states."""

    def value(self, before_btd: Tensor, after_btd: Tensor) -> Tensor:
        # The state after a step is the one before the next step, so that it is read once.
        if "log_p" not in self.memory:
            self.memory["log_p"] = self.log_probabilities(before_btd)
        log_p_bc = self.memory["log_p"]
        self.memory["log_p"] = self.log_probabilities(after_btd)
        return (log_p_bc.exp() * (log_p_bc - self.memory["log_p"])).sum(-1)


class RandomSkip(Rule):
    """Ends the phase of each image after each step with the same probability: a null model."""

    def __init__(self, probability: float, seed: int = 0):
        if not 0 <= probability <= 1:
            raise ValueError(f"a probability is between 0 and 1, not {probability:g}")
        super().__init__()
        self.probability = probability
        # On the CPU, so that the same images are skipped on every device.
        self._generator = torch.Generator().manual_seed(seed)
        self._at_start = self._generator.get_state()

    def begin(self, phase: int) -> None:
        if phase == 0:
            self._at_start = self._generator.get_state()

    def rewind(self) -> None:
        self._generator.set_state(self._at_start)

    def fires(self, before_btd: Tensor, after_btd: Tensor, num_steps: int) -> Tensor:
        drawn_b = torch.rand(len(after_btd), generator=self._generator)
        return (drawn_b < self.probability).to(after_btd.device)


class FixedLengths(Rule):
    """Ends each phase after the same number of steps for all images: a null model."""

    def __init__(self, lengths: Sequence[int]):
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a phase has at least one step, got lengths {list(lengths)}")
        super().__init__()
        self.lengths = tuple(lengths)
        self._length = 1

    def begin(self, phase: int) -> None:
        self._length = self.lengths[phase]

    def fires(self, before_btd: Tensor, after_btd: Tensor, num_steps: int) -> Tensor:
        is_done = num_steps >= self._length
        return torch.full((len(after_btd),), is_done, dtype=torch.bool, device=after_btd.device)


def parse_rule(text: str, groups: TokenGroups, read_out: ReadOut | None = None, seed: int = 0) -> Rule:
    """The rule that `turn<.02`, `second<.1`, `entropy<.5`, `kl<.01` or `random<.3` names; only the last has a seed."""
    name, comparison, number = text.replace(" ", "").partition("<")
    try:
        threshold = float(number)
    except ValueError:
        threshold = math.nan
    # Written so that NaN fails as well.
    if not comparison or not threshold > 0 or math.isinf(threshold):
        raise ValueError(f"cannot read the rule {text!r}: write a name and a positive threshold, such as turn<.02")
    if name == "random":
        return RandomSkip(threshold, seed)
    return make_rule(name, threshold, groups, read_out)


def make_rule(name: str, threshold: float, groups: TokenGroups, read_out: ReadOut | None = None) -> Measured:
    """One of `RULES`; those that read classes need a `read_out`."""
    if name == "turn":
        return Turn(groups, threshold)
    if name == "second":
        return SecondDifference(groups, threshold)
    if name not in RULES:
        raise ValueError(f"unknown rule {name!r}: choose from {', '.join(RULES)}, random")
    if read_out is None:
        raise ValueError(f"the rule {name} reads class scores, and this model has no head: use turn or second")
    if name == "entropy":
        return Entropy(read_out, threshold)
    return ReadOutChange(read_out, threshold)


def turn(before_bd: Tensor, after_bd: Tensor) -> Tensor:
    """Angle between two vectors in radians, exact for small angles, where arccos loses half the digits."""
    before_bd = F.normalize(before_bd.float(), dim=-1)
    after_bd = F.normalize(after_bd.float(), dim=-1)
    half_chord_b = (after_bd - before_bd).norm(dim=-1) / 2
    return 2 * torch.asin(half_chord_b.clamp(max=1.0))


def _vector(x_btd: Tensor, groups: TokenGroups) -> Tensor:
    """The vector of each image that its class is read from: cls, or the mean patch where there is no cls."""
    if groups.cls:
        return x_btd[:, groups.slice("cls").start].float()
    return image_vectors(x_btd, groups, torch.float32)["patches"]
