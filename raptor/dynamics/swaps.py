"""Layer swaps: every pair of blocks exchanged, within a phase and across phases.

A swap starts from the clean state before its first block and runs the model's own blocks, each with the arguments that
the model passes at that place, in fp32. Its effect is the angle between the last state and the clean one, per token,
averaged over each group, and the share of images whose predicted class stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from torch import Tensor

from raptor.devices import ONE_PROCESS, Ranks, full_precision
from raptor.dynamics.effects import Effects, Predict, clean_batches, run_blocks
from raptor.phases.cut import Phases, check_phases
from raptor.streaming import Record, Spread
from raptor.vit.view import ViT

_KINDS = {"within": "within a phase", "across": "across phases"}
WITHOUT: tuple[tuple[int, ...], ...] = ((), (1,))
"""Blocks whose pairs are left out: swaps are judged with all blocks, and without block 1, which hardly bears any."""


@dataclass
class Swaps(Record):
    """Every pair of blocks (i < j) exchanged.

    angle: by group, the turn of the last state in radians, of shape `(pairs,)`. agreement: `(pairs,)` or None.
    matched_std: of `turn` (all tokens) and `agreement`, the deviation over images of across minus within at equal
    distance, for each of `WITHOUT`.
    """

    pairs: list[tuple[int, int]]
    phases: list[int]
    angle: dict[str, Spread]
    agreement: Spread | None
    num_images: int
    matched_std: dict[str, list[float | None]] = field(default_factory=dict)

    def compare(self, values: np.ndarray) -> dict[str, float]:
        """Means of `(pairs,)` values within and across phases, plain and at equal distance."""
        return compare_pairs(self.pairs, values, self.phases)

    def finding(self) -> str:
        turn = self.compare(self.angle["all"].mean)
        kept = {}
        if self.agreement is not None:
            kept = self.compare(self.agreement.mean)
        turns = []
        shares = []
        for name, where in _KINDS.items():
            # With one phase there is no pair across phases, with phases of one block none within.
            if np.isfinite(turn[name]):
                turns.append(f"{turn[name]:.2f} rad {where}")
                if kept:
                    shares.append(f"{kept[name]:.0%}")
        text = f"Swapping two blocks turns the last state by {' and '.join(turns)}"
        if np.isfinite(turn["within_matched"]):
            text += f" (at equal distance {turn['within_matched']:.2f} and {turn['across_matched']:.2f})"
        if shares:
            text += f"; {' and '.join(shares)} of predictions stay"
        return text + "."

    def matrix(self, values: np.ndarray) -> np.ndarray:
        """`(pairs,)` values as a symmetric `(L, L)` matrix with NaN on its diagonal."""
        num = sum(self.phases)
        # No block is swapped with itself, and a zero on the diagonal would look like a result.
        square = np.full((num, num), np.nan)
        for (i, j), value in zip(self.pairs, values):
            square[i - 1, j - 1] = value
            square[j - 1, i - 1] = value
        return square


def measure_swaps(
    vit: ViT,
    images: Tensor,
    phases: Sequence[int],
    predict: Predict | None = None,
    advance: Callable[[], None] | None = None,
    ranks: Ranks = ONE_PROCESS,
) -> Swaps:
    """Exchange every pair of blocks on `images` (N, 3, H, W).

    Args:
        phases: lengths, to separate pairs within a phase from pairs across phases.
        predict: a head; by default the model's own.
        advance: called after each of the `L (L - 1) / 2` pairs of each batch of 32 images.
        ranks: they share the pairs; each gives the same images.
    """
    phases = check_phases(vit, phases)
    pairs = list(combinations(range(1, vit.num_layers + 1), 2))
    effects = Effects(vit, predict)
    with full_precision(vit.device):
        for states, context in clean_batches(vit, images):
            effects.clean(states[-1])
            for number, (i, j) in enumerate(pairs):
                # Blocks before the first one of a pair are not touched, so the path starts at the clean state there.
                last_btd = None
                # Dealt out in turn, because the first pairs run more blocks than the last.
                if number % ranks.size == ranks.rank:
                    layers = range(i, vit.num_layers + 1)
                    exchanged = {i: j, j: i}
                    plan = [(exchanged.get(layer, layer), layer) for layer in layers]
                    last_btd = run_blocks(vit, states[i - 1], context, plan)
                effects.add(last_btd)
                if advance is not None:
                    advance()
            effects.end(ranks)
    turn_np = effects.turns.kept()[:, list(effects.spans).index("all")]
    matched_std = {"turn": _matched_std(pairs, turn_np, phases)}
    if effects.predict is not None:
        matched_std["agreement"] = _matched_std(pairs, effects.stayed.kept(), phases)
    return Swaps(pairs, list(phases), *effects.result(), len(images), matched_std)


def compare_pairs(
    pairs: Sequence[tuple[int, int]], values: np.ndarray, phases: Sequence[int], without: Sequence[int] = ()
) -> dict[str, float]:
    """Means of `(pairs,)` values over pairs of blocks of the same phase and of different phases.

    `within` and `across` are over all such pairs. `within_matched` and `across_matched` average over equal distances
    j - i first, each distance weighted equally, because pairs in different phases are further apart. Pairs with a block
    in `without` are left out. NaN where there is no such pair.
    """
    same = Phases.from_lengths(phases).same_phase()
    i_p, j_p = np.array(pairs).reshape(-1, 2).T
    is_kept = ~np.isin(i_p, without) & ~np.isin(j_p, without)
    is_within = same[i_p - 1, j_p - 1]
    found: dict[str, list[float]] = {
        "within": list(values[is_kept & is_within]),
        "across": list(values[is_kept & ~is_within]),
        "within_matched": [],
        "across_matched": [],
    }
    for distance in np.unique(j_p - i_p):
        is_here = is_kept & (j_p - i_p == distance)
        # A distance with pairs of one kind only would compare near pairs with far ones.
        if (is_here & is_within).any() and (is_here & ~is_within).any():
            found["within_matched"].append(values[is_here & is_within].mean())
            found["across_matched"].append(values[is_here & ~is_within].mean())
    return {name: float(np.mean(parts)) if parts else float("nan") for name, parts in found.items()}


def _matched_std(pairs: Sequence[tuple[int, int]], values: np.ndarray, phases: Phases) -> list[float | None]:
    """Deviation over images of across minus within at equal distance, for each of `WITHOUT`.

    values: `(images, pairs)`.
    """
    deviations: list[float | None] = []
    for without in WITHOUT:
        # The comparison is linear in the values, so its weight of each pair is its answer for that pair by itself.
        weights = []
        for one in np.eye(len(pairs)):
            compared = compare_pairs(pairs, one, phases, without)
            weights.append(compared["across_matched"] - compared["within_matched"])
        differences = values @ np.array(weights)
        deviation = None
        if len(values) > 1 and np.isfinite(differences).all():
            # Images are a sample, so the divisor is one less than their number.
            deviation = float(differences.std(ddof=1))
        deviations.append(deviation)
    return deviations
