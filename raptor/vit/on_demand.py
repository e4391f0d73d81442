"""Depth on demand: each image takes as many steps of each phase as its rule asks for.

A rule looks at the state of each image before and after one more step of a phase, and says for which images the phase
may end here. These images leave the batch, so that time is really saved, and wait for the others at the start of the
next phase. The same function runs a surrogate and its teacher: for a teacher the remaining blocks of a phase are left
out.

Two of the rules are null models: `RandomSkip` ends phases by chance, and `FixedLengths` shortens them for all images
alike. A rule that does not look at its images better than these has learned nothing about them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

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
    """Fires where a number that is measured in each step is below a threshold.

    `turn`: the angle in radians by which the image's vector (cls, or the mean patch) turned in this step.
    `second`: the change between two updates of that vector relative to the later update. Two hits in a row fire.
    `entropy`: the entropy in nats of the class probabilities that `read_out` gives for the state.
    `kl`: KL(before || after) in nats of the class probabilities of two successive states.
    """

    def __init__(self, name: str, threshold: float, groups: TokenGroups, read_out: ReadOut | None = None):
        if name not in RULES:
            raise ValueError(f"unknown rule {name!r}: choose from {', '.join(RULES)}, random")
        if name in ("entropy", "kl") and read_out is None:
            raise ValueError(f"the rule {name} reads class scores, and this model has no head: use turn or second")
        super().__init__()
        self.name = name
        self.threshold = threshold
        self.groups = groups
        self.read_out = read_out

    def value(self, before_btd: Tensor, after_btd: Tensor) -> Tensor:
        """The number of each image, (B,)."""
        if self.name == "turn":
            return turn(self._vector(before_btd), self._vector(after_btd))
        if self.name == "second":
            update_bd = self._vector(after_btd) - self._vector(before_btd)
            # Without an update before it the first number of a phase is infinite or NaN, and below no threshold.
            last_bd = self.memory.get("update", torch.full_like(update_bd, torch.inf))
            self.memory["update"] = update_bd
            return (update_bd - last_bd).norm(dim=-1) / update_bd.norm(dim=-1)
        # The state after a step is the one before the next step, so that it is read once.
        before_bc = self.memory.get("log_p")
        if self.name == "kl" and before_bc is None:
            before_bc = self._log_probabilities(before_btd)
        after_bc = self._log_probabilities(after_btd)
        if before_bc is None:
            return -(after_bc.exp() * after_bc).sum(-1)
        self.memory["log_p"] = after_bc
        return (before_bc.exp() * (before_bc - after_bc)).sum(-1)

    def fires(self, before_btd: Tensor, after_btd: Tensor, num_steps: int) -> Tensor:
        hit_b = self.value(before_btd, after_btd) < self.threshold
        if self.name != "second":
            return hit_b
        last_hit_b = self.memory.get("hit", torch.zeros_like(hit_b))
        self.memory["hit"] = hit_b
        return hit_b & last_hit_b

    def _vector(self, x_btd: Tensor) -> Tensor:
        """The vector of each image that its class is read from: cls, or the mean patch where there is no cls."""
        if self.groups.cls:
            return x_btd[:, self.groups.slice("cls").start].float()
        return image_vectors(x_btd, self.groups, torch.float32)["patches"]

    def _log_probabilities(self, x_btd: Tensor) -> Tensor:
        assert self.read_out is not None
        self.num_read_outs += len(x_btd)
        return F.log_softmax(self.read_out(x_btd).float(), dim=-1)


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
    return Measured(name, threshold, groups, read_out)


def turn(before_bd: Tensor, after_bd: Tensor) -> Tensor:
    """Angle between two vectors in radians, exact for small angles, where arccos loses half the digits."""
    before_bd = F.normalize(before_bd.float(), dim=-1)
    after_bd = F.normalize(after_bd.float(), dim=-1)
    half_chord_b = (after_bd - before_bd).norm(dim=-1) / 2
    return 2 * torch.asin(half_chord_b.clamp(max=1.0))


@dataclass(frozen=True)
class OnDemand:
    """What a batch gives, and how many blocks each of its images passed.

    Attributes:
        output: of the model, or of the `read_out` that was given.
        last_btd: the states that left the last phase.
        num_blocks_bk: blocks that each image passed in each phase.
        num_read_outs: how many states the rule has read class scores of.
    """

    output: Tensor
    last_btd: Tensor
    num_blocks_bk: Tensor
    num_read_outs: int

    @property
    def num_blocks_b(self) -> Tensor:
        return self.num_blocks_bk.sum(-1)


@torch.no_grad()
def run_on_demand(
    vit: Any,
    images: Tensor,
    exit: Rule | str | None = None,
    phases: Sequence[int] | None = None,
    read_out: ReadOut | None = None,
) -> OnDemand:
    """Run `images` (B, 3, H, W) through the phases, each image for as many steps as the rule asks for.

    Args:
        vit: a `raptor.vit.ViT`, whose file imports this one.
        exit: a rule, or its name with a threshold, such as `turn<.02`; None runs all blocks.
        phases: lengths of the phases, needed for a teacher; by default those of the surrogate.
        read_out: class scores of a state; by default the model's own head.
    """
    lengths = phases
    if lengths is None:
        lengths = vit.phases
    if lengths is None:
        raise ValueError(f"{vit.name} is not a surrogate: say where its phases are with phases=")
    if min(lengths, default=0) < 1 or sum(lengths) != vit.num_layers:
        raise ValueError(f"phases {list(lengths)} do not add up to the {vit.num_layers} layers of {vit.name}")
    rule = exit or Rule()
    if isinstance(rule, str):
        scores = read_out
        if scores is None and vit.num_classes:
            scores = vit.finish
        rule = parse_rule(rule, vit.groups, scores)
    x_btd, context = vit.embed(images)
    is_per_image = _find_per_image(vit, images, context)
    num_blocks_bk = torch.empty(len(images), len(lengths), dtype=torch.long, device=x_btd.device)
    num_read_before = rule.num_read_outs
    last = 0
    for phase, length in enumerate(lengths):
        first = last + 1
        last += length
        rule.begin(phase)
        rows = torch.arange(len(images), device=x_btd.device)
        own_context = context
        # Every row is filled: at the last layer of a phase all images leave.
        left_btd: Tensor | None = None
        for layer in range(first, last + 1):
            after_btd = vit.step(layer, x_btd, own_context)
            is_done_b = torch.ones_like(rows, dtype=torch.bool)
            # After the last layer nothing is left to decide, and reading classes takes time.
            if layer < last:
                is_done_b = rule.fires(x_btd, after_btd, layer - first + 1)
            x_btd = after_btd
            # The host has to know which images leave: the number of the others is the size of the next batch.
            leaving = is_done_b.nonzero().flatten()
            if len(leaving) == 0:
                continue
            if left_btd is None:
                # Like the state after a block: under autocast the one before it may have half its digits.
                left_btd = x_btd.new_empty(len(images), *x_btd.shape[1:])
            left_btd[rows[leaving]] = x_btd[leaving].to(left_btd.dtype)
            num_blocks_bk[rows[leaving], phase] = layer - first + 1
            if len(leaving) == len(rows):
                break
            staying = (~is_done_b).nonzero().flatten()
            rule.keep(staying)
            rows = rows[staying]
            x_btd = x_btd[staying]
            own_context = select_images(context, is_per_image, rows)
        assert left_btd is not None, "every image leaves a phase"
        x_btd = left_btd
    output = (read_out or vit.finish)(x_btd)
    return OnDemand(output, x_btd, num_blocks_bk, rule.num_read_outs - num_read_before)


def _find_per_image(vit: Any, images: Tensor, context: Any) -> list[bool]:
    """For each value that the model passes to its blocks, whether it is a tensor with a row for each image.

    Masks or positions may differ between images. Such a tensor's first dimension is the size of the batch, and is 1 for
    a batch of one image.
    """
    leaves, _ = tree_flatten(context.calls)
    found = [False] * len(leaves)
    # Most models pass no tensor at all, and embedding an image again would cost a third of a block.
    if len(images) == 1 or not any(isinstance(leaf, Tensor) for leaf in leaves):
        return found
    _, of_one = vit.embed(images[:1])
    for place, (leaf, single) in enumerate(zip(leaves, tree_flatten(of_one.calls)[0])):
        if isinstance(leaf, Tensor) and isinstance(single, Tensor):
            found[place] = leaf.shape == (len(images), *single.shape[1:]) and single.shape[:1] == (1,)
    return found


def select_images(context: Any, is_per_image: list[bool], rows: Tensor) -> Any:
    """The context of the images `rows` of a batch. `is_per_image` says which of its values have a row for each."""
    if not any(is_per_image):
        return context
    leaves, structure = tree_flatten(context.calls)
    for place, has_rows in enumerate(is_per_image):
        if has_rows:
            leaves[place] = leaves[place][rows.to(leaves[place].device)]
    return replace(context, calls=tree_unflatten(leaves, structure))
