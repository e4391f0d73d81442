"""Interventions on depth: layer swaps, phases run shorter and longer, a surrogate run past its last layer.

Every intervention starts from the clean state where it first differs and runs the model's own blocks, each with the
arguments that the model passes at that place, in fp32. Its effect is the angle between the last state and the clean
one, per token, averaged over each group, and the share of images whose predicted class stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from raptor.devices import ONE_PROCESS, Ranks, full_precision
from raptor.dynamics.effects import Effects, Predict, by_group, clean_batches, default_predict, run_blocks
from raptor.dynamics.states import unit
from raptor.fidelity.heads import Head
from raptor.fidelity.verdict import named_images
from raptor.phases import Phases, check_phases
from raptor.progress import Progress
from raptor.provenance import Provenance
from raptor.run import ResultFile
from raptor.streaming import ImageMoments, Record, Spread, decode, jsonable
from raptor.surrogate.surrogate import Step, surrogate_spec
from raptor.vit.trajectory import at_least_float32
from raptor.vit.view import ViT, first_tensor

_Advance = Callable[[], None]


def compare_pairs(
    pairs: Sequence[tuple[int, int]], values: np.ndarray, phases: Phases, without: Sequence[int] = ()
) -> dict[str, float]:
    """Means of `(pairs,)` values over pairs of blocks of one phase and of two, plain and at equal distance.

    `without`: blocks whose pairs are left out. NaN where there is no such pair.
    """
    kept = np.array([not {i, j} & set(without) for i, j in pairs])
    same = np.array([phases.phase_of(i) == phases.phase_of(j) for i, j in pairs])
    within, across = same & kept, ~same & kept
    distance = np.array([j - i for i, j in pairs])
    both = [d for d in np.unique(distance) if within[distance == d].any() and across[distance == d].any()]
    matched = {
        name: _mean([values[(distance == d) & kind].mean() for d in both])
        for name, kind in (("within_matched", within), ("across_matched", across))
    }
    return {"within": _mean(values[within]), "across": _mean(values[across])} | matched


_KINDS = {"within": "within a phase", "across": "across phases"}
WITHOUT: tuple[tuple[int, ...], ...] = ((), (1,))
"""Blocks whose pairs are left out: swaps are judged with all blocks, and without block 1, which bears hardly any."""


def _matched_std(
    pairs: Sequence[tuple[int, int]], values: np.ndarray, phases: Phases, without: Sequence[int]
) -> float | None:
    """Deviation over images of across minus within at equal distance, from `(images, pairs)` values."""
    weights = [compare_pairs(pairs, one, phases, without) for one in np.eye(len(pairs))]
    differences = values @ np.array([w["across_matched"] - w["within_matched"] for w in weights])
    return float(differences.std(ddof=1)) if len(values) > 1 and np.isfinite(differences).all() else None


@dataclass
class Swaps(Record):
    """Every pair of blocks (i < j) exchanged.

    angle: by group, the turn of the last state in radians, of shape `(pairs,)`. agreement: `(pairs,)` or None.
    within, across: means over pairs in the same phase and over pairs in different phases; matched: both means over
    equal distances j - i, each distance weighted equally, because pairs in different phases are further apart.
    matched_std: of `turn` (all tokens) and `agreement`, the deviation over images of across minus within at equal
    distance, for each of `WITHOUT`; empty in older files.
    """

    pairs: list[tuple[int, int]]
    phases: Phases
    angle: dict[str, Spread]
    agreement: Spread | None
    num_images: int
    matched_std: dict[str, list[float | None]] = field(default_factory=dict)

    def compare(self, values: np.ndarray) -> dict[str, float]:
        """Means of `(pairs,)` values within and across phases, plain and at equal distance."""
        return compare_pairs(self.pairs, values, self.phases)

    def finding(self) -> str:
        turn = self.compare(self.angle["all"].mean)
        kinds = {name: where for name, where in _KINDS.items() if np.isfinite(turn[name])}  # one phase has no across
        turns = " and ".join(f"{turn[name]:.2f} rad {where}" for name, where in kinds.items())
        text = f"Swapping two blocks turns the last state by {turns}"
        if np.isfinite(turn["within_matched"]):
            text += f" (at equal distance {turn['within_matched']:.2f} and {turn['across_matched']:.2f})"
        if self.agreement is not None:
            kept = self.compare(self.agreement.mean)
            text += f"; {' and '.join(f'{kept[name]:.0%}' for name in kinds)} of predictions stay"
        return text + "."

    def matrix(self, values: np.ndarray) -> np.ndarray:
        """`(pairs,)` values as a symmetric `(L, L)` matrix with NaN on its diagonal."""
        num = self.phases.num_layers
        square = np.full((num, num), np.nan)
        for (i, j), value in zip(self.pairs, values):
            square[i - 1, j - 1] = square[j - 1, i - 1] = value
        return square

    def to_dict(self) -> dict[str, Any]:
        """Matrices of means, block against block; comparisons; deviations over images."""
        means = {f"turn_{name}": spread.mean for name, spread in self.angle.items()}
        if self.agreement is not None:
            means["agreement"] = self.agreement.mean
        return {
            "finding": self.finding(),
            "num_images": self.num_images,
            "phases": list(self.phases),
            "compared": jsonable({name: self.compare(values) for name, values in means.items()}),
            "deviations": {f"turn_{name}": jsonable(self.matrix(s.std)) for name, s in self.angle.items()},  # type: ignore[arg-type]
            **({"matched_std": self.matched_std} if self.matched_std else {}),
        } | {name: jsonable(self.matrix(values)) for name, values in means.items()}

    @classmethod
    def from_dict(cls, saved: Any, where: str = "") -> Swaps:
        head = _SavedSwaps.from_dict(saved, where)
        pairs = list(combinations(range(1, sum(head.phases) + 1), 2))

        def values(matrix: Any, name: str) -> np.ndarray:
            square = decode(np.ndarray, matrix, f"{where}.{name}")
            if square.shape != (sum(head.phases),) * 2:
                raise ValueError(f"{where}.{name}: expected a matrix of the blocks, got shape {square.shape}")
            return np.array([square[i - 1, j - 1] for i, j in pairs])

        angle = {
            name.removeprefix("turn_"): Spread(
                values(saved.get(name), name), values(deviations, f"deviations.{name}"), num_images=head.num_images
            )
            for name, deviations in head.deviations.items()
        }
        agreement = None
        if saved.get("agreement") is not None:
            agreement = Spread(values(saved["agreement"], "agreement"), num_images=head.num_images)
        return cls(pairs, Phases(head.phases), angle, agreement, head.num_images, head.matched_std)


@dataclass
class _SavedSwaps(Record):
    """The keys of saved swaps whose names are fixed."""

    num_images: int
    phases: tuple[int, ...]
    deviations: dict[str, Any]
    matched_std: dict[str, list[float | None]] = field(default_factory=dict)


@dataclass
class Repetition(Record):
    """Each phase run n-1, n, n+1 and 2n times, the phases after it as usual.

    A teacher's phase is run n + m times by running its last m blocks once more; a surrogate's by repeating its last
    step, at that step's depth. n - 1 leaves out the last.
    counts: by phase. angle, exit_angle: by phase and group, the turn of the last state and of the state that leaves the
    phase, `(counts,)`. agreement: by phase, or None.
    """

    phases: Phases
    counts: list[list[int]]
    angle: list[dict[str, Spread]]
    exit_angle: list[dict[str, Spread]]
    agreement: list[Spread] | None
    num_images: int

    def turn(self, phase: int, count: int, group: str = "all") -> float:
        """The mean turn of the last state when `phase` (0..k-1) runs `count` times."""
        return float(self.angle[phase][group].mean[self.counts[phase].index(count)])

    def finding(self) -> str:
        extra = [self.turn(j, n + 1) for j, n in enumerate(self.phases)]
        fewer = [self.turn(j, n - 1) for j, n in enumerate(self.phases)]
        twice = [self.turn(j, 2 * n) for j, n in enumerate(self.phases)]
        text = f"One step more turns the last state by {_range(extra)} rad, one fewer by {_range(fewer)}"
        text += f", twice as many by {_range(twice)}; phase {int(np.argmax(twice)) + 1} bears it least"
        if self.agreement is not None:
            kept = [s.mean[self.counts[j].index(2 * n)] for j, (n, s) in enumerate(zip(self.phases, self.agreement))]
            text += f". With a phase doubled {_range(kept, percent=True)} of predictions stay"
        return text + "."

    def rows(self) -> list[dict[str, Any]]:
        """One row for each phase and count."""
        rows = []
        for j, counts in enumerate(self.counts):
            for c, count in enumerate(counts):
                row: dict[str, Any] = {"phase": j + 1, "length": self.phases[j], "times": count}
                row |= {f"turn_{name}": float(spread.mean[c]) for name, spread in self.angle[j].items()}
                row["exit_turn_all"] = float(self.exit_angle[j]["all"].mean[c])
                if self.agreement is not None:
                    row["agreement"] = float(self.agreement[j].mean[c])
                rows.append(row)
        return rows

    def to_dict(self) -> dict[str, Any]:
        spreads = {"turn": jsonable(self.angle), "exit_turn": jsonable(self.exit_angle)}
        head = {"finding": self.finding(), "num_images": self.num_images, "phases": list(self.phases)}
        return head | {"rows": self.rows(), "spreads": spreads}

    @classmethod
    def from_dict(cls, saved: Any, where: str = "") -> Repetition:
        found = _SavedRepetition.from_dict(saved, where)
        by_phase = [[row for row in found.rows if row.phase == j + 1] for j in range(len(found.phases))]
        agreement: list[Spread] | None = None
        if found.rows and found.rows[0].agreement is not None:
            kept = [decode(np.ndarray, [row.agreement for row in rows]) for rows in by_phase]
            agreement = [Spread(values, num_images=found.num_images) for values in kept]
        counts = [[row.times for row in rows] for rows in by_phase]
        phases = Phases(found.phases)
        return cls(phases, counts, found.spreads.turn, found.spreads.exit_turn, agreement, found.num_images)


@dataclass
class _SavedRow(Record):
    phase: int
    times: int
    agreement: float | None = None


@dataclass
class _SavedTurns(Record):
    turn: list[dict[str, Spread]]
    exit_turn: list[dict[str, Spread]]


@dataclass
class _SavedRepetition(Record):
    num_images: int
    phases: tuple[int, ...]
    rows: list[_SavedRow]
    spreads: _SavedTurns


@dataclass
class Extrapolation(Record):
    """A surrogate run past its last layer L with its last tied block: everything here is extrapolation.

    layers: L..L+extra. By group: norm and angle to `a_L` at each of them; speed of each step, `(extra,)`.
    agreement: with the prediction at L, or None. conditioning: what the depth does past L.
    """

    layers: list[int]
    norm: dict[str, Spread]
    angle: dict[str, Spread]
    speed: dict[str, Spread]
    agreement: Spread | None
    conditioning: str
    num_images: int

    def finding(self) -> str:
        speed, norm, angle = (getattr(self, name)["all"].mean for name in ("speed", "norm", "angle"))
        last = self.layers[-1]
        word = (
            "settles" if speed[-1] < speed[0] / 2 else "keeps turning" if speed[-1] < 2 * speed[0] else "turns faster"
        )
        text = f"Past layer {self.layers[0]} the state {word}: {speed[0]:.3f} rad at the first extra step, "
        text += f"{speed[-1]:.3f} at layer {last}, {angle[-1]:.2f} rad away in all, norm x{norm[-1] / norm[0]:.2f}"
        if self.agreement is not None:
            text += f"; {self.agreement.mean[-1]:.0%} of predictions stay"
        return text + " (extrapolation)."

    def to_dict(self) -> dict[str, Any]:
        """Means over all tokens layer by layer, L first (it has no speed); spreads by group."""
        names = {"turn": self.angle, "norm": self.norm, "speed": self.speed}
        lists = {name: spreads["all"].mean for name, spreads in names.items()}
        lists["speed"] = np.array([np.nan, *lists["speed"]])
        if self.agreement is not None:
            lists["agreement"] = self.agreement.mean
        return {
            "finding": self.finding(),
            "extrapolation": True,
            "conditioning": self.conditioning,
            "num_images": self.num_images,
            "layers": self.layers,
            "spreads": jsonable(names),
        } | jsonable(lists)

    @classmethod
    def from_dict(cls, saved: Any, where: str = "") -> Extrapolation:
        found = _SavedExtrapolation.from_dict(saved, where)
        by_name = found.spreads
        agreement = None if found.agreement is None else Spread(found.agreement, num_images=found.num_images)
        return cls(
            found.layers, by_name.norm, by_name.turn, by_name.speed, agreement, found.conditioning, found.num_images
        )


@dataclass
class _SavedPaths(Record):
    turn: dict[str, Spread]
    norm: dict[str, Spread]
    speed: dict[str, Spread]


@dataclass
class _SavedExtrapolation(Record):
    num_images: int
    layers: list[int]
    conditioning: str
    spreads: _SavedPaths
    agreement: np.ndarray | None = None


@dataclass
class Interventions(Record):
    """All interventions on one model; `extrapolation` only on a surrogate."""

    swaps: Swaps
    repetition: Repetition
    extrapolation: Extrapolation | None = None

    def findings(self) -> list[str]:
        """One sentence for each intervention."""
        parts = (self.swaps, self.repetition, self.extrapolation)
        return [part.finding() for part in parts if part is not None]

    def to_dict(self) -> dict[str, Any]:
        return {name: part for name, part in super().to_dict().items() if part is not None}


@dataclass
class InterventionsFile(ResultFile):
    """interventions.json: what `raptor dynamics` found when it changed the depth of a model.

    head: why there are no predictions, or which head gives them.
    """

    FILE: ClassVar[str] = "interventions.json"

    teacher: Interventions | None
    surrogate: Interventions | None
    findings: list[str] = field(default_factory=list)
    head: str | None = None
    data: str = "the data"
    split: str = "val"
    image_size: int | None = None
    num_images: int | None = None
    phases: list[int] | None = None
    class_names: dict[str, str] | None = None
    seed: int = 0
    provenance: Provenance = field(default_factory=Provenance)

    @property
    def images(self) -> str:
        """What was measured on, in words."""
        return named_images(self.num_images, self.split, self.data, self.image_size)

    def sides(self) -> dict[str, Interventions]:
        """The sides that were measured, the teacher first."""
        both = {"teacher": self.teacher, "surrogate": self.surrogate}
        return {name: side for name, side in both.items() if side is not None}


def swap_plan(first: int, second: int, num_layers: int) -> list[tuple[int, int]]:
    """Blocks from layer `first` on, with `first` and `second` exchanged."""
    exchanged = {first: second, second: first}
    return [(exchanged.get(layer, layer), layer) for layer in range(first, num_layers + 1)]


def repetition_plan(vit: ViT, span: tuple[int, int], count: int) -> list[tuple[int, int]]:
    """Blocks of a phase (first and last layer) when it runs `count` times."""
    first, last = span
    num = last - first + 1
    own = [(layer, layer) for layer in range(first, min(last, first + count - 1) + 1)]
    again = range(num + 1, count + 1)
    if vit.phases is not None:
        return own + [(last, last) for _ in again]
    return own + [(last - (count - m), last - (count - m)) for m in again]


def measure_swaps(
    vit: ViT,
    images: Tensor,
    phases: Sequence[int],
    predict: Predict | None = None,
    advance: _Advance | None = None,
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
    effects = Effects(vit, predict or default_predict(vit))
    with full_precision(vit.device):
        for states, context in clean_batches(vit, images):
            effects.clean(states[-1])
            for number, (i, j) in enumerate(pairs):
                if number % ranks.size == ranks.rank:
                    effects.add(run_blocks(vit, states[i - 1], context, swap_plan(i, j, vit.num_layers)))
                else:
                    effects.skip()
                if advance is not None:
                    advance()
            effects.end(ranks)
    kept = {"turn": effects.turns()} | ({} if effects.predict is None else {"agreement": effects.stayed()})
    spread = {name: [_matched_std(pairs, v, phases, without) for without in WITHOUT] for name, v in kept.items()}
    return Swaps(pairs, phases, effects.angle(), effects.agreement(), len(images), spread)


def measure_repetition(vit: ViT, images: Tensor, phases: Sequence[int], predict: Predict | None = None) -> Repetition:
    """Run each phase n-1, n, n+1 and 2n times on `images`."""
    phases = check_phases(vit, phases)
    counts = [sorted({n - 1, n, n + 1, 2 * n}) for n in phases]
    predict = predict or default_predict(vit)
    effects, exits = ([Effects(vit, p) for _ in phases] for p in (predict, None))
    with full_precision(vit.device):
        for states, context in clean_batches(vit, images):
            for j, (first, last) in enumerate(phases.spans):
                effects[j].clean(states[-1])
                exits[j].clean(states[last])
                for count in counts[j]:
                    plan = repetition_plan(vit, (first, last), count)
                    out = run_blocks(vit, states[first - 1], context, plan)
                    exits[j].add(out)
                    effects[j].add(vit.unroll(out, context, start=last)[-1])
                effects[j].end()
                exits[j].end()
    kept = [spread for e in effects if (spread := e.agreement()) is not None]
    return Repetition(
        phases, counts, [e.angle() for e in effects], [e.angle() for e in exits], kept or None, len(images)
    )


def measure_extrapolation(
    vit: ViT, images: Tensor, num_extra: int | None = None, predict: Predict | None = None
) -> Extrapolation:
    """Run a surrogate `num_extra` steps past its L layers (by default L more) on `images`."""
    spec = surrogate_spec(vit)
    tied = vit.blocks[-1]
    assert isinstance(tied, Step)
    num_extra = vit.num_layers if num_extra is None else num_extra
    if num_extra < 1:
        raise ValueError(f"extrapolation needs at least one extra step, got {num_extra}")
    layers = list(range(vit.num_layers, vit.num_layers + num_extra + 1))
    steps = [Step(tied.tied, layer).to(vit.device) for layer in layers[1:]]
    effects = Effects(vit, predict or default_predict(vit))
    norms, speeds = ImageMoments(), ImageMoments()
    with full_precision(vit.device):
        for states, context in clean_batches(vit, images):
            args, kwargs = context.calls[-1]
            effects.clean(states[-1])
            path = [states[-1]]
            for step in steps:
                path.append(first_tensor(step(path[-1], *args, **kwargs)))
            for state in path:
                effects.add(state)
            effects.end()
            norms.update(torch.stack([_norms(state, effects.spans) for state in path], -1))
            turns = [effects.turn(now, unit(before)) for before, now in pairwise(path)]
            speeds.update(torch.stack(turns, -1))
    held = {
        "table": "the table holds its last row",
        "mlp": "the MLP is evaluated at depths past the last",
        "none": "the block knows no depth",
    }[spec.conditioning]
    held = f"{held}; the adapters are those of the last depth" if spec.adapters else held
    spans = effects.spans
    return Extrapolation(
        layers, by_group(norms, spans), effects.angle(), by_group(speeds, spans), effects.agreement(), held, len(images)
    )


def intervene(
    teacher: ViT,
    surrogate: ViT | None,
    images: Tensor,
    phases: Sequence[int],
    head: Head | None,
    ranks: Ranks = ONE_PROCESS,
) -> dict[str, Interventions]:
    """Swaps and repetition of both sides, and extrapolation of the surrogate, on `images` (N, 3, H, W).

    Args:
        phases: their lengths, of both sides.
        head: gives the predictions whose agreement is measured; None leaves agreement out.
        ranks: they share the swaps; each gives the same images and gets the same result.
    """
    found: dict[str, Interventions] = {}
    for side, vit in (("teacher", teacher), ("surrogate", surrogate)):
        if vit is None:
            continue
        predict = _predictor(vit, head)
        num_pairs = vit.num_layers * (vit.num_layers - 1) // 2
        bar = Progress(f"swaps of the {side}", num_pairs * -(-len(images) // 32), "pairs")
        swaps = measure_swaps(vit, images, phases, predict, bar.advance, ranks)
        bar.finish()
        found[side] = ranks.first(partial(_with_rest, swaps, vit, images, phases, predict))
    return found


def _with_rest(swaps: Swaps, vit: ViT, images: Tensor, phases: Sequence[int], predict: Predict | None) -> Interventions:
    extrapolation = None if vit.phases is None else measure_extrapolation(vit, images, predict=predict)
    return Interventions(swaps, measure_repetition(vit, images, phases, predict), extrapolation)


def _predictor(vit: ViT, head: Head | None) -> Predict | None:
    if head is None:
        return None
    linear = head.linear
    return vit.finish if linear is None else lambda state_btd: linear.to(state_btd.device)(vit.features(state_btd))


def _norms(state_btd: Tensor, spans: dict[str, slice]) -> Tensor:
    norm_bt = torch.linalg.vector_norm(at_least_float32(state_btd), dim=-1)
    return torch.stack([norm_bt[:, span].mean(-1) for span in spans.values()], -1)


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _range(values: Sequence[float], percent: bool = False) -> str:
    low, high = (f"{v:.0%}" if percent else f"{v:.2f}" for v in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
