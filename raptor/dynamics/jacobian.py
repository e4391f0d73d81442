"""Leading singular values of the maps between normalised states: which small turn grows most, and by how much.

Each token of a state is a point `x̂` on the unit sphere; its norm is kept at the value on the clean path. Blocks
`l+1..m` then map the product of the spheres at layer l to that at layer m. The Jacobian of this map takes tangent
vectors (for every token orthogonal to its `x̂`) to tangent vectors. Its largest singular value is the growth of the
worst small perturbation, its mean over random directions the growth of a typical one. For a token group the
perturbation is confined to the tokens of the group, and its growth is measured on them.

No Jacobian is formed: power iteration needs only its products with a vector (forward mode) and those of its transpose
(reverse mode), so memory does not depend on the number of images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from raptor.data.stream import Batch
from raptor.devices import full_precision
from raptor.dynamics.stability import seeded_generator
from raptor.dynamics.states import measured_groups, unit
from raptor.phases.cut import Phases, check_phases
from raptor.streaming import ImageMoments, Record, Spread
from raptor.vit.trajectory import at_least_float32
from raptor.vit.view import Context, ViT


@dataclass
class JacobianResult(Record):
    """Growth of small turns, spread over images, by group.

    step, step_random: `(L,)`, the largest singular value of each step (l to l+1, at index l) and the mean growth of
    random directions. phase, phase_random: `(k,)`, the same of the composition of each phase's steps.
    last_change: largest relative change of a singular value in its last iteration; power iteration approaches from
    below.
    """

    phases: list[int]
    step: dict[str, Spread]
    step_random: dict[str, Spread]
    phase: dict[str, Spread]
    phase_random: dict[str, Spread]
    last_change: float
    num_images: int


def measure_jacobians(
    vit: ViT,
    batches: Iterable[Batch],
    phases: Sequence[int] | None = None,
    *,
    max_iterations: int = 20,
    tolerance: float = 0.01,
    num_random: int = 4,
    seed: int = 0,
) -> JacobianResult:
    """Leading singular values of every step and of every phase, of a teacher, a surrogate or an untrained model.

    Args:
        batches: such as `raptor.data.iterate(...)`; memory grows with their size, not with their number.
        phases: their lengths; by default those of a surrogate, else depth as one phase.
        max_iterations: of each power iteration, which ends before when no value changes by more than `tolerance` of it.
        tolerance: smaller ones give more exact values and take longer.
        num_random: random directions whose growth is averaged.
        seed: of the directions.
    """
    lengths = phases_of(vit, phases)
    steps = [(layer, layer + 1) for layer in range(vit.num_layers)]
    # A phase is measured as one map: the worst directions of its steps need not follow from each other.
    spans = steps + [(first - 1, last) for first, last in lengths.spans]
    groups = measured_groups(vit.groups)
    moments = ImageMoments()
    last_change = 0.0
    for number, path in enumerate(sphere_paths(vit, batches)):
        generator = seeded_generator(path.units[0].device, seed, number)
        by_group = []
        for tokens in groups.values():
            # Each group has its own worst direction: the worst of all tokens says nothing about cls.
            growths = []
            for first, last in spans:
                random_b = path.random_growth(first, last, tokens, num_random, generator)
                top_b, change = path.top_growth(first, last, tokens, max_iterations, tolerance, generator)
                growths.append(torch.stack([top_b, random_b], -1))
                last_change = max(last_change, change)
            by_group.append(torch.stack(growths, 1))
        moments.update(torch.stack(by_group, 1))  # (B, groups, spans, 2)
    spread = moments.result()
    result = JacobianResult(list(lengths), {}, {}, {}, {}, last_change, spread.num_images)
    for g, name in enumerate(groups):
        result.step[name] = spread[g, : vit.num_layers, 0]
        result.step_random[name] = spread[g, : vit.num_layers, 1]
        result.phase[name] = spread[g, vit.num_layers :, 0]
        result.phase_random[name] = spread[g, vit.num_layers :, 1]
    return result


def phases_of(vit: ViT, phases: Sequence[int] | None) -> Phases:
    """The given phase lengths, else those of a surrogate, else depth as one phase."""
    if phases is None:
        phases = vit.phases or [vit.num_layers]
    return check_phases(vit, phases)


def sphere_paths(vit: ViT, batches: Iterable[Batch]) -> Iterator[SpherePath]:
    """The path of each batch, in the precision of the model's weights."""
    if vit.dtype.itemsize < 4:
        raise ValueError(f"{vit.name} has weights in half precision, in which derivatives are noise: open it in fp32")
    for batch in batches:
        # The path needs no gradients: each map runs again where its derivative is taken.
        with torch.no_grad(), full_precision(vit.device):
            a_0, context = vit.embed(batch.images.to(vit.device))
            states = vit.unroll(a_0, context)
        yield SpherePath(vit, context, states)


@contextmanager
def _differentiable(device: torch.device) -> Iterator[None]:
    """Inside the context, blocks run code that has derivatives of both modes, in full fp32."""
    # Fused attention has no forward-mode derivative, and blocks of a surrogate run folded, undifferentiable code where
    # gradients are disabled.
    with full_precision(device), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        yield


class SpherePath:
    """The normalised states of a batch along depth, and the linear maps between their tangent spaces.

    A tangent vector is `(B, T, D)`; its length, over all tokens and coordinates, is one number per image.
    """

    def __init__(self, vit: ViT, context: Context, states: Sequence[Tensor]) -> None:
        self.vit = vit
        self.context = context
        self.units = [unit(state) for state in states]
        self.norms = [torch.linalg.vector_norm(at_least_float32(a), dim=-1, keepdim=True) for a in states]

    def run(self, unit_btd: Tensor, first: int, last: int) -> Tensor:
        """The map from unit states at layer `first` to unit states at layer `last`."""
        return unit(self.vit.unroll(self.norms[first] * unit_btd, self.context, first, last)[-1])

    def push(self, first: int, last: int, tangent_btd: Tensor) -> Tensor:
        """The Jacobian's product with a tangent vector at layer `first`: a tangent vector at layer `last`."""
        run = partial(self.run, first=first, last=last)
        with _differentiable(self.vit.device):
            pushed_btd: Tensor = torch.func.jvp(run, (self.units[first],), (tangent_btd,))[1]
        return pushed_btd.detach()

    def pull(self, first: int, last: int) -> Callable[[Tensor], Tensor]:
        """The product of the Jacobian's transpose with vectors at layer `last`, for any number of them."""
        # One forward pass serves every iteration: only the vector at the end changes.
        unit_btd = self.units[first].detach().requires_grad_()
        with _differentiable(self.vit.device):
            end_btd = self.run(unit_btd, first, last)

        def product(vector_btd: Tensor) -> Tensor:
            with full_precision(self.vit.device):
                return torch.autograd.grad(end_btd, unit_btd, vector_btd, retain_graph=True)[0]

        return product

    def tangent(self, layer: int, vector_btd: Tensor, tokens: slice) -> Tensor:
        """The part of a vector that is tangent to the spheres of `tokens`; zero for the other tokens."""
        unit_btd = self.units[layer]
        # Along the state itself only its norm changes, which the sphere does not know.
        radial_bt = torch.linalg.vecdot(vector_btd, unit_btd)
        tangent_btd = torch.zeros_like(vector_btd)
        tangent_btd[:, tokens] = (vector_btd - radial_bt[..., None] * unit_btd)[:, tokens]
        return tangent_btd

    def random_tangent(self, layer: int, tokens: slice, generator: torch.Generator) -> Tensor:
        """A tangent vector of uniform direction and length 1."""
        like = self.units[layer]
        noise_btd = torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)
        return normalised(self.tangent(layer, noise_btd, tokens))

    def random_growth(
        self, first: int, last: int, tokens: slice, num_random: int, generator: torch.Generator
    ) -> Tensor:
        """Mean growth `(B,)` of random tangent vectors from layer `first` to layer `last`."""
        growths = []
        for _ in range(num_random):
            pushed_btd = self.push(first, last, self.random_tangent(first, tokens, generator))
            growths.append(length(pushed_btd[:, tokens]))
        return torch.stack(growths).mean(0)

    def top_growth(
        self,
        first: int,
        last: int,
        tokens: slice,
        max_iterations: int,
        tolerance: float,
        generator: torch.Generator,
    ) -> tuple[Tensor, float]:
        """Largest singular value `(B,)` from layer `first` to layer `last`, and its last relative change."""
        pull = self.pull(first, last)
        right_btd = self.random_tangent(first, tokens, generator)
        top_b = torch.zeros(len(right_btd), device=right_btd.device, dtype=right_btd.dtype)
        change = 1.0
        for _ in range(max_iterations):
            # J^T J without forming J: pushed forward, cut to the group's tangent space, pulled back.
            left_btd = normalised(self.tangent(last, self.push(first, last, right_btd), tokens))
            pulled_btd = self.tangent(first, pull(left_btd), tokens)
            before_b = top_b
            top_b = length(pulled_btd)
            right_btd = normalised(pulled_btd)
            change = float(((top_b - before_b).abs() / top_b.clamp_min(torch.finfo(top_b.dtype).tiny)).max())
            if change < tolerance:
                break
        return top_b, change


def length(vector_btd: Tensor) -> Tensor:
    """Length of each image's vector over tokens and coordinates, `(B,)`."""
    return torch.linalg.vector_norm(vector_btd, dim=(1, 2))


def normalised(vector_btd: Tensor) -> Tensor:
    """Each image's vector at length 1; a zero vector stays zero."""
    length_b = length(vector_btd).clamp_min(torch.finfo(vector_btd.dtype).tiny)
    return vector_btd / length_b[:, None, None]
